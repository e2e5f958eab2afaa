//! Sentences, counted as NLTK's English Punkt model does it, with its commonest abbreviations instead of the model.

/// What ends with a full stop inside a sentence.
const ABBREVIATIONS: [&str; 44] = [
    "mr", "mrs", "ms", "dr", "prof", "st", "jr", "sr", "gen", "col", "sgt", "capt", "lt", "rep", "sen",
    "gov", "rev", "hon", "inc", "ltd", "co", "corp", "vs", "etc", "e.g", "i.e", "cf", "al", "fig", "no",
    "vol", "jan", "feb", "aug", "sept", "oct", "nov", "dec", "u.s", "u.k", "u.n", "a.m", "p.m", "ph.d",
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
        let closes = |c: &char| matches!(c, '"' | '\'' | ')' | ']' | '}');
        let mut after = at;
        while chars.get(after).is_some_and(closes) {
            after += 1;
        }
        let blank = chars.get(after).is_some_and(|c| c.is_whitespace());
        let Some(next) = chars.get(after..).and_then(|rest| rest.iter().find(|c| !c.is_whitespace())) else {
            break;
        };
        let run = chars.get(start..at).unwrap_or_default();
        if blank && ends(&chars, start, run, *next) {
            count += 1;
        }
        at = after.max(at);
    }
    count
}

fn is_end(c: char) -> bool {
    matches!(c, '.' | '!' | '?')
}

/// Whether the marks `run` at `start` end a sentence before `next`.
fn ends(chars: &[char], start: usize, run: &[char], next: char) -> bool {
    match run {
        ['.'] => {
            let before = chars.get(..start).unwrap_or_default();
            let word: String = before
                .iter()
                .rev()
                .take_while(|c| c.is_alphanumeric() || **c == '.')
                .collect::<Vec<_>>()
                .into_iter()
                .rev()
                .collect();
            let word = word.to_lowercase();
            let initial = word.chars().count() == 1 && word.chars().all(char::is_alphabetic);
            !(ABBREVIATIONS.contains(&word.as_str()) || initial)
        }
        // An ellipsis goes on in small letters.
        ['.', '.', ..] if run.iter().all(|c| *c == '.') => next.is_uppercase(),
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
        assert_eq!(count("Mr. Smith met Dr. Jones, e.g. here."), 1);
        assert_eq!(count("J. Doe left."), 1);
        assert_eq!(count("Well... so be it. Well... Then."), 3);
    }
}
