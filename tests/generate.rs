//! Generation over the tiny checkpoints: limits, bad requests, caches that are saved and resumed.

#![allow(clippy::unwrap_used)] // a test may panic

use std::collections::BTreeMap;
use std::path::PathBuf;

use mlx_bun::cache::{KvCache, LayerCache, make_prompt_cache};
use mlx_bun::checkpoint::{Checkpoint, ElementType, TensorData};
use mlx_bun::generate::prompt_cache::{self, PromptCacheError};
use mlx_bun::generate::step::{ControlFlow, KvQuantization, StepError, StepOptions, TokenGenerator};
use mlx_bun::generate::stream::{FinishReason, StreamError, StreamOptions, TextGenerator};
use mlx_bun::mlx::{Array, Dtype};
use mlx_bun::models::{self, Model};
use mlx_bun::sampling::{Penalty, PenaltyParams};
use mlx_bun::tokenizer::Tokenizer;

fn fixture(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("fixtures/checkpoints").join(name)
}

fn model(name: &str) -> Box<dyn Model> {
    let mut checkpoint = Checkpoint::open(&fixture(name)).unwrap();
    let tensors = checkpoint.take_tensors();
    models::load(&checkpoint.config, tensors, None).unwrap()
}

fn prompt(length: u32) -> Vec<u32> {
    (0..length).map(|i| (i * 37 + 11) % 320).collect()
}

fn options(max_tokens: usize) -> StepOptions {
    StepOptions { max_tokens: Some(max_tokens), ..StepOptions::default() }
}

/// Tokens generated after `prompt`, with what each step's log-probabilities sum to.
fn run(
    model: &dyn Model,
    caches: &mut Vec<LayerCache>,
    prompt: &[u32],
    options: &StepOptions,
) -> Vec<(u32, f64)> {
    let mut generator = TokenGenerator::new(model, caches, prompt, options).unwrap();
    let mut out = Vec::new();
    while let Some(step) = generator.next().unwrap() {
        let sum = step.logprobs.to_f32_vec().unwrap().into_iter().map(f64::from).sum();
        out.push((step.token, sum));
    }
    out
}

/// cases P13, P14: a generation that is saved in the middle and resumed equals the unbroken one, whatever the
/// kind of cache and also when packing begins on the way.
#[test]
fn a_saved_cache_continues_as_if_unbroken() {
    let quantized = |start| Some(KvQuantization { bits: 8, group_size: 32, start });
    let cells = [
        ("llama-f32", None, None),
        ("llama-bf16", None, None),
        ("llama-f32", None, quantized(0)),
        ("llama-f32", None, quantized(24)),
        ("gemma3_text-f32", None, None),
        ("qwen3-f32", Some(16), None),
    ];
    let folder = tempfile::tempdir().unwrap();
    for (name, max_kv_size, kv_quantization) in cells {
        let model = model(name);
        let fresh = || make_prompt_cache(model.layer_kinds(), max_kv_size);
        let options = |count| StepOptions { kv_quantization, ..options(count) };
        // A step is always in flight, so a broken-off run has fed one token more than it returned.
        let mut caches = fresh();
        let whole = run(&*model, &mut caches, &prompt(20), &options(17));
        let mut caches = fresh();
        let first = run(&*model, &mut caches, &prompt(20), &options(8));
        assert_eq!(first, whole[..8], "{name}");
        let file = folder.path().join("cache.safetensors");
        let note = BTreeMap::from([("model".to_owned(), name.to_owned())]);
        prompt_cache::save(&file, &caches, &note).unwrap();
        let (mut loaded, metadata) = prompt_cache::load(&file).unwrap();
        assert_eq!(metadata, note);
        prompt_cache::check(&loaded, &*model).unwrap();
        assert_eq!(
            loaded.iter().map(LayerCache::offset).collect::<Vec<_>>(),
            vec![28; caches.len()],
            "{name}"
        );
        let rest = run(&*model, &mut loaded, &[whole[8].0], &options(8));
        assert_eq!(rest, whole[9..], "{name} {max_kv_size:?} {kv_quantization:?}");
    }
}

