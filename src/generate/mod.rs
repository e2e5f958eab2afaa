//! Generation: from prompt ids to text.

pub mod stop;
