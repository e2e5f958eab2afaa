//! Stop strings, matched on decoded text: however the model spells a stop and however its text arrives in
//! pieces, the text before the stop comes out and nothing of the stop.

use std::sync::Arc;

/// An unusable list of stop strings.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StopError {
    /// An empty string would match everywhere.
    #[error("stop string {0} is empty; give text that ends the reply, or leave it out")]
    Empty(usize),
}

/// What a [`StopMatcher`] lets through.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StopEvent {
    /// Text that belongs to the reply.
    pub text: String,
    /// Index in the list of the stop string that ended the reply.
    pub stopped: Option<usize>,
}

/// Looks for stop strings in the text of one sequence; each sequence has its own.
///
/// The leftmost match wins; of several stops that match at the same place, the one listed first, even if
/// another is longer or is complete earlier. The result does not depend on how the text is cut into pieces:
/// text that could still become part of such a match is held back.
#[derive(Debug, Clone)]
pub struct StopMatcher {
    stops: Arc<[String]>,
    held: String,
    stopped: Option<usize>,
}

impl StopMatcher {
    /// A matcher for these stop strings, in order of preference; none is allowed.
    pub fn new<S: Into<String>>(stops: impl IntoIterator<Item = S>) -> Result<Self, StopError> {
        let stops: Arc<[String]> = stops.into_iter().map(Into::into).collect();
        match stops.iter().position(String::is_empty) {
            Some(index) => Err(StopError::Empty(index)),
            None => Ok(Self { stops, held: String::new(), stopped: None }),
        }
    }

    /// Takes the next piece of text. After a stop, everything is swallowed and the same stop reported.
    pub fn push(&mut self, text: &str) -> StopEvent {
        if self.stopped.is_none() {
            self.held.push_str(text);
        }
        self.settle(false)
    }

    /// The end of the text: what was held back comes out, up to a stop that only waited for a better one.
    pub fn finish(&mut self) -> StopEvent {
        self.settle(true)
    }

    /// The index of the stop string found, if any.
    pub fn stopped(&self) -> Option<usize> {
        self.stopped
    }

    /// The stop string found, if any.
    pub fn matched(&self) -> Option<&str> {
        self.stopped.and_then(|index| self.stops.get(index)).map(String::as_str)
    }

    /// Goes through the possible matches in order of preference, up to one that is complete or undecided.
    fn settle(&mut self, at_end: bool) -> StopEvent {
        for (start, _) in self.held.char_indices() {
            let rest = &self.held[start..];
            for (index, stop) in self.stops.iter().enumerate() {
                if rest.starts_with(stop.as_str()) {
                    self.held.truncate(start);
                    self.stopped = Some(index);
                    return self.release(start);
                }
                if !at_end && stop.starts_with(rest) {
                    return self.release(start);
                }
            }
        }
        self.release(self.held.len())
    }

    /// Lets the first `end` bytes of the held text go.
    fn release(&mut self, end: usize) -> StopEvent {
        let held = self.held.split_off(end);
        StopEvent { text: std::mem::replace(&mut self.held, held), stopped: self.stopped }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// All text that a matcher lets through for these pieces, and its stop.
    fn run(stops: &[&str], pieces: &[&str]) -> (String, Option<usize>) {
        let mut matcher = StopMatcher::new(stops.iter().copied()).unwrap();
        let mut text = String::new();
        for piece in pieces {
            text.push_str(&matcher.push(piece).text);
        }
        let last = matcher.finish();
        assert_eq!(matcher.finish(), StopEvent { text: String::new(), stopped: last.stopped });
        (text + &last.text, last.stopped)
    }

    /// The rule, on the whole text: smallest start, then smallest index.
    fn expected(stops: &[&str], text: &str) -> (String, Option<usize>) {
        let found =
            stops.iter().enumerate().filter_map(|(index, stop)| Some((text.find(stop)?, index))).min();
        match found {
            Some((start, index)) => (text[..start].to_owned(), Some(index)),
            None => (text.to_owned(), None),
        }
    }

    #[test]
    fn stop_across_tokens_is_found_in_every_chunking() {
        let text = "the brown fox";
        for first in 0..=text.len() {
            for second in first..=text.len() {
                let pieces = [&text[..first], &text[first..second], &text[second..]];
                assert_eq!(run(&["own fox"], &pieces), ("the br".to_owned(), Some(0)), "{pieces:?}");
            }
        }
    }

    #[test]
    fn no_part_of_a_stop_is_streamed() {
        let mut matcher = StopMatcher::new(["own fox"]).unwrap();
        assert_eq!(matcher.push("the brow").text, "the br");
        assert_eq!(matcher.push("n f").text, "");
        assert_eq!(matcher.push("ree").text, "own free");
        assert_eq!(matcher.push(" own").text, " ");
        assert_eq!(matcher.push(" fox jumps"), StopEvent { text: String::new(), stopped: Some(0) });
        assert_eq!(matcher.push("more"), StopEvent { text: String::new(), stopped: Some(0) });
    }

    #[test]
    fn another_tokenization_of_the_stop_is_found() {
        assert_eq!(run(&["ab"], &["x", "a", "b", "y"]), ("x".to_owned(), Some(0)));
        assert_eq!(run(&["ab"], &["x", "ab", "y"]), ("x".to_owned(), Some(0)));
    }

    #[test]
    fn matchers_of_two_streams_are_independent() {
        let mut first = StopMatcher::new(["END"]).unwrap();
        let mut second = first.clone();
        assert_eq!(first.push("a E").text, "a ");
        assert_eq!(second.push("ND").text, "ND");
        assert_eq!(second.push("E").text, "");
        assert_eq!(first.push("ND").stopped, Some(0));
        assert_eq!(second.push("x").text, "Ex");
        assert_eq!(second.stopped(), None);
    }

    #[test]
    fn leftmost_wins_and_then_the_first_listed() {
        assert_eq!(run(&["b", "abc"], &["a", "b", "c"]), (String::new(), Some(1)));
        assert_eq!(run(&["b", "abc"], &["a", "b", "d"]), ("a".to_owned(), Some(0)));
        assert_eq!(run(&["ab", "a"], &["a", "b"]), (String::new(), Some(0)));
        assert_eq!(run(&["a", "ab"], &["a", "b"]), (String::new(), Some(0)));
    }

    #[test]
    fn a_stop_that_waited_for_a_better_one_is_found_at_the_end() {
        assert_eq!(run(&["abc", "b"], &["a", "b"]), ("a".to_owned(), Some(1)));
        assert_eq!(run(&["abc"], &["xab"]), ("xab".to_owned(), None));
    }

    #[test]
    fn empty_stop_is_an_error_and_no_stop_is_fine() {
        assert_eq!(StopMatcher::new(["a", ""]).unwrap_err(), StopError::Empty(1));
        assert_eq!(run(&[], &["a", "b"]), ("ab".to_owned(), None));
    }

    proptest! {
        #[test]
        fn any_chunking_equals_the_whole_text(
            stops in prop::collection::vec("[aé🙂]{1,4}", 0..4),
            pieces in prop::collection::vec("[aé🙂b]{0,5}", 0..8),
        ) {
            let stops: Vec<&str> = stops.iter().map(String::as_str).collect();
            let pieces: Vec<&str> = pieces.iter().map(String::as_str).collect();
            prop_assert_eq!(run(&stops, &pieces), expected(&stops, &pieces.concat()));
        }
    }
}
