//! Adapters that come and go on a loaded model.

use std::collections::BTreeMap;
use std::path::Path;

use mlx_bun::checkpoint::ElementType;
use mlx_bun::checkpoint::safetensors_writer::write_safetensors;
use mlx_bun::checkpoint::source::ModelSource;
use mlx_bun::load::load_adapted;
use mlx_bun::lora::{Adapter, AdapterSet};
use mlx_bun::scheduler::{
    Engine, EngineOptions, GenerationEvent, GenerationRequest, GenerationSink, MountError, SubmitError,
};

use crate::support::{Kernels, alone, engine, eventually, fixture, greedy, loaded, prompt, submit};

const RANK: usize = 4;
/// Input and output features of the llama fixtures' modules.
const MODULES: [(&str, usize, usize); 3] =
    [("self_attn.q_proj", 64, 128), ("self_attn.v_proj", 64, 64), ("mlp.down_proj", 96, 64)];

fn numbers(count: usize, mut state: u32) -> Vec<u8> {
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        ((state >> 8) as f32 / 8_388_608.0 - 1.0) * 0.5
    };
    (0..count).flat_map(|_| next().to_le_bytes()).collect()
}

/// An adapter of random factors for both layers of a llama fixture, and magnitudes for DoRA.
fn write(directory: &Path, seed: u32, dora: bool) {
    std::fs::create_dir_all(directory).unwrap();
    let mut tensors: Vec<(String, Vec<usize>, Vec<u8>)> = Vec::new();
    for layer in 0..2u32 {
        for (index, (module, input, output)) in MODULES.into_iter().enumerate() {
            let path = format!("model.layers.{layer}.{module}");
            let seed = seed * 1000 + layer * 10 + index as u32;
            tensors.push((format!("{path}.lora_a"), vec![input, RANK], numbers(input * RANK, seed)));
            tensors.push((format!("{path}.lora_b"), vec![RANK, output], numbers(RANK * output, seed + 100)));
            if dora {
                let lengths = (0..output).flat_map(|row| (1.0 + row as f32 / 64.0).to_le_bytes()).collect();
                tensors.push((format!("{path}.m"), vec![output], lengths));
            }
        }
    }
    let config = r#"{"lora_parameters": {"rank": 4, "scale": 2.0, "dropout": 0.0}}"#;
    std::fs::write(directory.join("adapter_config.json"), config).unwrap();
    let tensors =
        tensors.iter().map(|(name, shape, bytes)| (name.as_str(), ElementType::F32, shape.as_slice(), bytes));
    write_safetensors(&directory.join("adapters.safetensors"), tensors, &BTreeMap::new()).unwrap();
}

fn with(request: &GenerationRequest, adapters: &[&str]) -> GenerationRequest {
    GenerationRequest { adapters: adapters.iter().map(|&id| id.to_owned()).collect(), ..request.clone() }
}

struct Deaf;

impl GenerationSink for Deaf {
    fn send(&mut self, _: GenerationEvent) {}

    fn is_gone(&self) -> bool {
        false
    }
}

fn refused(engine: &Engine, request: GenerationRequest) -> SubmitError {
    engine.submit(request, Box::new(Deaf)).unwrap_err()
}

/// Per request, stacked in order, beside each other and beside the base model; each as if it were the only one.
#[test]
fn rows_with_different_adapters_do_not_mix() {
    let folder = tempfile::tempdir().unwrap();
    let path = |id: &str| folder.path().join(id);
    write(&path("a"), 1, false);
    write(&path("b"), 2, false);
    write(&path("dora"), 3, true);
    for kernels in [Kernels::Ours, Kernels::Stock] {
        let engine = engine("llama-f32", kernels, EngineOptions::default());
        for id in ["a", "b", "dora"] {
            let info = engine.mount(id, &path(id)).unwrap();
            assert_eq!((info.modules, info.can_stack), (6, id != "dora"));
        }
        let mut request = greedy(prompt(20, 0), 12);
        request.options.logprobs = Some(1);
        let reference = loaded("llama-f32", kernels).unwrap();
        let adapters = reference.model.adapters();
        let fitted = |id: &str| adapters.fit(Adapter::open(&path(id)).unwrap()).unwrap();
        let sets: [&[&str]; 6] = [&[], &["a"], &["b"], &["a", "b"], &["dora"], &[]];
        let tickets: Vec<_> = sets.iter().map(|set| submit(&engine, with(&request, set))).collect();
        let mut replies = Vec::new();
        for (set, ticket) in sets.iter().zip(tickets) {
            adapters.activate(&AdapterSet::new(set.iter().map(|id| fitted(id)).collect()).unwrap());
            let expected = alone(&reference, &request);
            let outcome = ticket.wait();
            assert_eq!(outcome.tokens, expected.tokens, "{set:?} {kernels:?}");
            if kernels == Kernels::Ours {
                assert_eq!(outcome.reply(), expected.reply(), "{set:?}");
            }
            replies.push(expected.logprobs);
        }
        for (i, j) in [(0, 1), (0, 2), (1, 2), (1, 3), (2, 3), (0, 4)] {
            assert_ne!(replies[i], replies[j], "{:?} and {:?}", sets[i], sets[j]);
        }
        assert_eq!(replies[0], replies[5]);
    }
}

