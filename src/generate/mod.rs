//! Generation: tokens from a model ([`step`]), stop strings ([`stop`]).

pub mod step;
pub mod stop;
