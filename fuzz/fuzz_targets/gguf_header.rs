//! Any bytes as a GGUF file: the parser must not panic, and tensors must lie in the file.

#![no_main]

use libfuzzer_sys::fuzz_target;
use mlx_bun::checkpoint::gguf::header::Header;

fuzz_target!(|file: &[u8]| {
    let _ = Header::parse(file);
});
