//! Words of a command line in one argument, as a shell without expansions would split it.

/// Splits at blanks outside quotes; `\` takes the next character as it is, but not inside single quotes.
///
/// # Errors
/// A quote that is not closed, or nothing behind the last `\`.
pub fn split(text: &str) -> Result<Vec<String>, String> {
    let mut words = Vec::new();
    let mut word: Option<String> = None;
    let mut quote = None;
    let mut characters = text.chars();
    while let Some(c) = characters.next() {
        match (c, quote) {
            ('\'', None) | ('"', None) => {
                quote = Some(c);
                word.get_or_insert_default();
            }
            (c, Some(open)) if c == open => quote = None,
            ('\\', None | Some('"')) => {
                let next = characters.next().ok_or("ends in a backslash")?;
                word.get_or_insert_default().push(next);
            }
            (c, None) if c.is_whitespace() => words.extend(word.take()),
            (c, _) => word.get_or_insert_default().push(c),
        }
    }
    match quote {
        Some(open) => Err(format!("has a {open} that is not closed")),
        None => {
            words.extend(word);
            Ok(words)
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn quotes_and_backslashes_keep_blanks() {
        assert_eq!(split("").unwrap(), [""; 0]);
        assert_eq!(split("  a  b\tc ").unwrap(), ["a", "b", "c"]);
        assert_eq!(split(r#"-p "a b" 'c "d"' e\ f ''"#).unwrap(), ["-p", "a b", "c \"d\"", "e f", ""]);
        assert_eq!(split(r#"a"b'c"d'e\'"#).unwrap(), ["ab'cde\\"]);
        assert_eq!(split("'a").unwrap_err(), "has a ' that is not closed");
        assert_eq!(split("a\\").unwrap_err(), "ends in a backslash");
    }

    proptest! {
        #[test]
        fn quoted_words_come_back(words in proptest::collection::vec("[^']{0,12}", 0..6)) {
            let text = words.iter().map(|word| format!("'{word}'")).collect::<Vec<_>>().join(" ");
            prop_assert_eq!(split(&text).unwrap(), words);
        }

        #[test]
        fn any_text_is_split_or_refused(text in ".{0,60}") {
            let _ = split(&text);
        }
    }
}
