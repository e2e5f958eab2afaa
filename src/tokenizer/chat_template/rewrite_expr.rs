//! Rewrites Jinja2 expressions into minijinja expressions with the same meaning.
//!
//! The grammar is Jinja2's own (its `parser.py`). What means the same in minijinja is copied; operators that do not
//! become calls of the functions in `operators`. Text is produced token by token in source order and every token
//! is put on its source line, so the lines in minijinja's errors are the template's.

use std::fmt::Write;

use super::error::SyntaxError;
use super::lexer::TokenKind;
use super::methods::{PRIVATE, SLICE};
use super::reader::{Fragment, Parsed, Reader, literal};

/// How many operands one `+` or `~` chain may have.
const MAX_OPERANDS: usize = 1000;

impl Reader<'_> {
    /// An expression, or several separated by commas that make a tuple.
    pub(super) fn tuple(&mut self, with_condition: bool, ends: &[&str]) -> Parsed {
        let mut items = Vec::new();
        let mut is_tuple = false;
        loop {
            let ended = self.at_end() || self.is_operator(")") || ends.iter().any(|end| self.is_name(end));
            if ended && is_tuple {
                break;
            }
            items.push(if with_condition { self.expression()? } else { self.or()? });
            if !self.skip_operator(",") {
                break;
            }
            is_tuple = true;
        }
        if is_tuple {
            return self.collection("__tuple([", items, "])");
        }
        items.pop().ok_or_else(|| self.unexpected("an expression"))
    }

    fn collection(&self, open: &str, items: Vec<Fragment>, close: &str) -> Parsed {
        let height = items.iter().map(|item| item.height).max().unwrap_or(0);
        let items: Vec<_> = items.into_iter().map(|item| item.text).collect();
        self.fragment(format!("{open}{}{close}", items.join(", ")), height + 1)
    }

    /// A full expression, `a if b else c` included.
    pub(super) fn expression(&mut self) -> Parsed {
        self.nested(|reader| {
            let mut result = reader.or()?;
            while reader.is_name("if") {
                let keyword = reader.put("if");
                let condition = reader.or()?;
                let mut height = result.height.max(condition.height);
                let mut text = format!("{} {keyword} {}", result.text, condition.text);
                if reader.is_name("else") {
                    let keyword = reader.put("else");
                    let otherwise = reader.expression()?;
                    height = height.max(otherwise.height);
                    let _ = write!(text, " {keyword} {}", otherwise.text);
                }
                result = reader.fragment(text, height + 1)?;
            }
            Ok(result)
        })
    }

    /// An expression without a trailing `if`, as in the head of a loop.
    pub(super) fn or(&mut self) -> Parsed {
        self.left_associative(Self::and, |reader| reader.is_name("or").then_some("or"))
    }

    fn and(&mut self) -> Parsed {
        self.left_associative(Self::not, |reader| reader.is_name("and").then_some("and"))
    }

    fn left_associative(
        &mut self,
        operand: fn(&mut Self) -> Parsed,
        operator: fn(&Self) -> Option<&'static str>,
    ) -> Parsed {
        let mut result = operand(self)?;
        while let Some(symbol) = operator(self) {
            let symbol = self.put(symbol);
            let right = operand(self)?;
            let height = result.height.max(right.height) + 1;
            result = self.fragment(format!("{} {symbol} {}", result.text, right.text), height)?;
        }
        Ok(result)
    }

    fn not(&mut self) -> Parsed {
        if !self.is_name("not") {
            return self.comparison();
        }
        let keyword = self.put("not");
        let operand = self.nested(Self::not)?;
        self.fragment(format!("{keyword} {}", operand.text), operand.height + 1)
    }

    fn comparison(&mut self) -> Parsed {
        let mut operands = vec![self.sum()?];
        let mut operators = Vec::new();
        loop {
            let (operator, function) = match (self.peek(), self.peek_second()) {
                (Some(TokenKind::Operator("==")), _) => ("==", "__eq"),
                (Some(TokenKind::Operator("!=")), _) => ("!=", "__ne"),
                (Some(TokenKind::Operator("<")), _) => ("<", "__lt"),
                (Some(TokenKind::Operator("<=")), _) => ("<=", "__le"),
                (Some(TokenKind::Operator(">")), _) => (">", "__gt"),
                (Some(TokenKind::Operator(">=")), _) => (">=", "__ge"),
                (Some(TokenKind::Name(name)), _) if name == "in" => ("in", "__in"),
                (Some(TokenKind::Name(name)), Some(TokenKind::Name(second)))
                    if name == "not" && second == "in" =>
                {
                    self.position += 1;
                    ("not in", "__not_in")
                }
                _ => break,
            };
            self.position += 1;
            operators.push((operator, function));
            operands.push(self.sum()?);
        }
        match operators.as_slice() {
            [] => operands.pop().ok_or_else(|| self.unexpected("an expression")),
            [(_, function)] => self.collection(&format!("{function}("), operands, ")"),
            _ => {
                let height = operands.iter().map(|operand| operand.height).max();
                let mut text = String::from("__compare(");
                for (index, operand) in operands.iter().enumerate() {
                    if let Some((operator, _)) = index.checked_sub(1).and_then(|i| operators.get(i)) {
                        let _ = write!(text, ", \"{operator}\", ");
                    }
                    text.push_str(&operand.text);
                }
                text.push(')');
                self.fragment(text, height.unwrap_or(0) + 1)
            }
        }
    }

    fn sum(&mut self) -> Parsed {
        let mut operands = vec![self.concatenation()?];
        loop {
            if self.skip_operator("+") {
                operands.push(self.concatenation()?);
            } else if self.is_operator("-") {
                let left = self.flat_call("__add", operands)?;
                let minus = self.put("-");
                let right = self.concatenation()?;
                let height = left.height.max(right.height) + 1;
                let text = format!("{} {minus} {}", left.text, right.text);
                operands = vec![self.fragment(text, height)?];
            } else {
                return self.flat_call("__add", operands);
            }
        }
    }

    fn concatenation(&mut self) -> Parsed {
        let mut operands = vec![self.product()?];
        while self.skip_operator("~") {
            operands.push(self.product()?);
        }
        self.flat_call("__concat", operands)
    }

    fn flat_call(&self, function: &str, mut operands: Vec<Fragment>) -> Parsed {
        if operands.len() > MAX_OPERANDS {
            return Err(self.error(format!("the expression has more than {MAX_OPERANDS} operands in a row")));
        }
        match operands.pop() {
            Some(only) if operands.is_empty() => Ok(only),
            Some(last) => {
                operands.push(last);
                self.collection(&format!("{function}("), operands, ")")
            }
            None => Err(self.unexpected("an expression")),
        }
    }

    fn product(&mut self) -> Parsed {
        let mut result = self.power()?;
        loop {
            let operator = match self.peek() {
                Some(TokenKind::Operator(operator @ ("*" | "/" | "//" | "%"))) => *operator,
                _ => return Ok(result),
            };
            let symbol = self.put(operator);
            let right = self.power()?;
            let height = result.height.max(right.height) + 1;
            let text = match operator {
                "*" => format!("__mul({}, {})", result.text, right.text),
                "%" => format!("__mod({}, {})", result.text, right.text),
                _ => format!("{} {symbol} {}", result.text, right.text),
            };
            result = self.fragment(text, height)?;
        }
    }

    fn power(&mut self) -> Parsed {
        self.left_associative(|reader| reader.unary(true), |reader| reader.is_operator("**").then_some("**"))
    }

    fn unary(&mut self, with_filters: bool) -> Parsed {
        let operand = if self.is_operator("-") {
            let minus = self.put("-");
            let operand = self.nested(|reader| reader.unary(false))?;
            self.fragment(format!("{minus}{}", operand.text), operand.height + 1)?
        } else if self.is_operator("+") {
            let plus = self.put("__pos(");
            let operand = self.nested(|reader| reader.unary(false))?;
            self.fragment(format!("{plus}{})", operand.text), operand.height + 1)?
        } else {
            self.primary()?
        };
        let operand = self.postfix(operand)?;
        if with_filters { self.filters(operand) } else { Ok(operand) }
    }

    fn primary(&mut self) -> Parsed {
        let kind = self.peek().ok_or_else(|| self.unexpected("an expression"))?;
        match kind {
            TokenKind::Name(name) => {
                let text = self.put(name);
                self.fragment(text, 1)
            }
            TokenKind::Int(number) => {
                let text = self.put(number);
                self.fragment(text, 1)
            }
            TokenKind::Float(number) => {
                let text = self.put(number);
                self.fragment(text, 1)
            }
            TokenKind::Str(_) => {
                let text = self.string()?;
                let text = self.sync_before(&literal(&text));
                self.fragment(text, 1)
            }
            TokenKind::Operator("(") => {
                let open = self.put("(");
                let inner = self.nested(|reader| {
                    if reader.is_operator(")") {
                        return reader.fragment("__tuple([])".to_owned(), 1);
                    }
                    reader.tuple(true, &[])
                })?;
                let close = self.closing(")")?;
                self.fragment(format!("{open}{}{close}", inner.text), inner.height + 1)
            }
            TokenKind::Operator("[") => {
                let open = self.put("__list([");
                let items = self.nested(|reader| reader.separated("]", |reader| reader.expression()))?;
                let close = self.closing("]")?;
                self.collection(&open, items, &format!("{close})"))
            }
            TokenKind::Operator("{") => {
                let open = self.put("__dict([");
                let items = self.nested(|reader| reader.separated("}", Self::dict_entry))?;
                let close = self.closing("}")?.replace('}', "]");
                self.collection(&open, items, &format!("{close})"))
            }
            TokenKind::Operator(_) => Err(self.unexpected("an expression")),
        }
    }

    fn dict_entry(&mut self) -> Parsed {
        let key = self.expression()?;
        self.expect_operator(":")?;
        let value = self.expression()?;
        let height = key.height.max(value.height);
        self.fragment(format!("{}, {}", key.text, value.text), height)
    }

    /// Items separated by commas up to a closing bracket, which stays.
    fn separated(
        &mut self,
        close: &str,
        item: impl Fn(&mut Self) -> Parsed,
    ) -> Result<Vec<Fragment>, SyntaxError> {
        let mut items = Vec::new();
        while !self.is_operator(close) {
            if !items.is_empty() {
                self.expect_operator(",")?;
                if self.is_operator(close) {
                    break;
                }
            }
            items.push(item(self)?);
        }
        Ok(items)
    }

    fn postfix(&mut self, mut base: Fragment) -> Parsed {
        loop {
            let height = base.height + 1;
            base = match self.peek() {
                Some(TokenKind::Operator(".")) => {
                    let dot = self.put(".");
                    match self.peek() {
                        Some(TokenKind::Name(name)) if name.starts_with("__") => {
                            let text = format!("{}{dot}{PRIVATE}({})", base.text, literal(name));
                            self.position += 1;
                            self.fragment(text, height)?
                        }
                        Some(TokenKind::Name(name)) => {
                            let name = self.put(name);
                            self.fragment(format!("{}{dot}{name}", base.text), height)?
                        }
                        Some(TokenKind::Int(index)) => {
                            self.position += 1;
                            self.fragment(format!("{}[{index}]", base.text), height)?
                        }
                        _ => return Err(self.unexpected("a name or an integer")),
                    }
                }
                Some(TokenKind::Operator("[")) => self.subscript(base)?,
                Some(TokenKind::Operator("(")) => {
                    let arguments = self.call_arguments()?;
                    let height = height.max(arguments.height + 1);
                    self.fragment(format!("{}{}", base.text, arguments.text), height)?
                }
                _ => return Ok(base),
            };
        }
    }

    fn subscript(&mut self, base: Fragment) -> Parsed {
        let open = self.put("");
        let mut bounds: Vec<Option<Fragment>> = Vec::new();
        let mut is_slice = false;
        let mut pending: Option<Fragment> = None;
        let mut items = Vec::new();
        self.nested(|reader| {
            loop {
                if reader.skip_operator(":") {
                    is_slice = true;
                    bounds.push(pending.take());
                } else if reader.is_operator(",") && !is_slice {
                    reader.position += 1;
                    let item = pending.take();
                    items.push(item.ok_or_else(|| reader.unexpected("an expression"))?);
                } else if reader.is_operator("]") {
                    return Ok(());
                } else if pending.is_none() {
                    pending = Some(reader.expression()?);
                } else {
                    return Err(reader.unexpected("`]`"));
                }
            }
        })?;
        let close = self.closing("]")?;
        if is_slice {
            bounds.push(pending);
            if bounds.len() > 3 || !items.is_empty() {
                return Err(self.error("a slice has at most a start, a stop and a step"));
            }
            let heights = bounds.iter().flatten().map(|bound| bound.height);
            let height = heights.max().unwrap_or(0).max(base.height) + 1;
            let bounds: Vec<_> = bounds
                .into_iter()
                .map(|bound| bound.map_or_else(|| "none".to_owned(), |bound| bound.text))
                .collect();
            let close = close.replace(']', ")");
            let text = format!("{}{open}.{SLICE}({}{close}", base.text, bounds.join(", "));
            return self.fragment(text, height);
        }
        let key = match (pending, items.is_empty()) {
            (Some(key), true) => key,
            (None, true) => return Err(self.error("the subscript is empty")),
            (last, false) => {
                items.extend(last);
                self.collection("__tuple([", items, "])")?
            }
        };
        let height = base.height.max(key.height) + 1;
        self.fragment(format!("{}{open}[{}{close}", base.text, key.text), height)
    }

    /// The parenthesised arguments of a call.
    pub(super) fn call_arguments(&mut self) -> Parsed {
        let open = self.put("(");
        let arguments = self.nested(|reader| {
            reader.separated(")", |reader| {
                let prefix = match (reader.peek(), reader.peek_second()) {
                    (Some(TokenKind::Operator(star @ ("*" | "**"))), _) => reader.put(star),
                    (Some(TokenKind::Name(name)), Some(TokenKind::Operator("="))) => {
                        let name = reader.put(name);
                        name + &reader.put("=")
                    }
                    _ => String::new(),
                };
                let value = reader.expression()?;
                reader.fragment(prefix + &value.text, value.height)
            })
        })?;
        let close = self.closing(")")?;
        self.collection(&open, arguments, &close)
    }

    fn filters(&mut self, mut base: Fragment) -> Parsed {
        loop {
            base = if self.is_operator("|") {
                let pipe = self.put("|");
                let filter = self.filter()?;
                let height = base.height.max(filter.height) + 1;
                self.fragment(format!("{}{pipe}{}", base.text, filter.text), height)?
            } else if self.is_name("is") {
                self.test(base)?
            } else {
                return Ok(base);
            };
        }
    }

    /// The name of a filter and its arguments.
    fn filter(&mut self) -> Parsed {
        let at = self.position;
        let name = self.dotted_name()?;
        if self.check_filters && !super::environment::is_filter(&name) {
            self.position = at;
            return Err(self.error(format!("there is no filter named `{name}`")));
        }
        let name = self.sync_before(&name);
        if self.is_operator("(") {
            let arguments = self.call_arguments()?;
            return self.fragment(name + &arguments.text, arguments.height + 1);
        }
        self.fragment(name, 1)
    }

    /// `filter|filter|...` of a `{% filter %}` or `{% set %}` block.
    pub(super) fn filter_chain(&mut self) -> Parsed {
        let mut chain = self.filter()?;
        while self.is_operator("|") {
            let pipe = self.put("|");
            let filter = self.filter()?;
            let height = chain.height.max(filter.height) + 1;
            chain = self.fragment(format!("{}{pipe}{}", chain.text, filter.text), height)?;
        }
        Ok(chain)
    }

    fn test(&mut self, base: Fragment) -> Parsed {
        let keyword = self.put("is");
        let negation = if self.is_name("not") { self.put(" not") } else { String::new() };
        let at = self.position;
        let name = self.dotted_name()?;
        if self.check_filters && !super::environment::is_test(&name) {
            self.position = at;
            return Err(self.error(format!("there is no test named `{name}`")));
        }
        let name = self.sync_before(&name);
        let takes_argument = match self.peek() {
            Some(TokenKind::Name(name)) => !matches!(name.as_str(), "else" | "or" | "and"),
            Some(TokenKind::Str(_) | TokenKind::Int(_) | TokenKind::Float(_)) => true,
            Some(TokenKind::Operator(operator)) => matches!(*operator, "[" | "{"),
            None => false,
        };
        let (arguments, height) = if self.is_operator("(") {
            let arguments = self.call_arguments()?;
            (arguments.text, arguments.height)
        } else if takes_argument {
            if self.is_name("is") {
                return Err(self.error("tests cannot be chained with `is`"));
            }
            let argument = self.primary()?;
            let argument = self.postfix(argument)?;
            (format!("({})", argument.text), argument.height)
        } else {
            ("()".to_owned(), 0)
        };
        let text = format!("{} {keyword}{negation} {name}{arguments}", base.text);
        self.fragment(text, base.height.max(height) + 1)
    }
}
