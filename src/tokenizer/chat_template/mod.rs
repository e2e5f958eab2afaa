//! Chat templates: from a conversation to the prompt, byte for byte as transformers' `apply_chat_template` does it
//! (transformers/utils/chat_template_utils.py, on Jinja2's immutable sandbox).
//!
//! [`ChatTemplates`] finds a model's templates and chooses one, [`ChatTemplate`] renders a [`RenderRequest`]. The engine
//! is minijinja; where it means something else than Jinja2 on Python, it is mended in three ways: the template's
//! source is rewritten before it is compiled (`rewrite`: operators, loops, slices, whitespace control, the
//! `generation` tag), values are Python's containers (`containers`), and filters, tests and methods are registered anew.
//!
//! A template is a program of whoever published the model. It runs in bounds: size and nesting of the source, steps
//! ([`Limits::fuel`]), bytes of output, depth of calls and of values. Whatever goes wrong is a [`TemplateError`] with
//! the template's line; there is no fallback to some other prompt.
//!
//! What callers do: bring tool calls into shape with [`parse_tool_arguments`]; encode the prompt without adding
//! special tokens, for the template writes them; not run renders of untrusted conversations on a thread that others
//! wait for, since the bounds allow up to some seconds.

mod arguments;
mod comparisons;
mod containers;
mod environment;
mod error;
mod filters_seq;
mod filters_text;
mod lexer;
mod messages;
mod methods;
mod operators;
mod predicates;
mod python_char;
mod python_json;
mod python_repr;
mod python_sort;
mod python_str;
mod reader;
mod render;
mod rewrite;
mod rewrite_expr;
mod select;
mod strftime;
mod values;

pub use error::TemplateError;
pub use messages::{flatten_text_content, parse_tool_arguments};
pub use render::{ChatTemplate, Limits, RESERVED, RenderRequest};
pub use select::ChatTemplates;
