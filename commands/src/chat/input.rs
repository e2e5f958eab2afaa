//! What a person types into `chat`: lines become messages and commands.

use std::mem;

/// Marks the ends of a block of several lines.
const FENCE: &str = "\"\"\"";

/// A complete input.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Input {
    /// Something to say to the model.
    Message(String),
    /// `/help`.
    Help,
    /// `/reset`.
    Reset,
    /// `/system`, with the new prompt if one was given.
    System(Option<String>),
    /// `/exit`.
    Exit,
    /// A `/word` that is no command.
    Unknown(String),
    /// Nothing.
    Empty,
}

/// Gathers lines until an input is complete.
#[derive(Default)]
pub struct Assembler {
    lines: Vec<String>,
    fenced: bool,
}

impl Assembler {
    /// Takes a line; returns the input when it is complete.
    ///
    /// A backslash at the end of a line continues it; `"""` begins and ends a block in which nothing is special.
    pub fn feed(&mut self, line: &str) -> Option<Input> {
        if self.fenced {
            let Some(last) = line.trim_end().strip_suffix(FENCE) else {
                self.lines.push(line.to_owned());
                return None;
            };
            if !last.is_empty() {
                self.lines.push(last.to_owned());
            }
            return Some(self.message());
        }
        if self.lines.is_empty()
            && let Some(first) = line.trim_start().strip_prefix(FENCE)
        {
            if let Some(whole) = first.trim_end().strip_suffix(FENCE) {
                return Some(message(whole.to_owned()));
            }
            self.fenced = true;
            if !first.is_empty() {
                self.lines.push(first.to_owned());
            }
            return None;
        }
        if let Some(continued) = line.strip_suffix('\\') {
            self.lines.push(continued.to_owned());
            return None;
        }
        if self.lines.is_empty() {
            return Some(classify(line));
        }
        self.lines.push(line.to_owned());
        Some(self.message())
    }

    /// The input at the end of the text: an open block counts as closed.
    pub fn finish(&mut self) -> Option<Input> {
        (!self.lines.is_empty()).then(|| self.message())
    }

    /// Whether an input has begun.
    pub fn is_open(&self) -> bool {
        self.fenced || !self.lines.is_empty()
    }

    /// Forgets what has begun.
    pub fn clear(&mut self) {
        *self = Self::default();
    }

    fn message(&mut self) -> Input {
        self.fenced = false;
        message(mem::take(&mut self.lines).join("\n"))
    }
}

fn message(text: String) -> Input {
    if text.trim().is_empty() { Input::Empty } else { Input::Message(text) }
}

/// A line that begins with `/` and a word of letters is a command; a path such as `/etc/passwd` is not. `//` stands
/// for a `/` that begins a message.
fn classify(line: &str) -> Input {
    let text = line.trim();
    if text.starts_with("//") {
        return message(text[1..].to_owned());
    }
    let Some(command) = text.strip_prefix('/') else { return message(line.to_owned()) };
    let (word, rest) = command.split_once(char::is_whitespace).unwrap_or((command, ""));
    if word.is_empty() || !word.bytes().all(|byte| byte.is_ascii_lowercase()) {
        return message(line.to_owned());
    }
    match word {
        "help" => Input::Help,
        "reset" => Input::Reset,
        "system" => Input::System(Some(rest.trim().to_owned()).filter(|text| !text.is_empty())),
        "exit" | "quit" => Input::Exit,
        _ => Input::Unknown(word.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn inputs(text: &str) -> Vec<Input> {
        let mut assembler = Assembler::default();
        let mut inputs: Vec<_> = text.lines().filter_map(|line| assembler.feed(line)).collect();
        inputs.extend(assembler.finish());
        inputs
    }

    fn said(text: &str) -> Input {
        Input::Message(text.to_owned())
    }

    #[test]
    fn a_backslash_continues_a_line() {
        assert_eq!(inputs("one\\\ntwo\\\nthree\nfour"), [said("one\ntwo\nthree"), said("four")]);
        assert_eq!(inputs("open\\"), [said("open")]);
    }

    #[test]
    fn a_fence_holds_anything() {
        assert_eq!(
            inputs("\"\"\"\ndef f():\n    /exit\\\n\n\"\"\"\nx"),
            [said("def f():\n    /exit\\\n"), said("x")]
        );
        assert_eq!(inputs("\"\"\"a\nb\"\"\""), [said("a\nb")]);
        assert_eq!(inputs("\"\"\"a b\"\"\""), [said("a b")]);
        assert_eq!(inputs("\"\"\"\n\"\"\""), [Input::Empty]);
        assert_eq!(inputs("\"\"\"\nnever closed"), [said("never closed")]);
    }

    #[test]
    fn commands() {
        assert_eq!(
            inputs("/help\n/reset\n/exit\n/quit"),
            [Input::Help, Input::Reset, Input::Exit, Input::Exit]
        );
        assert_eq!(inputs("/system"), [Input::System(None)]);
        assert_eq!(inputs("/system  be brief "), [Input::System(Some("be brief".to_owned()))]);
        assert_eq!(inputs("/hlep"), [Input::Unknown("hlep".to_owned())]);
    }

    #[test]
    fn two_slashes_say_one() {
        assert_eq!(inputs("//reset what?\n//"), [said("/reset what?"), said("/")]);
    }

    #[test]
    fn paths_and_letters_are_not_commands() {
        for text in ["/etc/passwd holds what?", "/", "/ 2", "q", "/A"] {
            assert_eq!(inputs(text), [said(text)]);
        }
        assert_eq!(inputs("  "), [Input::Empty]);
    }

    proptest::proptest! {
        #[test]
        fn fenced_text_comes_back_whole(text in "[a-z\\\\/ \n]{0,40}[a-z]") {
            let fenced = format!("\"\"\"\n{text}\n\"\"\"");
            proptest::prop_assert_eq!(inputs(&fenced), [said(&text)]);
        }
    }
}
