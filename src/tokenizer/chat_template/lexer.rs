//! Splits a template into text and tags by the rules of Jinja2's lexer, whitespace control included
//! (`trim_blocks` and `lstrip_blocks` on, one trailing newline dropped, as transformers sets them).

use super::error::SyntaxError;
use super::python_char::is_space;

/// A piece of a template.
#[derive(Debug, PartialEq)]
pub(super) enum Piece {
    /// Literal text, already trimmed.
    Text(String),
    /// `{{ ... }}`.
    Output(Tag),
    /// `{% ... %}`.
    Block(Tag),
}

/// The tokens between a tag's delimiters.
#[derive(Debug, PartialEq)]
pub(super) struct Tag {
    /// The line the tag starts on, from 1.
    pub(super) line: usize,
    pub(super) tokens: Vec<Token>,
}

/// A token of Jinja's expression language and the line it starts on.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Token {
    pub(super) line: usize,
    pub(super) kind: TokenKind,
}

#[derive(Debug, Clone, PartialEq)]
pub(super) enum TokenKind {
    Name(String),
    /// A string literal, unescaped.
    Str(String),
    /// An integer literal, in decimal.
    Int(String),
    /// A float literal without underscores.
    Float(String),
    Operator(&'static str),
}

/// Longer operators first.
const OPERATORS: [&str; 26] = [
    "//", "**", "==", "!=", ">=", "<=", "+", "-", "/", "*", "%", "~", "[", "]", "(", ")", "{", "}", ">", "<",
    "=", ".", ":", "|", ",", ";",
];

/// Lexes a whole template.
pub(super) fn lex(source: &str) -> Result<Vec<Piece>, SyntaxError> {
    let source = source.replace("\r\n", "\n").replace('\r', "\n");
    let source = source.strip_suffix('\n').unwrap_or(&source);
    let mut lexer = Lexer { source, position: 0, line: 1, line_starting: true, pieces: Vec::new() };
    lexer.run()?;
    Ok(lexer.pieces)
}

#[derive(Clone, Copy, PartialEq)]
enum Opening {
    Output,
    Block,
    Comment,
}

struct Lexer<'a> {
    source: &'a str,
    position: usize,
    line: usize,
    /// Whether the last match ended in a newline, so that what follows starts a line.
    line_starting: bool,
    pieces: Vec<Piece>,
}

