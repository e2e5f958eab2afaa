//! Lists of numbers in llama-bench's grammar: `128,512-4096*2` is 128, 512, 1024, 2048, 4096.

use std::fmt;

/// More values are a slip of the hand.
const MOST_VALUES: usize = 1000;

/// Whole numbers in the order they were written, and how they were.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct List(pub Vec<u64>);

impl fmt::Display for List {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let texts: Vec<String> = self.0.iter().map(u64::to_string).collect();
        f.write_str(&texts.join(","))
    }
}

/// Parses a list of `N`, `FIRST-LAST`, `FIRST-LAST+STEP` and `FIRST-LAST*FACTOR`, separated by commas, whose numbers
/// lie in `least..=most`.
///
/// # Errors
/// Says which item is wrong, and what it should have been.
pub fn parse(text: &str, least: u64, most: u64) -> Result<List, String> {
    let mut values = Vec::new();
    for (index, item) in text.split(',').enumerate() {
        let wrong = |why: String| format!("item {} (`{item}`) {why}", index + 1);
        let range = Range::parse(item.trim(), least, most).map_err(wrong)?;
        for value in range.values() {
            if values.len() == MOST_VALUES {
                return Err(wrong(format!("makes more than {MOST_VALUES} values")));
            }
            values.push(value);
        }
    }
    Ok(List(values))
}

/// For clap.
pub fn parser(
    least: u64,
    most: u64,
) -> impl Fn(&str) -> Result<List, String> + Clone + Send + Sync + 'static {
    move |text| parse(text, least, most)
}

#[derive(Clone, Copy)]
enum Next {
    Add(u64),
    Multiply(u64),
}

/// An item of a list.
struct Range {
    first: u64,
    last: u64,
    next: Next,
}

impl Range {
    fn parse(item: &str, least: u64, most: u64) -> Result<Self, String> {
        let number = |text: &str| -> Result<u64, String> {
            let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
            let value = digits.then(|| text.parse::<u64>().ok()).flatten();
            value
                .filter(|value| (least..=most).contains(value))
                .ok_or_else(|| format!("must be a whole number in [{least}, {most}], or a range of them"))
        };
        let Some((first, rest)) = item.split_once('-') else {
            let value = number(item)?;
            return Ok(Self { first: value, last: value, next: Next::Add(1) });
        };
        let (last, next) = match rest.find(['+', '*']) {
            None => (rest, Next::Add(1)),
            Some(at) => {
                let (last, step) = rest.split_at(at);
                let (sign, step) = step.split_at(1);
                let amount: Option<u64> = Some(step)
                    .filter(|step| step.bytes().all(|byte| byte.is_ascii_digit()))
                    .and_then(|step| step.parse().ok());
                match (sign, amount) {
                    ("+", Some(step)) if step > 0 => (last, Next::Add(step)),
                    ("*", Some(factor)) if factor > 1 => (last, Next::Multiply(factor)),
                    ("+", _) => return Err("must have a step of at least 1 behind the `+`".to_owned()),
                    _ => return Err("must have a factor of at least 2 behind the `*`".to_owned()),
                }
            }
        };
        let (first, last) = (number(first)?, number(last)?);
        match next {
            _ if first > last => Err(format!("must not go down from {first} to {last}")),
            Next::Multiply(_) if first == 0 => Err("must not multiply from 0 on".to_owned()),
            next => Ok(Self { first, last, next }),
        }
    }

    fn values(&self) -> impl Iterator<Item = u64> {
        let (last, next) = (self.last, self.next);
        std::iter::successors(Some(self.first), move |value| match next {
            Next::Add(step) => value.checked_add(step),
            Next::Multiply(factor) => value.checked_mul(factor),
        })
        .take_while(move |value| *value <= last)
    }
}

/// `--kv-quant`: `off`, `4` and `8`, separated by commas; `None` is off.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvList(pub Vec<Option<u8>>);

