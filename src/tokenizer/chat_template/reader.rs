//! Reads the tokens of one tag and places what is written for them on their source lines.

use super::error::SyntaxError;
use super::lexer::{Tag, Token, TokenKind};

/// How high an expression's tree may grow; minijinja parses and compiles by recursion.
const MAX_HEIGHT: usize = 60;

/// A rewritten expression.
#[derive(Debug)]
pub(super) struct Fragment {
    pub(super) text: String,
    pub(super) height: usize,
}

/// Reads the tokens of one tag.
pub(super) struct Reader<'a> {
    tokens: &'a [Token],
    pub(super) position: usize,
    tag_line: usize,
    /// The line that the output written so far ends on.
    output_line: usize,
    nesting: usize,
    /// Names of filters that do not exist are an error here only outside of conditions, as in Jinja.
    pub(super) check_filters: bool,
}

pub(super) type Parsed = Result<Fragment, SyntaxError>;

impl<'a> Reader<'a> {
    pub(super) fn new(tag: &'a Tag, output_line: usize, check_filters: bool) -> Reader<'a> {
        Reader {
            tokens: &tag.tokens,
            position: 0,
            tag_line: tag.line,
            output_line,
            nesting: 0,
            check_filters,
        }
    }

    pub(super) fn output_line(&self) -> usize {
        self.output_line
    }

    pub(super) fn peek(&self) -> Option<&'a TokenKind> {
        self.tokens.get(self.position).map(|token| &token.kind)
    }

    pub(super) fn peek_second(&self) -> Option<&'a TokenKind> {
        self.tokens.get(self.position + 1).map(|token| &token.kind)
    }

    pub(super) fn at_end(&self) -> bool {
        self.position >= self.tokens.len()
    }

    pub(super) fn error(&self, message: impl Into<String>) -> SyntaxError {
        let token = self.tokens.get(self.position).or(self.tokens.last());
        SyntaxError { line: token.map_or(self.tag_line, |token| token.line), message: message.into() }
    }

    pub(super) fn unexpected(&self, expected: &str) -> SyntaxError {
        let found = match self.peek() {
            None => "the end of the tag".to_owned(),
            Some(TokenKind::Name(name)) => format!("`{name}`"),
            Some(TokenKind::Str(_)) => "a string".to_owned(),
            Some(TokenKind::Int(number) | TokenKind::Float(number)) => format!("`{number}`"),
            Some(TokenKind::Operator(operator)) => format!("`{operator}`"),
        };
        self.error(format!("expected {expected}, found {found}"))
    }

    pub(super) fn is_operator(&self, operator: &str) -> bool {
        matches!(self.peek(), Some(TokenKind::Operator(found)) if *found == operator)
    }

    pub(super) fn is_name(&self, name: &str) -> bool {
        matches!(self.peek(), Some(TokenKind::Name(found)) if found == name)
    }

    /// The newlines that bring the output to the line of the next token.
    pub(super) fn sync(&mut self) -> String {
        let line = self.tokens.get(self.position).map_or(self.output_line, |token| token.line);
        let missing = line.saturating_sub(self.output_line);
        self.output_line += missing;
        "\n".repeat(missing)
    }

    /// Passes the next token and returns `text` placed on its line.
    pub(super) fn put(&mut self, text: &str) -> String {
        let placed = self.sync() + text;
        self.position += 1;
        placed
    }

    pub(super) fn skip_operator(&mut self, operator: &str) -> bool {
        let found = self.is_operator(operator);
        self.position += usize::from(found);
        found
    }

    pub(super) fn skip_name(&mut self, name: &str) -> bool {
        let found = self.is_name(name);
        self.position += usize::from(found);
        found
    }

    pub(super) fn expect_operator(&mut self, operator: &str) -> Result<(), SyntaxError> {
        if self.skip_operator(operator) { Ok(()) } else { Err(self.unexpected(&format!("`{operator}`"))) }
    }

    pub(super) fn expect_name(&mut self, name: &str) -> Result<(), SyntaxError> {
        if self.skip_name(name) { Ok(()) } else { Err(self.unexpected(&format!("`{name}`"))) }
    }

    pub(super) fn identifier(&mut self) -> Result<&'a str, SyntaxError> {
        match self.peek() {
            Some(TokenKind::Name(name)) => {
                self.position += 1;
                Ok(name)
            }
            _ => Err(self.unexpected("a name")),
        }
    }

    pub(super) fn expect_end(&self) -> Result<(), SyntaxError> {
        if self.at_end() { Ok(()) } else { Err(self.unexpected("the end of the tag")) }
    }

    pub(super) fn fragment(&self, text: String, height: usize) -> Parsed {
        if height > MAX_HEIGHT {
            return Err(self.error(format!("the expression nests more than {MAX_HEIGHT} levels deep")));
        }
        Ok(Fragment { text, height })
    }

    pub(super) fn nested<T>(
        &mut self,
        parse: impl FnOnce(&mut Self) -> Result<T, SyntaxError>,
    ) -> Result<T, SyntaxError> {
        self.nesting += 1;
        if self.nesting > MAX_HEIGHT {
            return Err(self.error(format!("the expression nests more than {MAX_HEIGHT} levels deep")));
        }
        let parsed = parse(self);
        self.nesting -= 1;
        parsed
    }

    pub(super) fn closing(&mut self, bracket: &str) -> Result<String, SyntaxError> {
        if self.is_operator(bracket) {
            Ok(self.put(bracket))
        } else {
            Err(self.unexpected(&format!("`{bracket}`")))
        }
    }

    /// One or more adjacent string literals, joined.
    pub(super) fn string(&mut self) -> Result<String, SyntaxError> {
        let mut joined = String::new();
        let mut found = false;
        while let Some(TokenKind::Str(text)) = self.peek() {
            joined.push_str(text);
            found = true;
            self.position += 1;
        }
        if found { Ok(joined) } else { Err(self.unexpected("a string")) }
    }

    /// Places text that stands for tokens already passed.
    pub(super) fn sync_before(&mut self, text: &str) -> String {
        let line = self
            .position
            .checked_sub(1)
            .and_then(|previous| self.tokens.get(previous))
            .map_or(self.output_line, |token| token.line);
        let missing = line.saturating_sub(self.output_line);
        self.output_line += missing;
        "\n".repeat(missing) + text
    }

    pub(super) fn dotted_name(&mut self) -> Result<String, SyntaxError> {
        let mut name = self.identifier()?.to_owned();
        while self.skip_operator(".") {
            name.push('.');
            name.push_str(self.identifier()?);
        }
        Ok(name)
    }
}

/// A string as a minijinja literal on one line.
pub(super) fn literal(text: &str) -> String {
    let mut literal = String::with_capacity(text.len() + 2);
    literal.push('"');
    for character in text.chars() {
        match character {
            '"' => literal.push_str("\\\""),
            '\\' => literal.push_str("\\\\"),
            '\n' => literal.push_str("\\n"),
            '\r' => literal.push_str("\\r"),
            _ => literal.push(character),
        }
    }
    literal.push('"');
    literal
}
