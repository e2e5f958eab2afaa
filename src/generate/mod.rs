//! Generation: tokens from a model ([`step`]), text from tokens ([`stream`]), stop strings ([`stop`]), caches kept
//! in files ([`prompt_cache`]).

pub mod prompt_cache;
pub mod step;
pub mod stop;
pub mod stream;
