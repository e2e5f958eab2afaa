//! GGUF files against independent readers: tensors against PyPI gguf (and MLX, for the affine layout), token ids
//! against SentencePiece and the models' own pipelines. scripts/oracle/record_gguf.py writes files and expectations.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stdout,
    reason = "helpers of tests are tests too"
)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use half::{bf16, f16};
use mlx_bun::checkpoint::gguf::{GgufModel, load};
use mlx_bun::checkpoint::tensor::{ElementType, Tensor, TensorData};
use proptest::prelude::*;
use serde_json::{Value, json};
use tokenizers::Tokenizer;

const FILES: [&str; 6] = ["types", "llama", "qwen2", "qwen3", "gemma3", "unigram"];

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/gguf").join(name)
}

fn expectations(name: &str) -> Value {
    serde_json::from_slice(&std::fs::read(fixture(name)).unwrap()).unwrap()
}

/// The oracle's `mix_hash`.
fn mix_hash(chunks: &[&[u8]]) -> String {
    let bytes = chunks.concat();
    let mut total = bytes.len() as u64;
    let mut position = 0_u64;
    for chunk in bytes.chunks(8) {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        position = position.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut x = u64::from_le_bytes(word).wrapping_add(position);
        x = (x ^ x >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        x = (x ^ x >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        total = total.wrapping_add(x ^ x >> 31);
    }
    format!("{total:016x}")
}

fn as_f32(tensor: &Tensor) -> Vec<f32> {
    let bytes = tensor.bytes();
    let pairs = || bytes.as_chunks::<2>().0.iter().copied();
    match tensor.dtype {
        ElementType::F32 => bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
        ElementType::F16 => pairs().map(|b| f16::from_le_bytes(b).to_f32()).collect(),
        ElementType::BF16 => pairs().map(|b| bf16::from_le_bytes(b).to_f32()).collect(),
        other => panic!("{other:?}"),
    }
}

/// `q * scale + bias` in single precision, as MLX evaluates its affine layout.
fn dequantized(model: &GgufModel, module: &str) -> Vec<f32> {
    let [weight, scales, biases] =
        ["weight", "scales", "biases"].map(|leaf| &model.tensors[&format!("{module}.{leaf}")]);
    assert_eq!(weight.dtype, ElementType::U32);
    let bits = weight.shape[1] * 32 / (scales.shape[1] * 32);
    let (scales, biases) = (as_f32(scales), as_f32(biases));
    let words: Vec<u32> = weight.bytes().as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b)).collect();
    let element = |index: usize| {
        let per_word = 32 / bits;
        let q = (words[index / per_word] >> (index % per_word * bits)) & ((1 << bits) - 1);
        q as f32 * scales[index / 32] + biases[index / 32] + 0.0
    };
    (0..words.len() * 32 / bits).map(element).collect()
}

fn f32_hash(values: &[f32]) -> String {
    mix_hash(&[&values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<_>>()])
}

#[test]
fn tensors_equal_pypi_gguf() {
    let expected = expectations("expected.json");
    for file in FILES {
        let model = load(&fixture(&format!("{file}.gguf"))).unwrap();
        let mut names = Vec::new();
        for (name, entry) in expected[file]["tensors"].as_object().unwrap() {
            let context = format!("{file}: {name} ({})", entry["type"]);
            let tensor = model.tensors.get(name).unwrap_or_else(|| panic!("{context} is missing"));
            names.push(name.clone());
            let values = match entry["form"].as_str().unwrap() {
                "affine" => {
                    let module = name.strip_suffix(".weight").unwrap();
                    names.extend([format!("{module}.scales"), format!("{module}.biases")]);
                    let scales = &model.tensors[&format!("{module}.scales")];
                    assert_eq!(json!([tensor.shape[0], scales.shape[1] * 32]), entry["shape"], "{context}");
                    dequantized(&model, module)
                }
                form => {
                    let dtype = match form {
                        "dense" => ElementType::F32,
                        "F16" => ElementType::F16,
                        "BF16" => ElementType::BF16,
                        other => panic!("{other}"),
                    };
                    assert_eq!(tensor.dtype, dtype, "{context}");
                    assert_eq!(json!(tensor.shape), entry["shape"], "{context}");
                    as_f32(tensor)
                }
            };
            assert_eq!(json!(f32_hash(&values)), entry["hash"], "{context}");
        }
        names.sort();
        assert_eq!(model.tensors.keys().cloned().collect::<Vec<_>>(), names, "{file}");
    }
}