#[test]
fn a_broken_cache_file_is_an_error() {
    let model = model("llama-f32");
    let mut caches = make_prompt_cache(model.layer_kinds(), None);
    run(&*model, &mut caches, &prompt(4), &options(1));
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("cache.safetensors");
    prompt_cache::save(&file, &caches, &BTreeMap::new()).unwrap();
    let bytes = std::fs::read(&file).unwrap();
    for length in [0, 7, 100, bytes.len() - 1] {
        std::fs::write(&file, &bytes[..length]).unwrap();
        assert!(matches!(prompt_cache::load(&file), Err(PromptCacheError::Read(_))), "{length}");
    }
    let weights = fixture("llama-f32").join("model.safetensors");
    let error = prompt_cache::load(&weights).unwrap_err().to_string();
    assert!(error.contains("its header names no layers"), "{error}");
    caches.pop();
    assert!(matches!(
        prompt_cache::check(&caches, &*model),
        Err(PromptCacheError::Layers { found, expected }) if found + 1 == expected
    ));
}

/// Caches of a model after a prompt.
fn filled(name: &str, length: u32, kv_quantization: Option<KvQuantization>) -> Vec<LayerCache> {
    let model = model(name);
    let mut caches = make_prompt_cache(model.layer_kinds(), None);
    let options = StepOptions { kv_quantization, ..options(1) };
    let _ = TokenGenerator::new(&*model, &mut caches, &prompt(length), &options)
        .unwrap()
        .prefill(&mut |_, _| ControlFlow::Continue(()))
        .unwrap();
    caches
}

#[test]
fn a_cache_must_have_the_shape_and_type_that_the_model_makes() {
    let llama = model("llama-f32");
    let packed = |group_size| Some(KvQuantization { bits: 8, group_size, start: 0 });
    for quantization in [None, packed(32)] {
        assert!(prompt_cache::check(&filled("llama-f32", 9, quantization), &*llama).is_ok());
        let error = prompt_cache::check(&filled("llama-bf16", 9, quantization), &*llama).unwrap_err();
        let said = error.to_string();
        assert!(said.contains("of bfloat16 where this model has [1, 2, 256, "), "{said}");
    }
    // Gemma's window, before and after it wraps.
    let gemma = model("gemma3_text-f32");
    for length in [3, 100] {
        assert!(prompt_cache::check(&filled("gemma3_text-f32", length, None), &*gemma).is_ok(), "{length}");
    }
    let plain = filled("llama-f32", 9, None);
    let changed = |layer: usize, change: &dyn Fn(Array, Array) -> KvCache| {
        let mut caches = plain.clone();
        if let LayerCache::Plain(cache) = &caches[layer] {
            let (keys, values) = cache.buffers().unwrap();
            caches[layer] = LayerCache::Plain(change(keys.clone(), values.clone()));
        }
        prompt_cache::check(&caches, &*llama).unwrap_err().to_string()
    };
    let zeros = |shape: &[i32]| Array::zeros(shape, Dtype::Float32).unwrap();
    for (said, shape) in [
        ("layer 1 holds [2, 2, 256, 32]", [2, 2, 256, 32]),
        ("layer 1 holds [1, 4, 256, 32]", [1, 4, 256, 32]),
        ("layer 1 holds [1, 2, 256, 16]", [1, 2, 256, 16]),
        ("layer 1 holds [1, 2, 255, 32]", [1, 2, 255, 32]),
    ] {
        let error = changed(1, &|keys, _| KvCache::from_state(keys, zeros(&shape), 9));
        assert!(error.contains(said), "{error}");
    }
    let error = changed(1, &|keys, values| KvCache::from_state(keys, values, 8));
    assert!(error.contains("layer 1 stands at position 8, the first layer at 9"), "{error}");
    let error = changed(0, &|_, _| KvCache::default());
    assert!(error.contains("layer 0 holds no tokens"), "{error}");
}

#[test]
fn a_cache_cannot_be_saved_where_nothing_can_be_written() {
    let model = model("llama-f32");
    let caches = make_prompt_cache(model.layer_kinds(), None);
    let file = PathBuf::from("/nonexistent-folder/cache.safetensors");
    let error = prompt_cache::save(&file, &caches, &BTreeMap::new()).unwrap_err().to_string();
    assert!(error.contains("/nonexistent-folder"), "{error}");
}

