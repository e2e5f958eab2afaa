//! llama.cpp's GBNF as Lark (llama.cpp grammars/README.md): rules `name ::= alternatives`, texts, character classes,
//! `.`, groups, `* + ? {m,n}`, comments.

use std::collections::{BTreeMap, BTreeSet};

use super::GrammarError;
use super::lark::literal;

pub(super) fn to_lark(text: &str) -> Result<String, GrammarError> {
    let mut reader = Reader { rest: text, names: BTreeMap::new(), used: BTreeSet::new() };
    let mut rules = Vec::new();
    let mut defined = BTreeSet::new();
    reader.blank(true);
    while !reader.rest.is_empty() {
        let name = reader.name().ok_or_else(|| reader.wrong("expected the name of a rule"))?;
        reader.blank(false);
        reader.rest = reader.rest.strip_prefix("::=").ok_or_else(|| reader.wrong("expected `::=`"))?;
        let body = reader.alternatives(false)?;
        if !defined.insert(name.clone()) {
            return Err(GrammarError::Invalid(format!("the rule `{name}` is defined twice")));
        }
        rules.push(format!("{}: {body}", reader.rule(&name)));
        reader.blank(true);
    }
    if let Some(missing) = reader.used.iter().find(|name| !defined.contains(*name)) {
        return Err(GrammarError::Invalid(format!("the rule `{missing}` is used and not defined")));
    }
    if !defined.contains("root") {
        return Err(GrammarError::Invalid("the grammar has no rule `root`".to_owned()));
    }
    Ok(format!("start: {}\n{}", reader.rule("root"), rules.join("\n")))
}

struct Reader<'a> {
    rest: &'a str,
    /// Rules by number: GBNF's names may be Lark's keywords or terminals.
    names: BTreeMap<String, usize>,
    used: BTreeSet<String>,
}