#[test]
fn configurations_are_hugging_faces() {
    let expected = expectations("expected.json");
    for file in FILES {
        let config = load(&fixture(&format!("{file}.gguf"))).unwrap().config;
        for (field, value) in expected[file]["config"].as_object().unwrap() {
            assert_eq!(config.get(field), Some(value), "{file}: {field}");
        }
        if file != "unigram" {
            let known: Vec<_> = expected[file]["config"].as_object().unwrap().keys().collect();
            let extra: Vec<_> =
                config.keys().filter(|key| !known.contains(key) && *key != "quantization").collect();
            assert!(extra.is_empty(), "{file}: {extra:?}");
        }
    }
}

#[test]
fn plain_tensors_stay_mapped() {
    let model = load(&fixture("qwen2.gguf")).unwrap();
    let mapped = |name: &str| matches!(model.tensors[name].data, TensorData::Mapped { .. });
    assert!(mapped("model.norm.weight"));
    assert!(mapped("model.layers.0.self_attn.k_proj.weight")); // F16
    assert!(mapped("model.layers.0.self_attn.q_proj.bias"));
    assert!(!mapped("model.layers.0.self_attn.q_proj.weight")); // Q8_0
}

fn assert_ids(file: &str, model: &GgufModel, expected: &Value) {
    let tokenizer = Tokenizer::from_bytes(&model.tokenizer_json).unwrap();
    let texts = expected[file]["texts"].as_array().unwrap();
    let ids = expected[file]["ids"].as_array().unwrap();
    assert!(texts.len() == ids.len() && texts.len() > 30);
    for (text, ids) in texts.iter().zip(ids) {
        let text = text.as_str().unwrap();
        let encoding = tokenizer.encode(text, false).unwrap();
        assert_eq!(json!(encoding.get_ids()), *ids, "{file}: {text:?} became {:?}", encoding.get_tokens());
    }
}

#[test]
fn token_ids_equal_the_references() {
    let expected = expectations("tokens.json");
    for file in ["qwen2", "llama", "gemma3", "unigram"] {
        assert_ids(file, &load(&fixture(&format!("{file}.gguf"))).unwrap(), &expected);
    }
}

#[test]
fn bos_and_eos_are_added_as_the_file_says() {
    let specials = |file: &str| {
        let model = load(&fixture(&format!("{file}.gguf"))).unwrap();
        let tokenizer = Tokenizer::from_bytes(&model.tokenizer_json).unwrap();
        let plain = tokenizer.encode("Paris", false).unwrap().get_ids().to_vec();
        let ids = tokenizer.encode("Paris", true).unwrap().get_ids().to_vec();
        let at = ids.windows(plain.len()).position(|window| window == plain).unwrap();
        (ids[..at].to_vec(), ids[at + plain.len()..].to_vec())
    };
    assert_eq!(specials("llama"), (vec![1], vec![])); // SentencePiece's default
    assert_eq!(specials("gemma3"), (vec![2], vec![]));
    assert_eq!(specials("qwen2"), (vec![], vec![]));
    assert_eq!(specials("unigram"), (vec![], vec![2]));
}

#[test]
fn decoding_restores_the_text() {
    for file in ["qwen2", "llama", "gemma3"] {
        let model = load(&fixture(&format!("{file}.gguf"))).unwrap();
        let tokenizer = Tokenizer::from_bytes(&model.tokenizer_json).unwrap();
        for text in ["Hello, world!", "two  spaces", "Größe 日本語 😀", "a\n\n\nb"] {
            let ids = tokenizer.encode(text, false).unwrap().get_ids().to_vec();
            assert_eq!(tokenizer.decode(&ids, false).unwrap(), text, "{file}");
        }
    }
}

