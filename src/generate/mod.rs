//! Generation: tokens from a model ([`step`]).

pub mod step;