/// The adapter of a command line is the same mechanism.
#[test]
fn a_model_loaded_with_an_adapter_says_what_the_mounted_one_says() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), 1, false);
    for kernels in [Kernels::Ours, Kernels::Stock] {
        let engine = engine("llama-4bit", kernels, EngineOptions::default());
        engine.mount("x", folder.path()).unwrap();
        let request = greedy(prompt(20, 0), 12);
        let mounted = submit(&engine, with(&request, &["x"])).wait();
        kernels.choose();
        let source = ModelSource::Snapshot(fixture("llama-4bit"));
        let adapter = Adapter::open(folder.path()).unwrap();
        let from_start = load_adapted(&source, Some(adapter)).unwrap();
        assert_eq!(mounted.tokens, alone(&from_start, &request).tokens);
        let base = submit(&engine, request.clone()).wait();
        assert_ne!(mounted.text, base.text, "the adapter does something");
    }
}

/// cases P7: a name that is used again for other weights finds nothing of the first.
#[test]
fn the_prompt_cache_knows_adapters_by_more_than_their_names() {
    let folder = tempfile::tempdir().unwrap();
    let path = |id: &str| folder.path().join(id);
    write(&path("a"), 1, false);
    write(&path("b"), 2, false);
    let engine = engine("llama-f32", Kernels::Ours, EngineOptions::default());
    let request = greedy(prompt(20, 0), 8);
    engine.mount("x", &path("a")).unwrap();
    let first = submit(&engine, with(&request, &["x"])).wait();
    assert_eq!(submit(&engine, with(&request, &["x"])).wait().cached(), 19);
    // The base model's own entry.
    assert_eq!(submit(&engine, request.clone()).wait().cached(), 0);
    assert!(matches!(engine.mount("x", &path("b")), Err(MountError::Taken(_))));
    engine.unmount("x").unwrap();
    assert_eq!(engine.stats().prompt_cache.entries, 1);
    engine.mount("x", &path("b")).unwrap();
    let second = submit(&engine, with(&request, &["x"])).wait();
    assert_eq!(second.cached(), 0);
    assert_ne!(first.text, second.text);
}

#[test]
fn adapters_that_cannot_be_used_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = |id: &str| folder.path().join(id);
    write(&path("a"), 1, false);
    write(&path("dora"), 3, true);
    let engine = engine("qwen2-f32", Kernels::Ours, EngineOptions::default());
    for name in ["", "none", "../x", "a+b", "a b"] {
        assert!(matches!(engine.mount(name, &path("a")), Err(MountError::Name(_))), "{name}");
    }
    assert!(matches!(engine.mount("a", &path("nothing")), Err(MountError::Adapter(_))));
    assert!(matches!(engine.unmount("a"), Err(MountError::Unknown(_))));
    let llama = crate::support::engine("llama-f32", Kernels::Ours, EngineOptions::default());
    llama.mount("a", &path("a")).unwrap();
    llama.mount("dora", &path("dora")).unwrap();
    let error = refused(&llama, with(&greedy(prompt(3, 0), 1), &["a", "dora"]));
    assert!(matches!(error, SubmitError::CannotStack(ref id) if id == "dora"), "{error}");
    let error = refused(&llama, with(&greedy(prompt(3, 0), 1), &["b"]));
    assert!(matches!(error, SubmitError::UnknownAdapter(ref id) if id == "b"), "{error}");
}

/// Requests that began keep their adapter; memory comes back when the last of them ends.
#[test]
fn unmounting_does_not_disturb_who_uses_it() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), 1, false);
    let engine = engine("llama-f32", Kernels::Ours, EngineOptions::default());
    engine.mount("x", folder.path()).unwrap();
    let request = greedy(prompt(20, 0), 200);
    let expected = submit(&engine, with(&request, &["x"])).wait();
    let running = submit(&engine, GenerationRequest { prompt_cache: false, ..with(&request, &["x"]) });
    drop(running.first_chunk());
    engine.unmount("x").unwrap();
    assert!(engine.adapters().is_empty());
    // The first piece was taken above.
    assert_eq!(running.wait().tokens, expected.tokens[1..]);
    eventually("it ends", || engine.stats().active_rows == 0);
}
