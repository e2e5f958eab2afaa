//! Any bytes as a safetensors file: the parser must not panic, and what it accepts must lie in the file.

#![no_main]

use libfuzzer_sys::fuzz_target;
use mlx_bun::checkpoint::safetensors::parse_header;

fuzz_target!(|file: &[u8]| {
    let Ok(header) = parse_header(file) else { return };
    for tensor in &header.tensors {
        let bytes = file.get(tensor.range.clone()).expect("a range inside the file");
        assert_eq!(tensor.dtype.bytes_of(&tensor.shape), Some(bytes.len()));
    }
});
