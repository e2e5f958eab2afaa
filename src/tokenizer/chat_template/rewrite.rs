//! Rewrites a Jinja2 template into a minijinja template with the same meaning.
//!
//! Whitespace control is done here (by the lexer), so the result has none. `{% generation %}`, which minijinja
//! does not know, becomes a scope between two markers; tags that could reach other templates are refused; the
//! expressions go through `rewrite_expr`. Lines are kept, nesting and size are bounded: minijinja's parser and
//! compiler recurse, and a template comes from whoever published the model.

use super::error::SyntaxError;
use super::lexer::{Piece, Tag, lex};
use super::reader::{Reader, literal};

/// The longest template in bytes; the longest published ones have about a tenth of that.
pub(super) const MAX_SOURCE: usize = 1 << 20;

/// How deep blocks may nest.
const MAX_BLOCKS: usize = 40;

/// How many `elif` one `if` may have; minijinja nests them.
const MAX_ELIFS: usize = 150;

/// The variables printed where a `{% generation %}` block begins and ends.
pub(super) const GENERATION_BEGIN: &str = "__generation_begin";
pub(super) const GENERATION_END: &str = "__generation_end";

/// An open block.
struct Block {
    name: &'static str,
    line: usize,
    elifs: usize,
    in_else: bool,
}

struct Rewriter {
    out: String,
    /// The line that `out` ends on.
    line: usize,
    blocks: Vec<Block>,
}

/// Rewrites a template.
pub(super) fn rewrite(source: &str) -> Result<String, SyntaxError> {
    if source.len() > MAX_SOURCE {
        return Err(SyntaxError {
            line: 1,
            message: format!("the template is longer than {MAX_SOURCE} bytes"),
        });
    }
    let mut rewriter = Rewriter { out: String::with_capacity(source.len() * 2), line: 1, blocks: Vec::new() };
    for piece in lex(source)? {
        match piece {
            Piece::Text(text) => rewriter.text(&text),
            Piece::Output(tag) => rewriter.output(&tag)?,
            Piece::Block(tag) => rewriter.block(&tag)?,
        }
    }
    match rewriter.blocks.last() {
        Some(block) => Err(SyntaxError {
            line: block.line,
            message: format!("the `{}` block is never closed", block.name),
        }),
        None => Ok(rewriter.out),
    }
}

impl Rewriter {
    fn text(&mut self, text: &str) {
        // A brace could join with what follows into a delimiter.
        if text.contains('{') {
            self.out.push_str("{{ ");
            self.out.push_str(&literal(text));
            self.out.push_str(" }}");
        } else {
            self.out.push_str(text);
            self.line += text.matches('\n').count();
        }
    }

