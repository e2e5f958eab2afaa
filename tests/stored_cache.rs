//! Caches that fused steps write: whatever is done to one between steps, generation goes on as if nothing had been.

#![allow(clippy::unwrap_used)] // a test may panic

use std::collections::BTreeMap;
use std::path::PathBuf;

use mlx_bun::cache::{LayerCache, make_prompt_cache};
use mlx_bun::checkpoint::Checkpoint;
use mlx_bun::generate::prompt_cache;
use mlx_bun::mlx::Array;
use mlx_bun::mlx::cpu_ops::{self, Settings};
use mlx_bun::models::{self, Model};

/// Full attention in half and single precision, quantized weights, and windows of 8.
const MODELS: [&str; 4] = ["llama-bf16", "llama-f32", "qwen3-4bit", "gemma3_text-bf16"];

fn model(name: &str) -> Box<dyn Model> {
    cpu_ops::enable(Settings { threads: Some(2), ..Settings::default() }).unwrap();
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("fixtures/checkpoints").join(name);
    let mut checkpoint = Checkpoint::open(&path).unwrap();
    let tensors = checkpoint.take_tensors();
    let model = models::load(&checkpoint.config, tensors, None).unwrap();
    cpu_ops::disable();
    model
}

fn fresh(model: &dyn Model) -> Vec<LayerCache> {
    make_prompt_cache(model.layer_kinds(), None)
}

/// `count` ids that differ by `seed`.
fn tokens(seed: u32, count: u32) -> Vec<u32> {
    (0..count).map(|i| (i * 37 + seed * 101 + 11) % 300).collect()
}

/// Logits after the last of `tokens`, as bytes.
fn feed(model: &dyn Model, caches: &mut [LayerCache], tokens: &[u32]) -> Vec<u8> {
    let ids = Array::from_slice(tokens, &[1, tokens.len() as i32]).unwrap();
    let logits = model.forward(&ids, Some(caches)).unwrap();
    let length = logits.dim(1);
    logits.slice(1, length - 1, length).unwrap().to_bytes().unwrap()
}

/// The logits after the whole of `tokens` in one go.
fn at_once(model: &dyn Model, tokens: &[u32]) -> Vec<u8> {
    feed(model, &mut fresh(model), tokens)
}

fn assert_stored(caches: &[LayerCache], name: &str) {
    assert!(caches.iter().all(|cache| matches!(cache, LayerCache::Stored(_))), "{name} runs unfused");
}

#[test]
fn growing_over_many_buffers_keeps_every_position() {
    for name in MODELS {
        let model = model(name);
        let tokens = tokens(1, 700);
        let mut caches = fresh(&*model);
        let mut last = Vec::new();
        for part in tokens.chunks(97) {
            last = feed(&*model, &mut caches, part);
        }
        assert_stored(&caches, name);
        assert!(caches.iter().all(|cache| cache.offset() == 700));
        assert!(last == at_once(&*model, &tokens), "{name}");
    }
}

#[test]
fn a_trimmed_cache_forgets_what_was_trimmed() {
    for name in ["llama-bf16", "llama-f32", "qwen3-4bit"] {
        let model = model(name);
        let (prompt, wrong, right) = (tokens(1, 40), tokens(2, 9), tokens(3, 5));
        let mut caches = fresh(&*model);
        feed(&*model, &mut caches, &prompt);
        feed(&*model, &mut caches, &wrong);
        for cache in &mut caches {
            assert!(cache.is_trimmable());
            assert_eq!(cache.trim(9), 9);
        }
        let found = feed(&*model, &mut caches, &right);
        assert_stored(&caches, name);
        assert!(found == at_once(&*model, &[prompt, right].concat()), "{name}");
    }
}

/// A window that has wrapped has lost what came before it.
#[test]
fn a_wrapped_window_cannot_be_trimmed() {
    let model = model("gemma3_text-bf16");
    let mut caches = fresh(&*model);
    feed(&*model, &mut caches, &tokens(1, 40));
    assert_stored(&caches, "gemma3_text-bf16");
    assert!(!caches.iter().all(LayerCache::is_trimmable));
}

#[test]
fn clones_go_their_own_ways() {
    for name in MODELS {
        let model = model(name);
        let (prompt, one, other) = (tokens(1, 30), tokens(2, 6), tokens(3, 6));
        let mut caches = fresh(&*model);
        feed(&*model, &mut caches, &prompt);
        let mut clone = caches.clone();
        // Steps in turn, so that one that wrote into the other's memory would be seen by it.
        let (mut last, mut last_of_clone) = (Vec::new(), Vec::new());
        for (a, b) in one.iter().zip(&other) {
            last = feed(&*model, &mut caches, &[*a]);
            last_of_clone = feed(&*model, &mut clone, &[*b]);
        }
        assert!(last == at_once(&*model, &[&prompt[..], &one].concat()), "{name}");
        assert!(last_of_clone == at_once(&*model, &[&prompt[..], &other].concat()), "{name}, clone");
    }
}

/// The clone that was trimmed must not overwrite what the original still needs.
#[test]
fn a_trimmed_clone_leaves_its_original_alone() {
    let model = model("llama-bf16");
    let (prompt, other, rest) = (tokens(1, 30), tokens(2, 12), tokens(3, 4));
    let mut caches = fresh(&*model);
    feed(&*model, &mut caches, &prompt);
    let mut clone = caches.clone();
    for cache in &mut clone {
        cache.trim(20);
    }
    let found = feed(&*model, &mut clone, &other);
    assert!(found == at_once(&*model, &[&prompt[..10], &other].concat()));
    assert!(feed(&*model, &mut caches, &rest) == at_once(&*model, &[prompt, rest].concat()));
}

#[test]
fn a_saved_cache_goes_on_where_it_was() {
    let folder = tempfile::tempdir().unwrap();
    for name in MODELS {
        let model = model(name);
        let (prompt, rest) = (tokens(1, 50), tokens(2, 7));
        let mut caches = fresh(&*model);
        feed(&*model, &mut caches, &prompt);
        let path = folder.path().join(name);
        prompt_cache::save(&path, &caches, &BTreeMap::new()).unwrap();
        let (mut loaded, _) = prompt_cache::load(&path).unwrap();
        prompt_cache::check(&loaded, &*model).unwrap();
        let found = feed(&*model, &mut loaded, &rest);
        assert_stored(&loaded, name);
        assert!(found == feed(&*model, &mut caches, &rest), "{name}");
    }
}

#[test]
fn rows_of_a_batch_have_stores_of_their_own() {
    for name in MODELS {
        let model = model(name);
        let rows = [tokens(1, 20), tokens(2, 20), tokens(3, 20)];
        let ids = Array::from_slice(&rows.concat(), &[3, 20]).unwrap();
        let mut caches = fresh(&*model);
        model.forward(&ids, Some(&mut caches)).unwrap();
        assert_stored(&caches, name);
        let next = Array::from_slice(&[5u32, 6, 7], &[3, 1]).unwrap();
        let logits = model.forward(&next, Some(&mut caches)).unwrap();
        for (index, row) in rows.iter().enumerate() {
            let found = logits.slice(0, index as i32, index as i32 + 1).unwrap().to_bytes().unwrap();
            assert!(
                found == at_once(&*model, &[&row[..], &[5 + index as u32]].concat()),
                "{name}, row {index}"
            );
        }
    }
}