#[test]
fn tokenizer_configuration_names_the_special_tokens() {
    let config = |file: &str| load(&fixture(&format!("{file}.gguf"))).unwrap().tokenizer_config;
    let qwen = config("qwen2");
    assert_eq!(qwen["eos_token"], "<|im_end|>");
    assert_eq!(qwen["add_bos_token"], false);
    assert_eq!(qwen["chat_template"], "{{ messages[0].content }}");
    let gemma = config("gemma3");
    assert_eq!([&gemma["bos_token"], &gemma["pad_token"]], ["<bos>", "<pad>"]);
    assert_eq!(gemma["add_bos_token"], true);
    assert!(gemma.get("chat_template").is_none());
}

/// Where scripts/setup.py puts the starter model.
fn starter() -> Option<PathBuf> {
    let set = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let cache = set("MLX_BUN_CACHE").or_else(|| {
        let base = set("XDG_CACHE_HOME").or_else(|| Some(set("HOME")?.join(".cache")))?;
        Some(base.join("mlx-bun"))
    })?;
    let path = cache.join("models/SmolLM2-135M-Instruct.Q4_1.gguf");
    let there = path.exists();
    if !there {
        println!("skipped: no starter model at {} (run scripts/setup.py starter)", path.display());
    }
    there.then_some(path)
}

#[test]
fn starter_model_equals_its_references() {
    let Some(path) = starter() else { return };
    let model = load(&path).unwrap();
    let expected = expectations("starter.json");
    for (stored, hash) in expected.as_object().unwrap() {
        let module = match stored.strip_suffix(".weight").unwrap() {
            "token_embd" => "model.embed_tokens".to_owned(),
            "output_norm" => "model.norm".to_owned(),
            layer => [
                "attn_norm",
                "attn_q",
                "attn_k",
                "attn_v",
                "attn_output",
                "ffn_norm",
                "ffn_gate",
                "ffn_up",
                "ffn_down",
            ]
            .iter()
            .zip([
                "input_layernorm",
                "self_attn.q_proj",
                "self_attn.k_proj",
                "self_attn.v_proj",
                "self_attn.o_proj",
                "post_attention_layernorm",
                "mlp.gate_proj",
                "mlp.up_proj",
                "mlp.down_proj",
            ])
            .find_map(|(part, name)| {
                let number = layer.strip_prefix("blk.")?.strip_suffix(part)?.strip_suffix('.')?;
                Some(format!("model.layers.{number}.{name}"))
            })
            .unwrap(),
        };
        let leaves =
            ["weight", "scales", "biases"].map(|leaf| model.tensors.get(&format!("{module}.{leaf}")));
        let bytes: Vec<&[u8]> = leaves.into_iter().flatten().map(Tensor::bytes).collect();
        assert_eq!(json!(mix_hash(&bytes)), *hash, "{module}");
    }
    // 61 norms, and 211 matrices of three tensors each.
    assert_eq!(model.tensors.len(), 61 + 3 * 211);
    assert_eq!(
        Value::Object(model.config.clone()),
        json!({
            "model_type": "llama",
            "hidden_size": 576,
            "num_hidden_layers": 30,
            "intermediate_size": 1536,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "head_dim": 64,
            "rms_norm_eps": 1e-5,
            "vocab_size": 49152,
            "max_position_embeddings": 8192,
            "rope_theta": 100_000.0,
            "tie_word_embeddings": true,
            "attention_bias": false,
            "mlp_bias": false,
            "quantization": {
                "group_size": 32, "bits": 4, "mode": "affine",
                "model.embed_tokens": {"group_size": 32, "bits": 8, "mode": "affine"},
            },
            "bos_token_id": 1,
            "eos_token_id": [2, 0],
        })
    );
    assert_ids("starter", &model, &expectations("tokens.json"));
    assert!(model.tokenizer_config["chat_template"].as_str().unwrap().contains("<|im_start|>"));
    assert_eq!(model.tokenizer_config["add_bos_token"], false);
}

// --- Damaged and hostile files ---

/// Writes a GGUF file piece by piece, truthful or not.
struct Forge(Vec<u8>);

impl Forge {
    fn new(version: u32, tensors: u64, keys: u64) -> Self {
        let mut forge = Self(b"GGUF".to_vec());
        forge.0.extend(version.to_le_bytes());
        forge.0.extend(tensors.to_le_bytes());
        forge.0.extend(keys.to_le_bytes());
        forge
    }

