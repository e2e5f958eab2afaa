//! The figures by name: which way is better, and how tables show them.

/// Which way a figure is better.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Better {
    /// More.
    Higher,
    /// Less.
    Lower,
}

/// Of a figure that can be better or worse.
pub fn better(name: &str) -> Option<Better> {
    let name = name.strip_suffix("_best").unwrap_or(name);
    if name.ends_with("_tps")
        || name.ends_with("_rpm")
        || matches!(name, "acceptance_pct" | "conformance_pct")
    {
        Some(Better::Higher)
    } else if name.ends_with("_ms") || matches!(name, "seconds" | "peak_bytes" | "output_bytes") {
        Some(Better::Lower)
    } else {
        None
    }
}

/// A column of a table: its heading and its figure.
pub type Column = (&'static str, &'static str);

/// As a cell of a table.
pub fn shown(name: &str, value: f64) -> String {
    match name {
        "peak_bytes" | "output_bytes" if value < 1e7 => format!("{:.0} kB", value / 1e3),
        "peak_bytes" | "output_bytes" => format!("{:.0} MB", value / 1e6),
        "requests" | "completion_tokens" | "prompt_tokens" | "errors" | "refused" | "reply_tokens"
        | "clients" | "batch" => format!("{value:.0}"),
        _ if name.ends_with("_pct") => format!("{value:.0} %"),
        _ if value.abs() >= 100.0 => format!("{value:.0}"),
        _ if value.abs() >= 10.0 => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_know_their_direction() {
        assert_eq!(better("aggregate_tps_best"), Some(Better::Higher));
        assert_eq!(better("ttft_p95_ms"), Some(Better::Lower));
        assert_eq!(better("seconds_best"), Some(Better::Lower));
        assert_eq!(better("requests"), None);
    }

    #[test]
    fn three_digits_are_enough() {
        assert_eq!(shown("aggregate_tps", 1234.56), "1235");
        assert_eq!(shown("aggregate_tps", 12.345), "12.3");
        assert_eq!(shown("ttft_p50_ms", 1.234), "1.23");
        assert_eq!(shown("peak_bytes", 123_456_789.0), "123 MB");
        assert_eq!(shown("output_bytes", 123_456.0), "123 kB");
        assert_eq!(shown("conformance_pct", 100.0), "100 %");
    }
}