impl<'a> Lexer<'a> {
    fn rest(&self) -> &'a str {
        self.source.get(self.position..).unwrap_or_default()
    }

    fn advance(&mut self, bytes: usize) -> &'a str {
        let passed = self.rest().get(..bytes).unwrap_or(self.rest());
        self.line += passed.matches('\n').count();
        self.position += passed.len();
        passed
    }

    fn error(&self, message: impl Into<String>) -> SyntaxError {
        SyntaxError { line: self.line, message: message.into() }
    }

    fn run(&mut self) -> Result<(), SyntaxError> {
        while let Some((at, opening)) = find_opening(self.rest()) {
            let raw = match opening {
                Opening::Block => raw_tag(self.rest().get(at..).unwrap_or_default(), "raw"),
                _ => None,
            };
            let sign = self.rest().as_bytes().get(at + 2).copied();
            let text = self.advance(at);
            self.text(text, sign, opening == Opening::Output);
            match (opening, raw) {
                (_, Some(raw)) => self.raw(raw)?,
                (Opening::Comment, None) => self.comment()?,
                (Opening::Output, None) => {
                    let tag = self.tag(sign, "}}")?;
                    self.pieces.push(Piece::Output(tag));
                }
                (Opening::Block, None) => {
                    let tag = self.tag(sign, "%}")?;
                    self.pieces.push(Piece::Block(tag));
                }
            }
        }
        let text = self.rest();
        self.push_text(text);
        Ok(())
    }

    /// Emits the text before a tag, trimmed as the tag's sign and `lstrip_blocks` ask.
    fn text(&mut self, text: &str, sign: Option<u8>, is_output: bool) {
        let kept = match sign {
            Some(b'-') => text.trim_end_matches(is_space),
            Some(b'+') => text,
            _ if is_output => text,
            _ => {
                let line_start = text.rfind('\n').map_or(0, |newline| newline + 1);
                let (before, last_line) = text.split_at(line_start);
                let blank = last_line.chars().all(is_space);
                if blank && (line_start > 0 || self.line_starting) { before } else { text }
            }
        };
        self.push_text(kept);
        self.line_starting = false;
    }

    fn push_text(&mut self, text: &str) {
        if !text.is_empty() {
            self.pieces.push(Piece::Text(text.to_owned()));
        }
    }

    /// Passes what a closing delimiter swallows: all whitespace after `-`, else one newline after a block.
    fn after_close(&mut self, sign: Option<char>, trim_newline: bool) {
        let rest = self.rest();
        let swallowed = match sign {
            Some('-') => rest.len() - rest.trim_start_matches(is_space).len(),
            Some('+') => 0,
            _ => usize::from(trim_newline && rest.starts_with('\n')),
        };
        self.line_starting = self.advance(swallowed).ends_with('\n');
    }

    fn comment(&mut self) -> Result<(), SyntaxError> {
        let start = self.error("the comment is never closed");
        let opened = if self.rest().starts_with("{#-") || self.rest().starts_with("{#+") { 3 } else { 2 };
        let body = self.rest().get(opened..).unwrap_or_default();
        let Some(end) = body.find("#}") else {
            return Err(start);
        };
        let sign = body.get(..end).and_then(|body| body.chars().next_back());
        let sign = sign.filter(|sign| matches!(sign, '-' | '+'));
        self.advance(opened + end + 2);
        self.after_close(sign, true);
        Ok(())
    }

    fn raw(&mut self, opening: RawTag) -> Result<(), SyntaxError> {
        let unclosed = self.error("the raw block is never closed");
        self.advance(opening.len);
        let sign = opening.close_sign.filter(|sign| *sign == '-');
        self.after_close(sign, false);
        let mut search = 0;
        loop {
            let Some(at) = self.rest().get(search..).and_then(|rest| rest.find("{%")) else {
                return Err(unclosed);
            };
            let at = search + at;
            let tag = self.rest().get(at..).unwrap_or_default();
            if let Some(closing) = raw_tag(tag, "endraw") {
                let sign = tag.as_bytes().get(2).copied();
                let text = self.advance(at);
                self.text(text, sign, false);
                self.advance(closing.len);
                self.after_close(closing.close_sign, true);
                return Ok(());
            }
            search = at + 2;
        }
    }

    fn tag(&mut self, sign: Option<u8>, close: &str) -> Result<Tag, SyntaxError> {
        let line = self.line;
        let signed = usize::from(matches!(sign, Some(b'-' | b'+')));
        self.advance(2 + signed);
        let mut tokens = Vec::new();
        let mut open: Vec<char> = Vec::new();
        loop {
            let rest = self.rest();
            let blank = rest.len() - rest.trim_start_matches(is_space).len();
            self.advance(blank);
            let rest = self.rest();
            if open.is_empty() {
                let (sign, closing) = match rest.chars().next() {
                    Some('-') => (Some('-'), rest.get(1..).unwrap_or_default()),
                    Some('+') if close == "%}" => (Some('+'), rest.get(1..).unwrap_or_default()),
                    _ => (None, rest),
                };
                if closing.starts_with(close) {
                    self.advance(2 + usize::from(sign.is_some()));
                    self.after_close(sign, close == "%}");
                    return Ok(Tag { line, tokens });
                }
            }
            if rest.is_empty() {
                return Err(SyntaxError { line, message: format!("the tag is never closed with `{close}`") });
            }
            let token = self.token(tokens.last())?;
            if let TokenKind::Operator(operator) = token.kind {
                match operator {
                    "(" => open.push(')'),
                    "[" => open.push(']'),
                    "{" => open.push('}'),
                    ")" | "]" | "}" => match open.pop() {
                        Some(expected) if operator.starts_with(expected) => {}
                        Some(expected) => {
                            return Err(self.error(format!("unexpected `{operator}`, expected `{expected}`")));
                        }
                        None => return Err(self.error(format!("unexpected `{operator}`"))),
                    },
                    _ => {}
                }
            }
            tokens.push(token);
        }
    }

    fn token(&mut self, previous: Option<&Token>) -> Result<Token, SyntaxError> {
        let line = self.line;
        let rest = self.rest();
        let first = rest.chars().next().unwrap_or_default();
        let kind = if first == '\'' || first == '"' {
            self.string(first)?
        } else if first.is_ascii_digit() {
            let after_dot = previous.is_some_and(|token| token.kind == TokenKind::Operator("."));
            self.number(after_dot)?
        } else if first == '_' || first.is_alphabetic() {
            let end = rest.find(|c: char| c != '_' && !c.is_alphanumeric()).unwrap_or(rest.len());
            let name = self.advance(end);
            if !name.is_ascii() {
                return Err(SyntaxError { line, message: format!("the name `{name}` is not ASCII") });
            }
            TokenKind::Name(name.to_owned())
        } else {
            let operator = OPERATORS
                .into_iter()
                .find(|operator| rest.starts_with(operator))
                .ok_or_else(|| self.error(format!("unexpected character {first:?}")))?;
            self.advance(operator.len());
            TokenKind::Operator(operator)
        };
        Ok(Token { line, kind })
    }

    fn string(&mut self, quote: char) -> Result<TokenKind, SyntaxError> {
        let unclosed = self.error("the string is never closed");
        let mut escaped = false;
        let body = self.rest().get(1..).unwrap_or_default();
        let end = body.char_indices().find_map(|(index, character)| {
            if escaped {
                escaped = false;
            } else if character == '\\' {
                escaped = true;
            } else if character == quote {
                return Some(index);
            }
            None
        });
        let Some(end) = end else {
            return Err(unclosed);
        };
        let text = unescape(body.get(..end).unwrap_or_default()).map_err(|message| self.error(message))?;
        self.advance(end + 2);
        Ok(TokenKind::Str(text))
    }

    fn number(&mut self, after_dot: bool) -> Result<TokenKind, SyntaxError> {
        let rest = self.rest();
        let radix = match rest.get(..2) {
            Some("0b" | "0B") => 2,
            Some("0o" | "0O") => 8,
            Some("0x" | "0X") => 16,
            _ => 10,
        };
        let digits_end = |from: usize, radix: u32| {
            let tail = rest.get(from..).unwrap_or_default();
            from + tail.find(|c: char| c != '_' && !c.is_digit(radix)).unwrap_or(tail.len())
        };
        if radix != 10 {
            let end = digits_end(2, radix);
            let digits = self.advance(end).get(2..).unwrap_or_default().replace('_', "");
            let number = u128::from_str_radix(&digits, radix)
                .map_err(|_| self.error("the integer is empty or too large"))?;
            return Ok(TokenKind::Int(number.to_string()));
        }
        let mut end = digits_end(0, 10);
        let starts_digit = |at: usize| {
            rest.get(at..).and_then(|tail| tail.chars().next()).is_some_and(|c| c.is_ascii_digit())
        };
        let mut is_float = false;
        if !after_dot {
            if rest.get(end..).is_some_and(|tail| tail.starts_with('.')) && starts_digit(end + 1) {
                end = digits_end(end + 1, 10);
                is_float = true;
            }
            if rest.get(end..).is_some_and(|tail| tail.starts_with(['e', 'E'])) {
                let signed = rest.get(end + 1..).is_some_and(|tail| tail.starts_with(['+', '-']));
                let exponent = end + 1 + usize::from(signed);
                if starts_digit(exponent) {
                    end = digits_end(exponent, 10);
                    is_float = true;
                }
            }
        }
        let digits = self.advance(end).replace('_', "");
        if is_float {
            return Ok(TokenKind::Float(digits));
        }
        let number: u128 =
            digits.parse().map_err(|_| self.error(format!("the integer {digits} is too large")))?;
        Ok(TokenKind::Int(number.to_string()))
    }
}