impl Reader<'_> {
    fn wrong(&self, what: &str) -> GrammarError {
        let near: String = self.rest.lines().next().unwrap_or_default().chars().take(40).collect();
        GrammarError::Invalid(if near.is_empty() {
            format!("{what} at the end")
        } else {
            format!("{what} at `{near}`")
        })
    }

    fn rule(&mut self, name: &str) -> String {
        let next = self.names.len();
        format!("r{}", self.names.entry(name.to_owned()).or_insert(next))
    }

    /// Skips blanks and comments, line ends only where `lines` says.
    fn blank(&mut self, lines: bool) {
        loop {
            self.rest = self
                .rest
                .trim_start_matches(|c| c == ' ' || c == '\t' || (lines && (c == '\n' || c == '\r')));
            if !self.rest.starts_with('#') {
                return;
            }
            self.rest = self.rest.find('\n').map_or("", |end| &self.rest[end..]);
        }
    }

    fn name(&mut self) -> Option<String> {
        let end = self
            .rest
            .find(|c: char| !(c.is_ascii_alphanumeric() || c == '-' || c == '_'))
            .unwrap_or(self.rest.len());
        let (name, rest) = self.rest.split_at(end);
        if name.is_empty() {
            return None;
        }
        self.rest = rest;
        Some(name.to_owned())
    }

    /// Alternatives up to a line end, or to the end of the group.
    fn alternatives(&mut self, grouped: bool) -> Result<String, GrammarError> {
        let mut alternatives = vec![self.sequence(grouped)?];
        while let Some(rest) = self.rest.strip_prefix('|') {
            self.rest = rest;
            // A line may end after `|`.
            self.blank(true);
            alternatives.push(self.sequence(grouped)?);
        }
        Ok(alternatives.join(" | "))
    }

    fn sequence(&mut self, grouped: bool) -> Result<String, GrammarError> {
        let mut items: Vec<String> = Vec::new();
        loop {
            self.blank(grouped);
            let item = match self.rest.chars().next() {
                None | Some('|' | ')' | '\n' | '\r') => break,
                Some('"') => {
                    self.rest = self.rest.get(1..).unwrap_or_default();
                    let mut text = String::new();
                    while let Some(c) = self.character('"')? {
                        text.push(c);
                    }
                    literal(&text)
                }
                Some('[') => self.class()?,
                Some('.') => {
                    self.rest = self.rest.get(1..).unwrap_or_default();
                    "/(.|\\n)/".to_owned()
                }
                Some('(') => {
                    self.rest = self.rest.get(1..).unwrap_or_default();
                    let group = self.alternatives(true)?;
                    self.blank(true);
                    self.rest = self.rest.strip_prefix(')').ok_or_else(|| self.wrong("expected `)`"))?;
                    format!("({group})")
                }
                Some(_) => {
                    let name = self.name().ok_or_else(|| self.wrong("unexpected character"))?;
                    self.used.insert(name.clone());
                    self.rule(&name)
                }
            };
            let repeat = self.repetition()?;
            items.push(format!("{item}{repeat}"));
        }
        Ok(if items.is_empty() { "\"\"".to_owned() } else { items.join(" ") })
    }

    fn repetition(&mut self) -> Result<String, GrammarError> {
        match self.rest.chars().next() {
            Some(c @ ('*' | '+' | '?')) => {
                self.rest = self.rest.get(1..).unwrap_or_default();
                Ok(c.to_string())
            }
            Some('{') => {
                let (inside, rest) = self.rest.split_once('}').ok_or_else(|| self.wrong("expected `}`"))?;
                let inside: String = inside.chars().skip(1).filter(|c| !c.is_whitespace()).collect();
                let numbers = inside.split(',').all(|part| part.bytes().all(|b| b.is_ascii_digit()));
                if !numbers || inside.is_empty() || inside.starts_with(',') || inside.matches(',').count() > 1
                {
                    return Err(self.wrong("expected `{m}`, `{m,}` or `{m,n}`"));
                }
                self.rest = rest;
                Ok(format!("{{{inside}}}"))
            }
            _ => Ok(String::new()),
        }
    }

    /// One character of a text or a class, escapes resolved; `None` at `close`, which is consumed.
    fn character(&mut self, close: char) -> Result<Option<char>, GrammarError> {
        let mut chars = self.rest.chars();
        let c = chars.next().ok_or_else(|| self.wrong("a text or class does not end"))?;
        if c != '\\' {
            self.rest = chars.as_str();
            return Ok((c != close).then_some(c));
        }
        let escaped = chars.next().ok_or_else(|| self.wrong("an escape does not end"))?;
        let after = chars.as_str();
        let digits = match escaped {
            'x' => 2,
            'u' => 4,
            'U' => 8,
            _ => 0,
        };
        if digits == 0 {
            self.rest = after;
            return Ok(Some(match escaped {
                'n' => '\n',
                'r' => '\r',
                't' => '\t',
                other => other,
            }));
        }
        let code =
            after.get(..digits).and_then(|hex| u32::from_str_radix(hex, 16).ok()).and_then(char::from_u32);
        let c = code.ok_or_else(|| self.wrong("not a character"))?;
        self.rest = after.get(digits..).unwrap_or_default();
        Ok(Some(c))
    }

    fn class(&mut self) -> Result<String, GrammarError> {
        self.rest = self.rest.get(1..).unwrap_or_default();
        let mut class = String::from("[");
        if let Some(rest) = self.rest.strip_prefix('^') {
            self.rest = rest;
            class.push('^');
        }
        let mut empty = true;
        loop {
            let escaped = self.rest.starts_with('\\');
            let Some(c) = self.character(']')? else { break };
            // A hyphen between two characters is a range.
            if c == '-' && !escaped && !empty && !self.rest.starts_with(']') {
                class.push('-');
            } else {
                class.push_str(&format!("\\x{{{:x}}}", u32::from(c)));
            }
            empty = false;
        }
        if empty {
            return Err(self.wrong("an empty class"));
        }
        class.push(']');
        Ok(format!("/{class}/"))
    }
}