    fn string(mut self, text: &str) -> Self {
        self.0.extend((text.len() as u64).to_le_bytes());
        self.0.extend(text.as_bytes());
        self
    }

    fn u32(mut self, value: u32) -> Self {
        self.0.extend(value.to_le_bytes());
        self
    }

    fn u64(mut self, value: u64) -> Self {
        self.0.extend(value.to_le_bytes());
        self
    }

    fn key(self, key: &str, value: u32) -> Self {
        self.string(key).u32(4).u32(value)
    }

    fn tensor(self, name: &str, dimensions: &[u64], kind: u32, offset: u64) -> Self {
        let forge = self.string(name).u32(dimensions.len() as u32);
        dimensions.iter().fold(forge, |forge, &length| forge.u64(length)).u32(kind).u64(offset)
    }

    fn data(mut self, length: usize) -> Self {
        let aligned = self.0.len().next_multiple_of(32);
        self.0.resize(aligned + length, 0);
        self
    }

    /// The message of the error that loading gives, which is one line and names the file.
    fn refused(self) -> String {
        refused(&self.0)
    }
}

fn in_file<T>(bytes: &[u8], act: impl FnOnce(&Path) -> T) -> T {
    let mut file = tempfile::Builder::new().suffix(".gguf").tempfile().unwrap();
    file.write_all(bytes).unwrap();
    act(file.path())
}

fn refused(bytes: &[u8]) -> String {
    in_file(bytes, |path| {
        let message = load(path).map(|_| ()).expect_err("a refusal").to_string();
        let prefix = format!("cannot load {}: ", path.display());
        assert!(!message.contains('\n') && !message.ends_with('.'), "{message}");
        message.strip_prefix(&prefix).unwrap_or_else(|| panic!("{message}")).to_owned()
    })
}

#[test]
fn other_files_are_refused() {
    assert!(refused(b"").contains("not a GGUF file"));
    assert!(refused(b"GG").contains("not a GGUF file"));
    assert!(refused(b"PK\x03\x04 something else").contains("not a GGUF file"));
    assert!(refused(b"GGUF").contains("ends at byte 4, inside the version"));
    assert!(Forge::new(1, 0, 0).refused().contains("version 1 is not supported"));
    assert!(Forge::new(4, 0, 0).refused().contains("version 4 is not supported"));
    assert!(Forge::new(3_u32.swap_bytes(), 0, 0).refused().contains("big-endian"));
    assert!(load(Path::new("no/such/file.gguf")).unwrap_err().to_string().contains("No such file"));
    assert!(load(Path::new(env!("CARGO_MANIFEST_DIR"))).is_err());
}

/// The header that overflowed MLX's own reader: dimensions whose product wraps.
#[test]
fn dimensions_whose_product_overflows_are_refused() {
    for dimensions in
        [&[(1 << 42) + 1, 1 << 42][..], &[1 << 63, 2], &[u64::MAX], &[1 << 32, 1 << 32, 1 << 32]]
    {
        let message = Forge::new(3, 1, 0).tensor("t", dimensions, 0, 0).data(64).refused();
        assert!(message.contains("tensor \"t\" has the impossible"), "{message}");
    }
    let message = Forge::new(3, 1, 0).tensor("t", &[1 << 40], 0, 0).data(64).refused();
    assert!(message.contains("lies beyond the end of the file"), "{message}");
    let message = Forge::new(3, 1, 0).tensor("t", &[0, 4], 0, 0).data(64).refused();
    assert!(message.contains("impossible shape"), "{message}");
}

#[test]
fn a_million_dimensions_are_refused() {
    let message = Forge::new(3, 1, 0).string("t").u32(1_000_000).u64(1).data(64).refused();
    assert!(message.contains("has 1000000 dimensions"), "{message}");
}

