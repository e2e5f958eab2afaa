//! Generation: sequences that grow and the step they share ([`sequence`]), tokens from a model ([`step`]), text from
//! tokens ([`stream`]), stop strings ([`stop`]), what requests are checked against ([`limits`]), hidden states for
//! embeddings ([`hidden`]), caches kept in files ([`prompt_cache`]).

pub mod hidden;
pub mod limits;
pub mod prompt_cache;
pub mod sequence;
pub mod step;
pub mod stop;
pub mod stream;