/// Parses it.
///
/// # Errors
/// Says which item is wrong.
pub fn parse_kv(text: &str) -> Result<KvList, String> {
    let item = |(index, item): (usize, &str)| match item.trim() {
        "off" => Ok(None),
        "4" => Ok(Some(4)),
        "8" => Ok(Some(8)),
        _ => Err(format!("item {} (`{item}`) must be off, 4 or 8", index + 1)),
    };
    text.split(',').enumerate().map(item).collect::<Result<_, _>>().map(KvList)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn values(text: &str) -> Result<Vec<u64>, String> {
        parse(text, 0, 1_000_000).map(|list| list.0)
    }

    #[test]
    fn lists_are_llama_benchs() {
        for (text, expected) in [
            ("128", vec![128]),
            ("1,4,8", vec![1, 4, 8]),
            ("128,512-4096*2", vec![128, 512, 1024, 2048, 4096]),
            ("0-3", vec![0, 1, 2, 3]),
            ("10-30+10", vec![10, 20, 30]),
            ("10-35+10", vec![10, 20, 30]),
            ("3-20*3", vec![3, 9]),
            ("5-5*2", vec![5]),
            (" 1, 2 ", vec![1, 2]),
            ("4,4", vec![4, 4]),
        ] {
            assert_eq!(values(text), Ok(expected), "{text}");
        }
    }

    #[test]
    fn what_is_wrong_is_told_with_its_place() {
        for (text, message) in [
            ("", "item 1 (``) must be a whole number in [0, 1000000], or a range of them"),
            ("1,x,3", "item 2 (`x`) must be a whole number"),
            ("1,,3", "item 2 (``) must be a whole number"),
            ("1,2-", "item 2 (`2-`) must be a whole number"),
            ("-5", "item 1 (`-5`) must be a whole number"),
            ("1.5", "item 1 (`1.5`) must be a whole number"),
            ("9-1", "item 1 (`9-1`) must not go down from 9 to 1"),
            ("1-9+0", "item 1 (`1-9+0`) must have a step of at least 1"),
            ("1-9*1", "item 1 (`1-9*1`) must have a factor of at least 2"),
            ("1-9*", "item 1 (`1-9*`) must have a factor of at least 2"),
            ("0-9*2", "item 1 (`0-9*2`) must not multiply from 0 on"),
            ("1,2000000", "item 2 (`2000000`) must be a whole number in [0, 1000000]"),
            ("7,0-999999", "item 2 (`0-999999`) makes more than 1000 values"),
            ("99999999999999999999", "item 1 (`99999999999999999999`) must be"),
            ("١", "item 1 (`١`) must be a whole number"),
        ] {
            let error = values(text).unwrap_err();
            assert!(error.starts_with(message), "{text}: {error}");
        }
    }

    #[test]
    fn schemes_are_named() {
        assert_eq!(parse_kv("off,8,4"), Ok(KvList(vec![None, Some(8), Some(4)])));
        assert_eq!(parse_kv("off,3").unwrap_err(), "item 2 (`3`) must be off, 4 or 8");
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(text in ".{0,40}", digits in "[-0-9,+*]{0,30}") {
            let _ = parse(&text, 0, u64::MAX);
            let _ = parse(&digits, 0, u64::MAX);
            let _ = parse_kv(&text);
        }

        #[test]
        fn a_list_is_read_back_as_it_is_shown(list in proptest::collection::vec(0u64..=1_000_000, 1..50)) {
            let list = List(list);
            prop_assert_eq!(parse(&list.to_string(), 0, 1_000_000), Ok(list));
        }

        #[test]
        fn ranges_stay_in_their_bounds(first in 1u64..5000, extent in 0u64..5000, step in 1u64..5000, factor in 2u64..9) {
            let last = first + extent;
            let factors = values(&format!("{first}-{last}*{factor}")).unwrap();
            prop_assert_eq!(factors[0], first);
            prop_assert!(factors.iter().all(|value| (first..=last).contains(value)));
            prop_assert!(factors.windows(2).all(|pair| pair[1] == pair[0] * factor));
            if let Ok(steps) = values(&format!("{first}-{last}+{step}")) {
                prop_assert_eq!(steps, (first..=last).step_by(step as usize).collect::<Vec<_>>());
            }
        }
    }
}
