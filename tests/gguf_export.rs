//! Models written as GGUF files and read again.

#![allow(clippy::unwrap_used)]

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use half::f16;
use mlx_bun::checkpoint::gguf::ggml_type::GgmlType;
use mlx_bun::checkpoint::gguf::header::Header;
use mlx_bun::checkpoint::gguf::{self, encode::encode};
use mlx_bun::checkpoint::safetensors::SafetensorsFile;
use mlx_bun::checkpoint::source::ModelSource;
use mlx_bun::checkpoint::{ElementType, Tensor};
use mlx_bun::load::load;
use mlx_bun::mlx::Array;
use mlx_bun::quantize::{FloatType, GgufExported, GgufFileType, SourceModel, export_gguf};
use serde_json::Value;
use tempfile::TempDir;

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures")
}

fn snapshot(name: &str) -> ModelSource {
    ModelSource::Snapshot(fixtures().join("checkpoints").join(name))
}

fn stored(name: &str) -> ModelSource {
    ModelSource::Gguf(fixtures().join("gguf").join(name))
}

fn export(source: &ModelSource, kind: GgufFileType) -> Result<(TempDir, PathBuf, GgufExported), String> {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model.gguf");
    let model = SourceModel::open(source).unwrap();
    let exported = export_gguf(&model, &file, kind, "tiny", &mut |_| ControlFlow::Continue(()));
    match exported {
        Ok(exported) => Ok((folder, file, exported)),
        Err(error) => {
            assert!(!file.exists());
            Err(error.to_string())
        }
    }
}

fn floats(tensor: &Tensor) -> Vec<f32> {
    FloatType::of(tensor.dtype).unwrap().decode(tensor.bytes())
}

fn logits(source: &ModelSource) -> Vec<f32> {
    let ids: Vec<u32> = (0..24).map(|index| (index * 37 + 11) % 320).collect();
    let ids = Array::from_slice(&ids, &[1, 24]).unwrap();
    load(source).unwrap().model.forward(&ids, None).unwrap().to_f32_vec().unwrap()
}