#[test]
fn a_small_file_that_asks_for_gigabytes_is_refused() {
    let cases = [
        Forge::new(3, u64::MAX, 0),
        Forge::new(3, 0, 1 << 40),
        Forge::new(3, 0, 1).u64(1 << 30), // key of 2^30 bytes
        Forge::new(3, 0, 1).string("k").u32(8).u64(1 << 30), // string
        Forge::new(3, 0, 1).string("k").u32(8).u64(u64::MAX), // wraps the cursor
        Forge::new(3, 0, 1).string("k").u32(9).u32(6).u64(1 << 61), // array whose size wraps
        Forge::new(3, 0, 1).string("k").u32(9).u32(8).u64(1 << 30), // array of strings
        Forge::new(3, 0, 1).string("k").u32(9).u32(9).u64(1 << 30), // array of arrays
        Forge::new(3, 1, 0).u64(1 << 30), // tensor name
    ];
    for forge in cases {
        let bytes = forge.data(160).0;
        let (message, peak) = peak_of(|| refused(&bytes));
        assert!(peak < 16 << 10, "{message}: {peak} bytes");
    }
}

#[test]
fn alignment_of_a_gigabyte_is_refused() {
    for value in [1 << 30, 0, 3, 48] {
        let message = Forge::new(3, 0, 1).key("general.alignment", value).refused();
        assert!(
            message.contains(&format!("\"general.alignment\" is {value}, not a power of two")),
            "{message}"
        );
    }
}

#[test]
fn offsets_that_overlap_or_leave_the_file_are_refused() {
    let two = |offset| Forge::new(3, 2, 0).tensor("a", &[32], 0, 0).tensor("b", &[32], 0, offset).data(256);
    let message = two(64).refused();
    assert!(message.contains("tensors \"a\" and \"b\" overlap"), "{message}");
    assert!(two(160).refused().contains("tensor \"b\" lies beyond the end"));
    assert!(two(u64::MAX - 31).refused().contains("tensor \"b\" has the impossible offset"));
    assert!(two(130).refused().contains("not a multiple of the alignment"));
    assert!(two(128).refused().contains("\"general.architecture\" is missing"));
}

#[test]
fn duplicate_names_are_refused() {
    let message = Forge::new(3, 0, 2).key("k", 1).key("k", 2).refused();
    assert!(message.contains("key \"k\" occurs twice"), "{message}");
    let message = Forge::new(3, 2, 0).tensor("t", &[1], 0, 0).tensor("t", &[1], 0, 32).data(64).refused();
    assert!(message.contains("tensor \"t\" occurs twice"), "{message}");
}

