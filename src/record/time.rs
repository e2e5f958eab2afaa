//! Times of rows, as people write them.

use chrono::{DateTime, Days, NaiveDate, SecondsFormat, TimeDelta, Utc};

/// Milliseconds since 1970 as RFC 3339 in UTC, to the second.
pub fn shown_time(milliseconds: i64) -> String {
    let time = DateTime::<Utc>::from_timestamp_millis(milliseconds).unwrap_or_default();
    time.to_rfc3339_opts(SecondsFormat::Secs, true)
}

/// A moment as milliseconds since 1970: RFC 3339, a day (`2026-01-31`, from its start in UTC), or how long ago (`90m`,
/// `36h`, `7d`). `None` for anything else.
pub fn parse_time(text: &str) -> Option<i64> {
    if let Ok(time) = DateTime::parse_from_rfc3339(text) {
        return Some(time.timestamp_millis());
    }
    if let Ok(day) = NaiveDate::parse_from_str(text, "%Y-%m-%d") {
        return Some(day.and_hms_opt(0, 0, 0)?.and_utc().timestamp_millis());
    }
    let unit = text.chars().last()?;
    let count: u32 = text.get(..text.len() - unit.len_utf8())?.parse().ok()?;
    let then = match unit {
        'm' => Utc::now().checked_sub_signed(TimeDelta::minutes(count.into()))?,
        'h' => Utc::now().checked_sub_signed(TimeDelta::hours(count.into()))?,
        'd' => Utc::now().checked_sub_days(Days::new(count.into()))?,
        _ => return None,
    };
    Some(then.timestamp_millis())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read_and_shown() {
        assert_eq!(shown_time(1_767_225_600_000), "2026-01-01T00:00:00Z");
        assert_eq!(parse_time("2026-01-01"), Some(1_767_225_600_000));
        assert_eq!(parse_time("2026-01-01T01:00:00+01:00"), Some(1_767_225_600_000));
        let (hour, day) = (parse_time("24h").unwrap(), parse_time("1d").unwrap());
        assert!((hour - day).abs() < 5000 && hour < Utc::now().timestamp_millis());
        for text in ["", "d", "7", "-7d", "7ä", "2026-13-01", "4294967296d", "4294967295d"] {
            assert_eq!(parse_time(text), None, "{text}");
        }
    }
}