    fn reader<'a>(&self, tag: &'a Tag) -> Reader<'a> {
        let in_condition = self.blocks.iter().any(|block| block.name == "if");
        Reader::new(tag, self.line, !in_condition)
    }

    /// Appends a finished tag.
    fn push(&mut self, reader: &Reader, text: &str) {
        self.out.push_str(text);
        self.line = reader.output_line();
    }

    fn output(&mut self, tag: &Tag) -> Result<(), SyntaxError> {
        let mut reader = self.reader(tag);
        let value = reader.tuple(true, &[])?;
        reader.expect_end()?;
        self.push(&reader, &format!("{{{{ {} }}}}", value.text));
        Ok(())
    }

    fn open(&mut self, name: &'static str, line: usize) -> Result<(), SyntaxError> {
        if self.blocks.len() >= MAX_BLOCKS {
            return Err(SyntaxError {
                line,
                message: format!("blocks nest more than {MAX_BLOCKS} levels deep"),
            });
        }
        self.blocks.push(Block { name, line, elifs: 0, in_else: false });
        Ok(())
    }

    fn block(&mut self, tag: &Tag) -> Result<(), SyntaxError> {
        let mut reader = self.reader(tag);
        let lead = reader.sync();
        let keyword = reader.identifier()?;
        let body = match keyword {
            "if" => {
                self.open("if", tag.line)?;
                // What an `if` guards may name filters that do not exist.
                reader = self.reader(tag);
                reader.sync();
                reader.identifier()?;
                format!("if {}", reader.tuple(false, &[])?.text)
            }
            "elif" => {
                self.branch(&reader, keyword)?;
                format!("elif {}", reader.tuple(false, &[])?.text)
            }
            "else" => {
                self.branch(&reader, keyword)?;
                "else".to_owned()
            }
            "for" => {
                self.open("for", tag.line)?;
                for_loop(&mut reader)?
            }
            "set" => self.set(&mut reader, tag.line)?,
            "with" => {
                self.open("with", tag.line)?;
                with(&mut reader)?
            }
            "macro" => {
                self.open("macro", tag.line)?;
                let name = reader.identifier()?;
                format!("macro {name}{}", parameters(&mut reader)?)
            }
            "call" => {
                self.open("call", tag.line)?;
                let parameters =
                    if reader.is_operator("(") { parameters(&mut reader)? } else { String::new() };
                format!("call{parameters} {}", reader.expression()?.text)
            }
            "filter" => {
                self.open("filter", tag.line)?;
                format!("filter {}", reader.filter_chain()?.text)
            }
            "block" => {
                self.open("block", tag.line)?;
                let name = reader.identifier()?;
                reader.skip_name("scoped");
                format!("block {name}")
            }
            "generation" => {
                self.open("generation", tag.line)?;
                reader.expect_end()?;
                self.push(&reader, &format!("{{%{lead} with %}}{{{{ {GENERATION_BEGIN} }}}}"));
                return Ok(());
            }
            "break" | "continue" => {
                if !self.in_loop() {
                    return Err(reader.error(format!("`{keyword}` stands outside of a loop")));
                }
                keyword.to_owned()
            }
            "print" => {
                let mut outputs = format!("{{{{{lead} {} }}}}", reader.expression()?.text);
                while reader.skip_operator(",") {
                    outputs.push_str(&format!("{{{{ {} }}}}", reader.expression()?.text));
                }
                reader.expect_end()?;
                self.push(&reader, &outputs);
                return Ok(());
            }
            "include" | "import" | "from" | "extends" => {
                return Err(reader
                    .error(format!("`{keyword}` is refused: a chat template cannot load other templates")));
            }
            _ => match keyword.strip_prefix("end") {
                Some(name) => self.close(&mut reader, name)?,
                None => return Err(reader.error(format!("unknown tag `{keyword}`"))),
            },
        };
        reader.expect_end()?;
        self.push(&reader, &format!("{{%{lead} {body} %}}"));
        Ok(())
    }

    fn in_loop(&self) -> bool {
        let scope = self.blocks.iter().rev();
        scope
            .take_while(|block| !matches!(block.name, "macro" | "call" | "block" | "generation"))
            .any(|block| block.name == "for" && !block.in_else)
    }

    fn branch(&mut self, reader: &Reader, keyword: &str) -> Result<(), SyntaxError> {
        match self.blocks.last_mut() {
            Some(block) if block.name == "if" && !block.in_else => {
                block.elifs += 1;
                if block.elifs > MAX_ELIFS {
                    return Err(reader.error(format!("an `if` has more than {MAX_ELIFS} branches")));
                }
                block.in_else = keyword == "else";
                Ok(())
            }
            Some(block) if block.name == "for" && keyword == "else" && !block.in_else => {
                block.in_else = true;
                Ok(())
            }
            _ => Err(reader.error(format!("`{keyword}` without an `if`"))),
        }
    }

    fn close(&mut self, reader: &mut Reader, name: &str) -> Result<String, SyntaxError> {
        let open = match self.blocks.pop() {
            Some(open) if open.name == name => open,
            Some(open) => {
                return Err(reader.error(format!(
                    "`end{name}` found where `end{}` was expected (opened on line {})",
                    open.name, open.line
                )));
            }
            None => return Err(reader.error(format!("`end{name}` closes nothing"))),
        };
        if name == "block" && !reader.at_end() {
            reader.identifier()?;
        }
        if open.name == "generation" {
            self.out.push_str(&format!("{{{{ {GENERATION_END} }}}}"));
            return Ok("endwith".to_owned());
        }
        Ok(format!("end{name}"))
    }

    fn set(&mut self, reader: &mut Reader, line: usize) -> Result<String, SyntaxError> {
        let (target, has_attribute) = assignment_target(reader, true)?;
        if reader.skip_operator("=") {
            let value = reader.tuple(true, &[])?;
            return Ok(if has_attribute {
                format!("set {target} = __storable({})", value.text)
            } else {
                format!("set {target} = {}", value.text)
            });
        }
        self.open("set", line)?;
        if reader.skip_operator("|") {
            return Ok(format!("set {target} | {}", reader.filter_chain()?.text));
        }
        Ok(format!("set {target}"))
    }
}

