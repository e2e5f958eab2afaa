//! Text to token ids and back.

pub mod chat_template;
