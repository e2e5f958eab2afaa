//! What gives a reply structure: reasoning and tool calls found in its text ([`ReplyParser`], [`tools`]), and grammars
//! that its tokens must follow ([`grammar`]).

pub mod grammar;
mod markers;
mod reply;
pub mod tools;

pub use reply::{Reply, ReplyEvent, ReplyFormat, ReplyParser};