#[test]
fn bad_requests_are_refused_before_anything_runs() {
    let model = model("llama-f32");
    let mut caches = make_prompt_cache(model.layer_kinds(), None);
    let mut refused = |prompt: &[u32], options: StepOptions| {
        TokenGenerator::new(&*model, &mut caches, prompt, &options).err().unwrap()
    };
    assert!(matches!(refused(&[], options(1)), StepError::EmptyPrompt));
    assert!(matches!(refused(&[320], options(1)), StepError::UnknownToken { id: 320, vocab_size: 320 }));
    assert!(matches!(
        refused(&[1], StepOptions { prefill_step_size: 0, ..options(1) }),
        StepError::PrefillStep
    ));
    // cases P11: a group that does not divide the head dimension.
    let packed = KvQuantization { bits: 8, group_size: 64, start: 0 };
    let error = refused(&[1], StepOptions { kv_quantization: Some(packed), ..options(1) }).to_string();
    assert!(error.contains("head dimension") && error.contains("try 32"), "{error}");
}

#[test]
fn a_prompt_beyond_the_context_is_an_error_with_both_numbers() {
    let model = model("llama-f32");
    let context = model.max_positions().unwrap();
    let tokenizer = Tokenizer::from_dir(&fixture("llama-f32")).unwrap();
    let mut caches = make_prompt_cache(model.layer_kinds(), None);
    let long = vec![5; context as usize + 1];
    let error =
        TextGenerator::new(&*model, &tokenizer, &mut caches, &long, &StreamOptions::default()).err().unwrap();
    assert!(matches!(error, StreamError::ContextLength { .. }));
    let text = error.to_string();
    assert!(text.contains(&(context + 1).to_string()) && text.contains(&context.to_string()), "{text}");
}

/// Weights that are not numbers end in an error instead of token 0 for ever.
#[test]
fn nan_weights_are_an_error() {
    let mut checkpoint = Checkpoint::open(&fixture("llama-f32")).unwrap();
    let norm = checkpoint.tensors.get_mut("model.norm.weight").unwrap();
    assert_eq!(norm.dtype, ElementType::F32);
    norm.data = TensorData::Owned(f32::NAN.to_le_bytes().repeat(norm.shape[0]).into());
    let tensors = checkpoint.take_tensors();
    let model = models::load(&checkpoint.config, tensors, None).unwrap();
    let mut caches = make_prompt_cache(model.layer_kinds(), None);
    let mut generator = TokenGenerator::new(&*model, &mut caches, &prompt(3), &options(4)).unwrap();
    assert!(matches!(generator.next(), Err(StepError::NanLogits)));
}

/// The weights are not to blame for what a request does to the logits.
#[test]
fn penalties_that_leave_no_numbers_are_named() {
    let model = model("llama-f32");
    let mut caches = make_prompt_cache(model.layer_kinds(), None);
    let penalties = PenaltyParams {
        repetition: Some(Penalty { value: 1e-38, context_size: 0 }),
        ..PenaltyParams::default()
    };
    let prompt: Vec<u32> = (0..model.vocab_size() as u32).collect();
    let options = StepOptions { penalties, ..options(4) };
    let mut generator = TokenGenerator::new(&*model, &mut caches, &prompt, &options).unwrap();
    assert!(matches!(generator.next(), Err(StepError::NanPenalties)));
}

#[test]
fn cancelling_in_prefill_ends_the_reply() {
    let model = model("llama-f32");
    let tokenizer = Tokenizer::from_dir(&fixture("llama-f32")).unwrap();
    let mut caches = make_prompt_cache(model.layer_kinds(), None);
    let step = StepOptions { prefill_step_size: 4, ..options(8) };
    let request = StreamOptions { step, ..StreamOptions::default() };
    let mut reply = TextGenerator::new(&*model, &tokenizer, &mut caches, &prompt(20), &request).unwrap();
    let mut seen = Vec::new();
    reply
        .prefill(&mut |done, total| {
            seen.push((done, total));
            if done >= 8 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        })
        .unwrap();
    seen.dedup();
    assert_eq!(seen, [(0, 20), (4, 20), (8, 20)]);
    assert_eq!(reply.next().unwrap().unwrap().text, "");
    assert!(reply.next().unwrap().is_none());
    assert_eq!(reply.finish_reason(), Some(FinishReason::Cancelled));
    drop(reply);
    assert_eq!(caches[0].offset(), 8);
}