fn find_opening(text: &str) -> Option<(usize, Opening)> {
    text.match_indices('{').find_map(|(index, _)| {
        let opening = match text.as_bytes().get(index + 1) {
            Some(b'{') => Opening::Output,
            Some(b'%') => Opening::Block,
            Some(b'#') => Opening::Comment,
            _ => return None,
        };
        Some((index, opening))
    })
}

#[derive(Clone, Copy)]
struct RawTag {
    len: usize,
    close_sign: Option<char>,
}

/// Matches `{% raw %}` or `{% endraw %}` at the start of a text.
fn raw_tag(text: &str, name: &str) -> Option<RawTag> {
    let body = text.strip_prefix("{%")?;
    let body = body.strip_prefix(['-', '+']).unwrap_or(body);
    let body = body.trim_start_matches(is_space).strip_prefix(name)?;
    let body = body.trim_start_matches(is_space);
    let close_sign = body.chars().next().filter(|sign| *sign == '-' || (*sign == '+' && name == "endraw"));
    let body = match close_sign {
        Some(_) => body.get(1..)?,
        None => body,
    };
    let after = body.strip_prefix("%}")?;
    Some(RawTag { len: text.len() - after.len(), close_sign })
}

/// Python's escapes in a string literal; an unknown one stays as it is.
fn unescape(text: &str) -> Result<String, String> {
    let mut out = String::with_capacity(text.len());
    let mut pending_surrogate: Option<u16> = None;
    let mut characters = text.chars();
    while let Some(character) = characters.next() {
        if character != '\\' {
            out.push(character);
            continue;
        }
        let Some(escape) = characters.next() else {
            out.push('\\');
            break;
        };
        let code = match escape {
            '\n' => continue,
            '\\' | '\'' | '"' => u32::from(escape),
            'a' => 7,
            'b' => 8,
            'f' => 12,
            'n' => 10,
            'r' => 13,
            't' => 9,
            'v' => 11,
            '0'..='7' => {
                let tail = characters.as_str();
                let more = tail.find(|c: char| !c.is_digit(8)).unwrap_or(tail.len()).min(2);
                let digits = tail.get(..more).unwrap_or_default();
                characters = tail.get(more..).unwrap_or_default().chars();
                u32::from_str_radix(&format!("{escape}{digits}"), 8).unwrap_or_default()
            }
            'x' | 'u' | 'U' => {
                let width = match escape {
                    'x' => 2,
                    'u' => 4,
                    _ => 8,
                };
                let tail = characters.as_str();
                let digits = tail.get(..width).filter(|digits| digits.chars().all(|c| c.is_ascii_hexdigit()));
                let digits = digits.ok_or_else(|| format!("truncated \\{escape} escape in a string"))?;
                characters = tail.get(width..).unwrap_or_default().chars();
                u32::from_str_radix(digits, 16).unwrap_or(u32::MAX)
            }
            'N' => return Err("\\N{...} escapes are not supported".to_owned()),
            _ => {
                out.push('\\');
                out.push(escape);
                continue;
            }
        };
        match (u16::try_from(code), pending_surrogate.take()) {
            (Ok(high @ 0xd800..=0xdbff), None) => pending_surrogate = Some(high),
            (Ok(low @ 0xdc00..=0xdfff), Some(high)) => {
                out.extend(char::decode_utf16([high, low]).flatten());
            }
            (_, None) => {
                out.push(char::from_u32(code).ok_or("a string escapes a code that is no character")?);
            }
            (_, Some(_)) => return Err("a string escapes half a surrogate pair".to_owned()),
        }
    }
    match pending_surrogate {
        Some(_) => Err("a string escapes half a surrogate pair".to_owned()),
        None => Ok(out),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(source: &str) -> String {
        let pieces = lex(source).unwrap();
        let shown = pieces.into_iter().map(|piece| match piece {
            Piece::Text(text) => text,
            Piece::Output(_) => "<out>".to_owned(),
            Piece::Block(_) => "<block>".to_owned(),
        });
        shown.collect()
    }

    #[test]
    fn whitespace_is_controlled_as_in_jinja() {
        for (source, expected) in [
            ("a\n  {% if x %}\nb", "a\n<block>b"),
            ("a {% if x %} \nb", "a <block> \nb"),
            ("  {% if x %}  {% if y %}b", "<block>  <block>b"),
            ("a\n  {%+ if x %}b", "a\n  <block>b"),
            ("a\n {%- if x -%}\n b", "a<block>b"),
            ("{% if x +%}\nb", "<block>\nb"),
            ("a\n  {{ x }}\nb", "a\n  <out>\nb"),
            ("a\n  {{- x -}}\n b", "a<out>b"),
            ("a {# c #}\nb", "a b"),
            ("a\n  {# c -#}\n  b", "a\nb"),
            ("a\n\n", "a\n"),
            ("a\r\nb\rc", "a\nb\nc"),
            ("{% raw %}\n {{ x }} {% endraw %}\nb", "\n {{ x }} b"),
            ("{%- raw -%} x {%- endraw %}b", "xb"),
            ("{{ '}}' }}{{ {'a': {}} }}", "<out><out>"),
        ] {
            assert_eq!(texts(source), expected, "{source:?}");
        }
    }

    #[test]
    fn strings_unescape_as_in_python() {
        for (literal, expected) in [
            (r"a\nb", "a\nb"),
            (r"\d\.", r"\d\."),
            (r"\x41\101\u00e9\U0001f600", "AAé\u{1f600}"),
            (r"\ud83d\ude00", "\u{1f600}"),
            (r"\'\\", r"'\"),
        ] {
            assert_eq!(unescape(literal).unwrap(), expected);
        }
        for literal in [r"\x4", r"\ud83d", r"\ud83dx\x41", r"\N{BULLET}"] {
            assert!(unescape(literal).is_err(), "{literal}");
        }
    }

    #[test]
    fn errors_carry_the_line() {
        for (source, line) in [
            ("a\n{{ x", 2),
            ("a\n\n{# x", 3),
            ("{{\n'x }}", 2),
            ("{{\n\n ? }}", 3),
            ("a\n{% raw %}", 2),
            ("{{ (] }}", 1),
        ] {
            assert_eq!(lex(source).unwrap_err().line, line, "{source:?}");
        }
    }
}
