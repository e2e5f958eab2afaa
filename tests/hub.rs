//! What fetching from and sending to the hub promises, tried against a stand-in that misbehaves.

// Clippy lets only test functions unwrap, not what they share.
#![allow(clippy::unwrap_used, clippy::expect_used)]

#[path = "support/hub.rs"]
mod stand_in;

mod hub {
    mod download;
    mod support;
    mod upload;
}
