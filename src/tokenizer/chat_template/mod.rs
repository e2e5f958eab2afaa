//! Chat templates: Jinja as transformers renders it.
