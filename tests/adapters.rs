//! Adapters at run time and fused, against mlx-lm; scripts/oracle/adapters.py writes them and the expectations.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use mlx_bun::cache::make_prompt_cache;
use mlx_bun::checkpoint::safetensors::SafetensorsFile;
use mlx_bun::checkpoint::source::ModelSource;
use mlx_bun::load::{load, load_adapted};
use mlx_bun::lora::Adapter;
use mlx_bun::mlx::{Array, cpu_ops};
use mlx_bun::models::Model;
use mlx_bun::quantize::{SourceModel, fuse};
use serde_json::Value;
use sha2::{Digest, Sha256};

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures")
}

fn cases() -> BTreeMap<String, Value> {
    serde_json::from_slice(&std::fs::read(fixtures().join("adapters/expected.json")).unwrap()).unwrap()
}

fn adapter(name: &str) -> Adapter {
    Adapter::open(&fixtures().join("adapters").join(name)).unwrap()
}

fn base(case: &Value) -> ModelSource {
    ModelSource::Snapshot(fixtures().join("checkpoints").join(case["checkpoint"].as_str().unwrap()))
}

fn ids() -> Array {
    let ids: Vec<u32> = (0..12).map(|index| (index * 37 + 11) % 320).collect();
    Array::from_slice(&ids, &[1, 12]).unwrap()
}

fn hash(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().take(4).map(|byte| format!("{byte:02x}")).collect()
}

fn distance(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

fn logits(model: &dyn Model) -> Array {
    let logits = model.forward(&ids(), None).unwrap();
    logits.eval().unwrap();
    logits
}

#[test]
fn adapted_models_answer_as_mlx_lm_bit_for_bit() {
    cpu_ops::disable();
    for (name, case) in cases() {
        let model = load_adapted(&base(&case), Some(adapter(&name))).unwrap().model;
        let logits = logits(&*model);
        assert_eq!(hash(&logits.to_bytes().unwrap()), case["logits"].as_str().unwrap(), "{name}");
    }
}

/// Fused weights are those of mlx_lm.fuse, and the fused model answers as the adapted one: in single precision to
/// 1e-5 of the largest logit, which is what adding the change to the weight rounds away.
#[test]
fn fused_weights_are_those_of_mlx_lm() {
    cpu_ops::disable();
    for (name, case) in cases() {
        let source = base(&case);
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("fused");
        let model = SourceModel::open(&source).unwrap();
        fuse(&model, adapter(&name), &target, false, None, &mut |_| ControlFlow::Continue(())).unwrap();
        let expected: BTreeMap<String, String> = serde_json::from_value(case["changed"].clone()).unwrap();
        let before = SafetensorsFile::open(&source.path().join("model.safetensors")).unwrap();
        let after = SafetensorsFile::open(&target.join("model.safetensors")).unwrap();
        let before: BTreeMap<_, _> = before.tensors().collect();
        for (tensor_name, tensor) in after.tensors() {
            match expected.get(tensor_name) {
                Some(digest) => assert_eq!(hash(tensor.bytes()), *digest, "{name}: {tensor_name}"),
                None => assert!(before[tensor_name].bytes() == tensor.bytes(), "{name}: {tensor_name}"),
            }
        }
        let fused = logits(&*load(&ModelSource::Snapshot(target)).unwrap().model);
        assert_eq!(hash(&fused.to_bytes().unwrap()), case["fused"].as_str().unwrap(), "{name}");
        if case["checkpoint"] == "llama-f32" {
            let adapted = logits(&*load_adapted(&source, Some(adapter(&name))).unwrap().model);
            let largest = case["largest"].as_f64().unwrap() as f32;
            let apart = distance(&adapted.to_f32_vec().unwrap(), &fused.to_f32_vec().unwrap()) / largest;
            assert!(apart < 1e-5, "{name}: {apart}");
        }
    }
}

/// The fused decoder knows nothing of adapters, so a model with one must not run on it.
#[test]
fn adapters_count_while_tokens_are_generated() {
    for (name, case) in cases() {
        cpu_ops::enable(cpu_ops::Settings::default()).unwrap();
        let model = load_adapted(&base(&case), Some(adapter(&name))).unwrap().model;
        let plain = load(&base(&case)).unwrap().model;
        let with_caches = |model: &dyn Model| {
            let mut caches = make_prompt_cache(model.layer_kinds(), None);
            model.forward(&ids(), Some(&mut caches)).unwrap().to_f32_vec().unwrap()
        };
        let largest = case["largest"].as_f64().unwrap() as f32;
        let expected = logits(&*model).to_f32_vec().unwrap();
        // Caches may hold half-precision numbers.
        assert!(distance(&with_caches(&*model), &expected) < 0.02 * largest, "{name}");
        assert!(distance(&with_caches(&*plain), &expected) > 0.05 * largest, "{name}");
        cpu_ops::disable();
    }
}