/// `name`, `name.attribute`, or several with commas and parentheses; and whether there is an attribute.
fn assignment_target(reader: &mut Reader, dotted: bool) -> Result<(String, bool), SyntaxError> {
    let mut target = String::new();
    let mut has_attribute = false;
    let mut depth = 0;
    loop {
        if reader.skip_operator("(") {
            depth += 1;
            if depth > 10 {
                return Err(reader.error("the assignment nests too deep"));
            }
            target.push('(');
            continue;
        }
        target.push_str(reader.identifier()?);
        while dotted && reader.skip_operator(".") {
            has_attribute = true;
            target.push('.');
            target.push_str(reader.identifier()?);
        }
        while depth > 0 && reader.skip_operator(")") {
            depth -= 1;
            target.push(')');
        }
        if !reader.skip_operator(",") {
            break;
        }
        target.push_str(", ");
        if reader.is_operator("=") || reader.is_name("in") {
            break;
        }
    }
    if depth > 0 {
        reader.expect_operator(")")?;
    }
    Ok((target, has_attribute))
}

fn for_loop(reader: &mut Reader) -> Result<String, SyntaxError> {
    let (target, _) = assignment_target(reader, false)?;
    reader.expect_name("in")?;
    let iterable = reader.tuple(false, &["if", "recursive"])?;
    let mut text = format!("for {target} in __iter({})", iterable.text);
    if reader.skip_name("if") {
        let condition = reader.expression()?;
        text = format!("{text} if {}", condition.text);
    }
    if reader.skip_name("recursive") {
        text.push_str(" recursive");
    }
    Ok(text)
}

fn with(reader: &mut Reader) -> Result<String, SyntaxError> {
    let mut assignments = Vec::new();
    while !reader.at_end() {
        if !assignments.is_empty() {
            reader.expect_operator(",")?;
        }
        let name = reader.identifier()?;
        reader.expect_operator("=")?;
        assignments.push(format!("{name} = {}", reader.expression()?.text));
    }
    Ok(format!("with {}", assignments.join(", ")))
}

/// The parameters of a macro or call block, with their defaults.
fn parameters(reader: &mut Reader) -> Result<String, SyntaxError> {
    reader.expect_operator("(")?;
    let mut parameters: Vec<String> = Vec::new();
    let mut defaults = false;
    while !reader.skip_operator(")") {
        if !parameters.is_empty() {
            reader.expect_operator(",")?;
            if reader.skip_operator(")") {
                break;
            }
        }
        let name = reader.identifier()?;
        if reader.skip_operator("=") {
            defaults = true;
            parameters.push(format!("{name}={}", reader.expression()?.text));
        } else if defaults {
            return Err(reader.error("a parameter without default follows one with a default"));
        } else {
            parameters.push(name.to_owned());
        }
    }
    Ok(format!("({})", parameters.join(", ")))
}