#[test]
fn a_long_chunk_can_be_stopped_between_its_layers() {
    if mlx_bun::mlx::default_device() == mlx_bun::mlx::DeviceKind::Gpu {
        return;
    }
    let model = model("llama-f32");
    let mut caches = make_prompt_cache(model.layer_kinds(), None);
    let mut generator = TokenGenerator::new(&*model, &mut caches, &prompt(20), &options(1)).unwrap();
    let mut calls = Vec::new();
    let flow = generator.prefill(&mut |done, _| {
        calls.push(done);
        if calls.len() == 2 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    assert!(flow.unwrap().is_break());
    assert_eq!(calls, [0, 0]);
    let mut whole = make_prompt_cache(model.layer_kinds(), None);
    let mut generator = TokenGenerator::new(&*model, &mut whole, &prompt(20), &options(1)).unwrap();
    let mut calls = 0;
    let _ = generator
        .prefill(&mut |_, _| {
            calls += 1;
            ControlFlow::Continue(())
        })
        .unwrap();
    // The start, the end, and between each two layers.
    assert_eq!(calls, 2 + model.layer_kinds().len() - 1);
}

/// The text is the tokens' text up to the stop string, whichever tokens spell it.
#[test]
fn a_stop_string_cuts_the_text() {
    let model = model("qwen2-f32");
    let tokenizer = Tokenizer::from_dir(&fixture("qwen2-f32")).unwrap();
    let reply = |stop: Vec<String>| {
        let mut caches = make_prompt_cache(model.layer_kinds(), None);
        let request = StreamOptions {
            step: options(40),
            stop,
            eos_token_ids: Some(Default::default()),
            logprobs: Some(2),
        };
        let mut reply = TextGenerator::new(&*model, &tokenizer, &mut caches, &prompt(9), &request).unwrap();
        let mut text = String::new();
        while let Some(chunk) = reply.next().unwrap() {
            text.push_str(&chunk.text);
            if let (Some(token), Some(logprobs)) = (chunk.token, chunk.logprobs) {
                assert_eq!(logprobs.top[0], (token, logprobs.logprob), "greedy takes the most likely token");
                assert!(logprobs.top[1].1 <= logprobs.logprob);
            }
        }
        (text, reply.finish_reason().unwrap(), reply.stats().generation_tokens)
    };
    let (whole, reason, count) = reply(vec![]);
    assert_eq!((reason, count), (FinishReason::Length, 40));
    let start = whole.char_indices().nth(whole.chars().count() / 2).unwrap().0;
    let stop: String = whole[start..].chars().take(3).collect();
    let (cut, reason, count) = reply(vec![stop.clone()]);
    assert_eq!(reason, FinishReason::Stop);
    assert_eq!(cut, whole[..whole.find(&stop).unwrap()]);
    assert!(count < 40);
}

#[test]
fn an_absurd_number_of_layers_is_an_error_before_anything_is_allocated() {
    use mlx_bun::checkpoint::{Config, Quantization, TensorSource};
    for family in ["llama", "qwen2", "qwen3", "gemma3_text"] {
        let mut root = Checkpoint::open(&fixture(&format!("{family}-f32"))).unwrap().config.root().clone();
        for count in [0u64, 1 << 40] {
            root["num_hidden_layers"] = count.into();
            let config = Config::from_value(root.clone(), "config.json").unwrap();
            let quantization = Quantization::from_config(&config, None).unwrap();
            let tensors = TensorSource::new(BTreeMap::new(), quantization, "weights", "config.json");
            let error = models::load(&config, tensors, None).err().unwrap().to_string();
            assert!(error.contains("num_hidden_layers") && error.contains("4096"), "{error}");
        }
    }
}
