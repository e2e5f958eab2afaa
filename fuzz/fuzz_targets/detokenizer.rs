//! Any ids: the streamed text equals the text decoded at once.

#![no_main]

use std::path::Path;
use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use mlx_bun::tokenizer::Tokenizer;

static TOKENIZERS: LazyLock<Vec<Tokenizer>> = LazyLock::new(|| {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures/tokenizers");
    let load = |kind: &str| Tokenizer::from_dir(&folder.join(kind)).expect("the fixtures are sound");
    ["byte-level", "byte-fallback", "metaspace"].map(load).into()
});

fuzz_target!(|ids: Vec<u32>| {
    for tokenizer in TOKENIZERS.iter() {
        let mut detokenizer = tokenizer.detokenizer();
        let mut streamed = String::new();
        for &id in &ids {
            detokenizer.add_token(id);
            streamed.push_str(&detokenizer.take_segment());
        }
        streamed.push_str(&detokenizer.finish());
        assert_eq!(streamed, tokenizer.decode(&ids, false));
    }
});
