//! What loading a model from disk promises, above all for files that lie.

// Clippy lets only test functions unwrap, not what they share.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod checkpoint {
    mod header;
    mod model_argument;
    mod snapshot;
    mod support;
}
