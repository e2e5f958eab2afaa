//! What loading a model from disk promises, above all for files that lie.

mod checkpoint {
    mod header;
    mod model_argument;
    mod snapshot;
    mod support;
}
