//! Words, as NLTK's tokenizers see them.

use std::sync::LazyLock;

use regex::Regex;

#[allow(clippy::unwrap_used)] // constants
static WORD: LazyLock<Regex> = LazyLock::new(|| Regex::new(r"\w+").unwrap());

/// Runs of letters, digits and underscores.
pub(super) fn count(text: &str) -> usize {
    WORD.find_iter(text).count()
}

/// Python's `isupper`: a letter, and none that is small.
pub(super) fn is_upper(text: &str) -> bool {
    text.chars().any(char::is_uppercase) && !text.chars().any(char::is_lowercase)
}

/// Python's `islower`.
pub(super) fn is_lower(text: &str) -> bool {
    text.chars().any(char::is_lowercase) && !text.chars().any(char::is_uppercase)
}

/// Words that stand apart for the Treebank's tokenizer, though they are written as one.
const CONTRACTIONS: [(&str, &str); 7] = [
    ("can", "not"),
    ("gim", "me"),
    ("gon", "na"),
    ("got", "ta"),
    ("lem", "me"),
    ("wan", "na"),
    ("more", "'n"),
];
/// What is split from the end of a word.
const CLITICS: [&str; 7] = ["n't", "'ll", "'re", "'ve", "'s", "'m", "'d"];

/// Tokens in capitals (`word_tokenize`, NLTK's Treebank rules): hyphens keep a word together, most punctuation splits,
/// and so do contractions.
pub(super) fn capitals(text: &str) -> usize {
    let spaced = spaced(text);
    spaced.split_whitespace().flat_map(parts).filter(|token| is_upper(token)).count()
}

/// Blanks in place of the punctuation that splits words.
fn spaced(text: &str) -> String {
    let mut spaced = String::with_capacity(text.len());
    let mut rest = text.chars().peekable();
    while let Some(c) = rest.next() {
        let splits = match c {
            ';' | '@' | '#' | '$' | '%' | '&' | '?' | '!' | '(' | ')' | '[' | ']' | '{' | '}' | '<' | '>'
            | '"' | '“' | '”' | '„' | '‘' | '«' | '»' | '…' => true,
            ',' | ':' => rest.peek().is_none_or(|next| !next.is_numeric()),
            '-' => rest.peek() == Some(&'-'),
            _ => false,
        };
        if splits && c == '-' {
            rest.next();
        }
        spaced.push(if splits { ' ' } else { c });
    }
    spaced
}

/// The tokens of a word.
fn parts(word: &str) -> Vec<&str> {
    let lower = word.to_ascii_lowercase();
    let core = lower.trim_end_matches('.');
    if let Some((first, _)) = CONTRACTIONS.iter().find(|(first, second)| core == format!("{first}{second}")) {
        return word.split_at_checked(first.len()).map_or(vec![word], |(a, b)| vec![a, b]);
    }
    match CLITICS.iter().find(|clitic| core.ends_with(*clitic) && core.len() > clitic.len()) {
        Some(clitic) => {
            word.split_at_checked(core.len() - clitic.len()).map_or(vec![word], |(a, b)| vec![a, b])
        }
        None => vec![word],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_runs_of_word_characters() {
        assert_eq!(count("It's a well-known fact_1, été."), 7);
        assert_eq!(count(" … "), 0);
    }

    #[test]
    fn capitals_are_counted_a_token() {
        assert_eq!(capitals("I SAW the U.S. flag"), 3);
        assert_eq!(capitals("DON'T, IT'S"), 4);
        assert_eq!(capitals("WELL-KNOWN AT&T 3PM"), 4);
        assert_eq!(capitals("CANNOT 42 Mixed **BOLD**"), 3);
    }

    #[test]
    fn case_is_pythons() {
        assert!(is_upper("A1!") && !is_upper("1!") && !is_upper("Ab"));
        assert!(is_lower("a1!") && !is_lower("1!"));
    }
}
