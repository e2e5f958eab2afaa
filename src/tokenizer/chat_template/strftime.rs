//! `datetime.strftime` for a naive local time in the C locale, as Python on Linux formats it.

use std::fmt::Write;

use chrono::{Datelike, NaiveDateTime, Timelike};

const WEEKDAYS: [&str; 7] = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"];

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];

/// How glibc pads a number, chosen by a flag after the percent sign.
#[derive(Clone, Copy)]
enum Padding {
    Default,
    None,
    Space,
    Zero,
}

/// Formats `time`. A directive that C does not know is kept as it stands.
pub(super) fn strftime(time: &NaiveDateTime, format: &str) -> String {
    let mut out = String::new();
    let mut characters = format.chars();
    while let Some(character) = characters.next() {
        if character != '%' {
            out.push(character);
            continue;
        }
        let directive = characters.as_str();
        let mut padding = Padding::Default;
        let mut upper = false;
        let mut name = characters.next();
        while let Some(flag) = name {
            match flag {
                '-' => padding = Padding::None,
                '_' => padding = Padding::Space,
                '0' => padding = Padding::Zero,
                '^' => upper = true,
                '#' | 'E' | 'O' => {}
                _ => break,
            }
            name = characters.next();
        }
        let start = out.len();
        let known = name.is_some_and(|name| write_directive(&mut out, time, name, padding));
        if known {
            if upper {
                let text = out.split_off(start).to_uppercase();
                out.push_str(&text);
            }
        } else {
            out.push('%');
            let used = directive.len() - characters.as_str().len();
            out.push_str(directive.get(..used).unwrap_or_default());
        }
    }
    out
}

fn write_directive(out: &mut String, time: &NaiveDateTime, name: char, padding: Padding) -> bool {
    let weekday = time.weekday().num_days_from_monday();
    let weekday_name = WEEKDAYS.get(weekday as usize).copied().unwrap_or_default();
    let month_name = MONTHS.get(time.month0() as usize).copied().unwrap_or_default();
    let hour12 = match time.hour() % 12 {
        0 => 12,
        hour => hour,
    };
    let mut number = |value: i64, width: usize, default: Padding| {
        let padding = match padding {
            Padding::Default => default,
            chosen => chosen,
        };
        // Writing to a String cannot fail.
        let _ = match padding {
            Padding::None => write!(out, "{value}"),
            Padding::Space => write!(out, "{value:width$}"),
            _ => write!(out, "{value:0width$}"),
        };
        true
    };
    let zero = Padding::Zero;
    match name {
        'd' => number(time.day().into(), 2, zero),
        'e' => number(time.day().into(), 2, Padding::Space),
        'm' => number(time.month().into(), 2, zero),
        'H' => number(time.hour().into(), 2, zero),
        'I' => number(hour12.into(), 2, zero),
        'k' => number(time.hour().into(), 2, Padding::Space),
        'l' => number(hour12.into(), 2, Padding::Space),
        'M' => number(time.minute().into(), 2, zero),
        'S' => number(time.second().into(), 2, zero),
        'f' => number((time.nanosecond() / 1000).into(), 6, zero),
        'j' => number(time.ordinal().into(), 3, zero),
        'Y' => number(time.year().into(), 1, zero),
        'C' => number(time.year().div_euclid(100).into(), 2, zero),
        'y' => number(time.year().rem_euclid(100).into(), 2, zero),
        'G' => number(time.iso_week().year().into(), 1, zero),
        'g' => number(time.iso_week().year().rem_euclid(100).into(), 2, zero),
        'V' => number(time.iso_week().week().into(), 2, zero),
        'u' => number(i64::from(weekday) + 1, 1, zero),
        'w' => number(i64::from(weekday + 1) % 7, 1, zero),
        'U' => number(week(time, (weekday + 1) % 7), 2, zero),
        'W' => number(week(time, weekday), 2, zero),
        'A' => text(out, weekday_name),
        'a' => text(out, weekday_name.get(..3).unwrap_or_default()),
        'B' => text(out, month_name),
        'b' | 'h' => text(out, month_name.get(..3).unwrap_or_default()),
        'p' => text(out, if time.hour() < 12 { "AM" } else { "PM" }),
        'P' => text(out, if time.hour() < 12 { "am" } else { "pm" }),
        'c' => text(out, &strftime(time, "%a %b %e %H:%M:%S %Y")),
        'x' | 'D' => text(out, &strftime(time, "%m/%d/%y")),
        'X' | 'T' => text(out, &strftime(time, "%H:%M:%S")),
        'r' => text(out, &strftime(time, "%I:%M:%S %p")),
        'R' => text(out, &strftime(time, "%H:%M")),
        'F' => text(out, &strftime(time, "%Y-%m-%d")),
        // A naive time has no zone.
        'z' | 'Z' => true,
        'n' => text(out, "\n"),
        't' => text(out, "\t"),
        '%' => text(out, "%"),
        _ => false,
    }
}

fn text(out: &mut String, text: &str) -> bool {
    out.push_str(text);
    true
}

/// The week of the year, for weeks that start on the day whose number `weekday` counts from.
fn week(time: &NaiveDateTime, weekday: u32) -> i64 {
    i64::from((time.ordinal0() + 7 - weekday) / 7)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_as_python_on_linux() {
        let time = chrono::NaiveDate::from_ymd_opt(2024, 7, 4)
            .and_then(|date| date.and_hms_micro_opt(15, 5, 9, 42))
            .unwrap();
        for (format, expected) in [
            ("%d %b %Y", "04 Jul 2024"),
            ("%B %-d, %Y", "July 4, 2024"),
            ("%Y-%m-%d", "2024-07-04"),
            ("%A %a %e|%_d|%k|%l", "Thursday Thu  4| 4|15| 3"),
            ("%H:%M:%S.%f %I%p %P", "15:05:09.000042 03PM pm"),
            ("%j %U %W %V %G %g %u %w", "186 26 27 27 2024 24 4 4"),
            (
                "%c|%x|%X|%D|%F|%T|%R|%r",
                "Thu Jul  4 15:05:09 2024|07/04/24|15:05:09|07/04/24|2024-07-04|15:05:09|15:05|03:05:09 PM",
            ),
            ("%^a %^B", "THU JULY"),
            ("100%% %z%Z.%n%t", "100% .\n\t"),
            ("%Q %", "%Q %"),
            ("%C%y", "2024"),
        ] {
            assert_eq!(strftime(&time, format), expected, "{format}");
        }
    }
}
