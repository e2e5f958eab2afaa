//! What the registry of models and the collector of old ones promise.

// Clippy lets only test functions unwrap, not what they share.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod registry {
    mod gc;
    mod gc_random;
    mod models;
    mod support;
}