fn distance(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

/// The same as a share of the largest of `a`.
fn apart(a: &[f32], b: &[f32]) -> f32 {
    distance(a, b) / a.iter().fold(0.0f32, |most, value| most.max(value.abs()))
}

/// Matrices are the half-precision neighbours of what was there, the rest is exact, and rows are where they were.
#[test]
fn every_family_comes_back() {
    for name in [
        "llama-f32",
        "llama-bf16",
        "llama-bias",
        "llama-minicpm5",
        "qwen2-f32",
        "qwen3-bf16",
        "gemma3_text-f32",
        "gemma3_text-untied",
    ] {
        let source = snapshot(name);
        let (_folder, file, _) = export(&source, GgufFileType::F16).unwrap();
        let read = gguf::load(&file).unwrap();
        let weights = SafetensorsFile::open(&source.path().join("model.safetensors")).unwrap();
        for (tensor_name, tensor) in weights.tensors() {
            let Some(back) = read.tensors.get(tensor_name) else {
                assert!(
                    ["lm_head.weight", "self_attn.rotary_emb.inv_freq"]
                        .iter()
                        .any(|end| tensor_name.ends_with(end)),
                    "{name}: {tensor_name}"
                );
                continue;
            };
            assert_eq!(back.shape, tensor.shape, "{name}: {tensor_name}");
            let (before, after) = (floats(&tensor), floats(back));
            if tensor.shape.len() == 2 {
                assert_eq!(back.dtype, ElementType::F16, "{name}: {tensor_name}");
                let rounded: Vec<f32> = before.iter().map(|value| f16::from_f32(*value).to_f32()).collect();
                assert_eq!(after, rounded, "{name}: {tensor_name}");
            } else if name.starts_with("gemma3") {
                // One is added, and taken away again.
                assert!(distance(&before, &after) < 5e-7, "{name}: {tensor_name}");
            } else {
                assert_eq!(after, before, "{name}: {tensor_name}");
            }
        }
        let config: Value =
            serde_json::from_slice(&std::fs::read(source.path().join("config.json")).unwrap()).unwrap();
        for field in [
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "vocab_size",
            "rms_norm_eps",
            "eos_token_id",
        ] {
            let back = match &read.config[field] {
                Value::Array(ids) => &ids[0],
                value => value,
            };
            assert_eq!(*back, config[field], "{name}: {field}");
        }
        let apart = apart(&logits(&source), &logits(&ModelSource::Gguf(file)));
        assert!(apart < if name.contains("f32") { 0.02 } else { 0.1 }, "{name}: {apart}");
    }
}

#[test]
fn every_type_answers_about_as_the_model_does() {
    let source = snapshot("llama-f32");
    let exact = logits(&source);
    let mut before = 0.0;
    for kind in [GgufFileType::F16, GgufFileType::Q8_0, GgufFileType::Q4_1, GgufFileType::Q4_0] {
        let (_folder, file, exported) = export(&source, kind).unwrap();
        let apart = apart(&exact, &logits(&ModelSource::Gguf(file)));
        // A model of random weights forgives nothing; blocks themselves are compared below.
        let most = if matches!(kind, GgufFileType::F16 | GgufFileType::Q8_0) { 0.3 } else { 2.0 };
        assert!(apart > before * 0.5 && apart < most, "{kind:?}: {apart}");
        assert_eq!((exported.exact, exported.matrices), (0, 15));
        before = apart;
    }
}

/// Blocks that MLX holds as packed integers are the same blocks in the new file, whatever type it asks for.
#[test]
fn packed_blocks_are_not_touched() {
    let mut kept = 0;
    for name in ["llama.gguf", "qwen2.gguf", "qwen3.gguf", "gemma3.gguf"] {
        let source = stored(name);
        let (_folder, file, exported) = export(&source, GgufFileType::Q8_0).unwrap();
        let (before, after) = (std::fs::read(source.path()).unwrap(), std::fs::read(&file).unwrap());
        let (first, second) = (Header::parse(&before).unwrap(), Header::parse(&after).unwrap());
        let mut same = 0;
        for (tensor, info) in &first.tensors {
            if matches!(info.kind, GgmlType::Q4_0 | GgmlType::Q4_1 | GgmlType::Q8_0) {
                let again = &second.tensors[tensor];
                assert_eq!(again.kind, info.kind, "{name}: {tensor}");
                assert!(before[info.range.clone()] == after[again.range.clone()], "{name}: {tensor}");
                same += 1;
            }
        }
        assert_eq!(exported.exact, same, "{name}");
        kept += same;
    }
    assert!(kept > 0);
}

/// The tokenizer that is read from the new file is the one that was read from the old, byte for byte.
#[test]
fn tokenizers_survive() {
    for name in ["llama.gguf", "qwen2.gguf", "qwen3.gguf", "gemma3.gguf"] {
        let source = stored(name);
        let (_folder, file, _) = export(&source, GgufFileType::F16).unwrap();
        let (before, after) = (gguf::load(source.path()).unwrap(), gguf::load(&file).unwrap());
        let json = |bytes: &[u8]| serde_json::from_slice::<Value>(bytes).unwrap();
        assert!(json(&before.tokenizer_json) == json(&after.tokenizer_json), "{name}");
        assert_eq!(before.tokenizer_config, after.tokenizer_config, "{name}");
        assert_eq!(before.eos_token_ids, after.eos_token_ids, "{name}");
    }
}

/// Against PyPI gguf's `quants.quantize`; scripts/oracle/gguf_blocks.py writes the expectations.
#[test]
fn blocks_are_those_of_pypi_gguf() {
    let expected: Value =
        serde_json::from_slice(&std::fs::read(fixtures().join("gguf/blocks.json")).unwrap()).unwrap();
    let values: Vec<f32> = (0..32 * 40u32)
        .map(|index| {
            let noise = index.wrapping_mul(2_654_435_761).wrapping_add(12_345) >> 8;
            (noise as f32 / 8_388_608.0 - 1.0) * 2f32.powi((index / 32 % 10) as i32 - 6)
        })
        .collect();
    for (name, kind) in
        [("F16", GgmlType::F16), ("Q8_0", GgmlType::Q8_0), ("Q4_0", GgmlType::Q4_0), ("Q4_1", GgmlType::Q4_1)]
    {
        let bytes = encode(kind, &values).unwrap();
        let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(hex, expected[name].as_str().unwrap(), "{name}");
    }
}
