//! Sizes on the command line: `10GB`, `1.5GiB`, `800MB`, a plain number of bytes. Decimals are exact.

const UNITS: [(&str, u64); 12] = [
    ("kib", 1 << 10),
    ("mib", 1 << 20),
    ("gib", 1 << 30),
    ("tib", 1 << 40),
    ("kb", 1_000),
    ("mb", 1_000_000),
    ("gb", 1_000_000_000),
    ("tb", 1_000_000_000_000),
    ("k", 1_000),
    ("m", 1_000_000),
    ("g", 1_000_000_000),
    ("t", 1_000_000_000_000),
];

/// Bytes that a text stands for.
///
/// # Errors
/// It is no size.
pub fn parse_size(text: &str) -> Result<u64, String> {
    parse(text, 1)
}

/// As [`parse_size`], but a plain number counts units of 10^9 bytes.
///
/// # Errors
/// It is no size.
pub fn parse_gigabytes(text: &str) -> Result<u64, String> {
    parse(text, 1_000_000_000)
}

/// As [`parse_size`], but a plain number counts units of 2^30 bytes.
///
/// # Errors
/// It is no size.
pub fn parse_gibibytes(text: &str) -> Result<u64, String> {
    parse(text, 1 << 30)
}

fn parse(text: &str, plain: u64) -> Result<u64, String> {
    let lower = text.trim().to_ascii_lowercase();
    let (digits, unit) = UNITS
        .iter()
        .find_map(|(name, unit)| Some((lower.strip_suffix(name)?, *unit)))
        .unwrap_or_else(|| match lower.strip_suffix('b') {
            Some(digits) => (digits, 1),
            None => (lower.as_str(), plain),
        });
    exact(digits.trim(), unit).ok_or_else(|| format!("`{text}` is no size; try 10GB, 1.5GiB or 800MB"))
}

/// The decimal number times the unit, rounded down to whole bytes.
fn exact(digits: &str, unit: u64) -> Option<u64> {
    let (whole, fraction) = digits.split_once('.').unwrap_or((digits, ""));
    let all_digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
    if whole.is_empty() && fraction.is_empty()
        || !all_digits(whole)
        || !all_digits(fraction)
        || fraction.len() > 15
    {
        return None;
    }
    let number = |text: &str| if text.is_empty() { Some(0) } else { text.parse::<u128>().ok() };
    let part =
        number(fraction)?.checked_mul(u128::from(unit))? / 10u128.pow(u32::try_from(fraction.len()).ok()?);
    u64::try_from(number(whole)?.checked_mul(u128::from(unit))?.checked_add(part)?).ok()
}

/// A size for people: `1.20 GB`, `93.1 MB`, `512 B`.
pub fn shown_size(bytes: u64) -> String {
    let units = [("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)];
    match units.into_iter().find(|(_, unit)| bytes as f64 >= *unit) {
        Some((name, unit)) => {
            let value = bytes as f64 / unit;
            let decimals = if value < 10.0 { 2 } else { usize::from(value < 100.0) };
            format!("{value:.decimals$} {name}")
        }
        None => format!("{bytes} B"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_exact() {
        for (text, expected) in [
            ("0", 0),
            ("123", 123),
            ("10GB", 10_000_000_000),
            ("0.29G", 290_000_000),
            ("1.5 GiB", 1_610_612_736),
            ("800mb", 800_000_000),
            (".5k", 500),
            ("1.b", 1),
            ("18446744073709551615", u64::MAX),
        ] {
            assert_eq!(parse_size(text), Ok(expected), "{text}");
        }
        for bad in ["", ".", "GB", "-1", "1e3", "1,5GB", "ten", "18446744073709551616", "99999999TB", "1 2"] {
            assert!(parse_size(bad).unwrap_err().contains("is no size"), "{bad}");
        }
        assert_eq!(parse_gigabytes("1.5"), Ok(1_500_000_000));
        assert_eq!(parse_gigabytes("1500MB"), Ok(1_500_000_000));
    }

    #[test]
    fn sizes_are_shown_with_three_digits() {
        let shown: Vec<_> = [0, 999, 1000, 93_123_456, 1_200_000_000, 123_456_789_012].map(shown_size).into();
        assert_eq!(shown, ["0 B", "999 B", "1.00 kB", "93.1 MB", "1.20 GB", "123 GB"]);
    }
}
