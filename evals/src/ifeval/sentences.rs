//! Sentences, counted as NLTK's English Punkt model does it (Kiss and Strunk 2006): with its abbreviations and the words
//! that begin sentences after them, without what it knows of each word's spelling.

/// What a full stop belongs to, beside initials: the model's list without those that have none but single letters.
const ABBREVIATIONS: [&str; 67] = [
    "adm", "ala", "ariz", "aug", "ave", "bros", "calif", "chg", "cie", "co", "col", "colo", "conn", "corp",
    "cos", "ct", "dec", "dr", "feb", "fla", "fri", "ft", "ga", "gen", "ill", "inc", "jan", "jr", "kan", "ky",
    "la", "lt", "ltd", "maj", "messrs", "mg", "mich", "minn", "mr", "mrs", "ms", "nev", "nov", "oct", "ok",
    "okla", "ore", "pa", "ph.d", "prof", "rep", "reps", "sen", "sep", "sept", "sr", "st", "sw", "tenn",
    "tues", "va", "vs", "vt", "wash", "wed", "wis", "yr",
];

/// What begins a sentence even after an abbreviation or an ellipsis.
const STARTERS: [&str; 38] = [
    "according",
    "although",
    "among",
    "both",
    "but",
    "despite",
    "even",
    "he",
    "however",
    "i",
    "if",
    "in",
    "indeed",
    "instead",
    "it",
    "many",
    "meanwhile",
    "moreover",
    "most",
    "nevertheless",
    "nonetheless",
    "nor",
    "separately",
    "similarly",
    "since",
    "so",
    "some",
    "the",
    "there",
    "these",
    "they",
    "this",
    "though",
    "thus",
    "under",
    "when",
    "while",
    "yet",
];

/// How many sentences a text has.
pub(super) fn count(text: &str) -> usize {
    let chars: Vec<char> = text.trim().chars().collect();
    let mut count = usize::from(!chars.is_empty());
    let mut at = 0;
    while let Some(c) = chars.get(at) {
        if !is_end(*c) {
            at += 1;
            continue;
        }
        let start = at;
        while chars.get(at).is_some_and(|c| is_end(*c)) {
            at += 1;
        }
        let parts = chars.get(at).is_some_and(|c| c.is_whitespace() || ")\";}]*:@'({[".contains(*c));
        let after = closed(&chars, at);
        let rest = chars.get(after..).unwrap_or_default();
        let Some(next) = rest.iter().position(|c| !c.is_whitespace()) else { break };
        let run = chars.get(start..at).unwrap_or_default();
        if parts && ends(&chars, start, run, rest.get(next..).unwrap_or_default()) {
            count += 1;
        }
        at = after;
    }
    count
}

fn is_end(c: char) -> bool {
    matches!(c, '.' | '!' | '?')
}

/// Where a sentence ends that has its mark before `at`: quotes and brackets before a blank belong to it.
fn closed(chars: &[char], at: usize) -> usize {
    let mut after = at;
    while chars.get(after).is_some_and(|c| matches!(c, '"' | '\'' | ')' | ']' | '}')) {
        after += 1;
    }
    if chars.get(after).is_none_or(|c| c.is_whitespace()) { after } else { at }
}

/// Whether the marks `run` at `start` end a sentence before `rest`.
fn ends(chars: &[char], start: usize, run: &[char], rest: &[char]) -> bool {
    let next: String = rest.iter().take_while(|c| c.is_alphabetic()).flat_map(|c| c.to_lowercase()).collect();
    let capital = rest.first().is_some_and(|c| c.is_uppercase());
    let begins = capital && STARTERS.contains(&next.as_str());
    match run {
        ['.'] => {
            let before = chars.get(..start).unwrap_or_default();
            let length = before.iter().rev().take_while(|c| c.is_alphanumeric() || **c == '.').count();
            let word: String = before.iter().skip(start - length).flat_map(|c| c.to_lowercase()).collect();
            // A letter, or letters with full stops between.
            let initials = word
                .split('.')
                .all(|part| part.chars().count() == 1 && part.chars().all(char::is_alphabetic));
            let abbreviation = ABBREVIATIONS.contains(&word.as_str()) || initials;
            !abbreviation || begins
        }
        ['.', '.', ..] if run.iter().all(|c| *c == '.') => begins,
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_end_sentences() {
        assert_eq!(count("One. Two! Three? Four"), 4);
        assert_eq!(count("What?! No."), 2);
        assert_eq!(count("He said \"Go.\" She went."), 2);
        assert_eq!(count("It costs 3.50 today."), 1);
        assert_eq!(count("no marks\nat all"), 1);
        assert_eq!(count("Line one.\nLine two."), 2);
        assert_eq!(count("  "), 0);
    }

    #[test]
    fn abbreviations_do_not() {
        assert_eq!(count("Mr. Smith met Dr. Jones of the U.S. army."), 1);
        assert_eq!(count("J. Doe left."), 1);
        assert_eq!(count("Well... so be it. Well... The end."), 3);
        assert_eq!(count("It was 3 p.m. The bell rang."), 2);
    }
}