#[test]
fn unknown_types_are_named() {
    let message = Forge::new(3, 1, 0).tensor("t\n", &[256], 23, 0).data(256).refused();
    assert!(message.contains(r#"tensor "t\n" has type IQ4_XS, which is not supported"#), "{message}");
    let message = Forge::new(3, 1, 0).tensor("t", &[256], 1000, 0).data(256).refused();
    assert!(message.contains("has type number 1000"), "{message}");
    let message = Forge::new(3, 1, 0).tensor("t", &[40], 2, 0).data(256).refused();
    assert!(message.contains("rows of 40 elements, not a multiple of 32"), "{message}");
    let message = Forge::new(3, 0, 1).string("k").u32(13).refused();
    assert!(message.contains("value of unknown type 13"), "{message}");
}

/// Replaces the first occurrence of a key, name or value of a fixture.
fn edited(file: &str, from: &[u8], to: &[u8]) -> Vec<u8> {
    assert_eq!(from.len(), to.len());
    let mut bytes = std::fs::read(fixture(file)).unwrap();
    let at = bytes.windows(from.len()).position(|window| window == from).unwrap();
    bytes[at..at + to.len()].copy_from_slice(to);
    bytes
}

#[test]
fn version_2_is_read_as_version_3() {
    let mut bytes = std::fs::read(fixture("types.gguf")).unwrap();
    bytes[4] = 2;
    let model = in_file(&bytes, load).unwrap();
    let reference = load(&fixture("types.gguf")).unwrap();
    for (name, tensor) in &reference.tensors {
        assert_eq!(tensor.bytes(), model.tensors[name].bytes(), "{name}");
    }
}

#[test]
fn what_is_not_supported_is_named() {
    let message = refused(&edited("types.gguf", b"llama", b"rwkv7"));
    assert!(
        message.contains("architecture \"rwkv7\" is not supported; supported are llama, qwen2"),
        "{message}"
    );
    let message = refused(&edited("types.gguf", b"blk.1.ffn_up", b"blk.7.ffn_up"));
    assert!(message.contains("no place for tensor \"blk.7.ffn_up.weight\""), "{message}");
    let message = refused(&edited("types.gguf", b"token_embd.weight", b"token_embe.weight"));
    assert!(message.contains("tensor \"token_embd.weight\" is missing"), "{message}");
    let message = refused(&edited("types.gguf", b"llama.block_count", b"llama.block_counu"));
    assert!(message.contains("key \"llama.block_count\" is missing"), "{message}");
    let message = refused(&edited("types.gguf", b"gpt-2", b"gpt-9"));
    assert!(message.contains("is \"gpt-9\", a pre-tokenizer that is not supported"), "{message}");
    let message = refused(&edited("llama.gguf", b"llama.rope.freq_base", b"llama.expert_countxx"));
    assert!(!message.contains("expert"), "{message}"); // only the exact key counts; the factors no longer fit
    let split = Forge::new(3, 0, 1).key("split.count", 3).refused();
    assert!(split.contains("one of 3 parts of a split model"), "{split}");
}

#[test]
fn a_vocabulary_larger_than_the_embedding_is_refused() {
    // The embedding is [4, 256] and its first dimension in the file is 256.
    let from = [256_u64.to_le_bytes(), 4_u64.to_le_bytes()].concat();
    let to = [256_u64.to_le_bytes(), 2_u64.to_le_bytes()].concat();
    let message = refused(&edited("types.gguf", &from, &to));
    assert!(message.contains("it has 4 tokens, the embedding 2 rows"), "{message}");
}

#[test]
fn every_truncation_is_an_error() {
    let bytes = std::fs::read(fixture("unigram.gguf")).unwrap();
    // The last tensor is followed by padding, which no one misses.
    for length in (0..bytes.len() - 31).step_by(61) {
        refused(&bytes[..length]);
    }
}

/// Counts what the current thread holds, so that tests can bound what a file makes the loader allocate.
struct Counting;

thread_local! {
    static HELD: Cell<isize> = const { Cell::new(0) };
    static PEAK: Cell<isize> = const { Cell::new(0) };
}

// SAFETY: every call is passed on unchanged; the counters are plain cells without destructors.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        HELD.set(HELD.get() + layout.size() as isize);
        PEAK.set(PEAK.get().max(HELD.get()));
        // SAFETY: the caller's promises hold for the system's allocator too.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        HELD.set(HELD.get() - layout.size() as isize);
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Runs `act` and returns the most bytes that this thread held above what it held before.
fn peak_of<T>(act: impl FnOnce() -> T) -> (T, isize) {
    let before = HELD.get();
    PEAK.set(before);
    let result = act();
    (result, PEAK.get() - before)
}

/// Dequantizing makes twelve bytes of one at most; JSON, maps and growing vectors take their share.
const MOST_PER_BYTE: isize = 32;
const MOST_FOR_ANY: isize = 64 << 10;

fn loads_within_bounds(bytes: &[u8]) -> Result<(), TestCaseError> {
    in_file(bytes, |path| {
        let (result, peak) = peak_of(|| load(path).map_err(|error| error.to_string()));
        if let Err(message) = result {
            prop_assert!(!message.contains('\n'), "{}", message);
        }
        let limit = MOST_FOR_ANY + MOST_PER_BYTE * bytes.len() as isize;
        prop_assert!(peak <= limit, "{} bytes for a file of {}", peak, bytes.len());
        Ok(())
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn random_bytes_never_panic(tail in prop::collection::vec(any::<u8>(), 0..512), counts in any::<[u8; 2]>()) {
        let mut bytes = Forge::new(3, counts[0].into(), counts[1].into()).0;
        bytes.extend(tail);
        loads_within_bounds(&bytes)?;
    }

    #[test]
    fn damaged_files_never_panic(
        file in prop::sample::select(&FILES[..]),
        damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>(), any::<bool>()), 1..6),
        cut in prop::option::weighted(0.2, any::<prop::sample::Index>()),
    ) {
        let mut bytes = std::fs::read(fixture(&format!("{file}.gguf"))).unwrap();
        for (at, value, in_header) in damage {
            // Half of the damage goes where the keys are, the rest anywhere.
            let at = if in_header { at.index(2048) } else { at.index(bytes.len()) };
            bytes[at] = value;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        loads_within_bounds(&bytes)?;
    }
}
