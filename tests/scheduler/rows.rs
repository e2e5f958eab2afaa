//! One forward pass for rows of different sequences against one pass each.

use mlx_bun::cache::{LayerCache, make_prompt_cache, maybe_quantize};
use mlx_bun::mlx::Array;
use mlx_bun::models::Model;

use crate::support::{Kernels, loaded, prompt};

/// Caches after prompts of different lengths, some longer than Gemma's window.
fn caches(model: &dyn Model, packed: &[bool]) -> Vec<Vec<LayerCache>> {
    [3, 40, 17, 1]
        .into_iter()
        .zip(packed.iter().cycle())
        .map(|(length, &packed)| {
            let mut caches = make_prompt_cache(model.layer_kinds(), None);
            let ids = prompt(length, length);
            let ids = Array::from_slice(&ids, &[1, length as i32]).unwrap();
            model.forward(&ids, Some(&mut caches)).unwrap().eval().unwrap();
            if packed {
                maybe_quantize(&mut caches, 8, 32, 0).unwrap();
            }
            caches
        })
        .collect()
}

/// The rows of each step: they leave, come back and stand in another order.
const STEPS: [&[usize]; 8] =
    [&[0, 1, 2, 3], &[0, 1, 2, 3], &[0, 1, 2, 3], &[2, 0], &[2], &[3, 2, 1, 0], &[3, 2, 1, 0], &[1, 3]];

/// The largest difference of any logit to those of the rows alone.
fn difference(model: &dyn Model, packed: &[bool]) -> f32 {
    let (mut together, mut apart) = (caches(model, packed), caches(model, packed));
    let mut largest = 0.0f32;
    for (step, members) in (0u32..).zip(STEPS) {
        let tokens: Vec<u32> = members.iter().map(|&row| (row as u32 * 41 + step * 7 + 5) % 320).collect();
        let mut rows: Vec<Option<&mut [LayerCache]>> =
            together.iter_mut().map(|caches| Some(&mut caches[..])).collect();
        let mut rows: Vec<_> = members.iter().map(|&row| rows[row].take().unwrap()).collect();
        let ids = Array::from_slice(&tokens, &[tokens.len() as i32]).unwrap();
        let logits = model.forward_rows(&ids, &mut rows).unwrap();
        assert_eq!(logits.len(), members.len());
        for ((row, &member), token) in logits.iter().zip(members).zip(&tokens) {
            let caches = &mut apart[member];
            assert_eq!(row.shape(), [1, model.vocab_size()]);
            let row = row.to_f32_vec().unwrap();
            let ids = Array::from_slice(&[*token], &[1, 1]).unwrap();
            let own = model.forward(&ids, Some(caches)).unwrap().to_f32_vec().unwrap();
            let scale = own.iter().fold(1.0f32, |most, logit| most.max(logit.abs()));
            for (a, b) in row.iter().zip(&own) {
                largest = largest.max((a - b).abs() / scale);
            }
        }
        for (a, b) in together.iter().zip(&apart) {
            assert_eq!(a[0].offset(), b[0].offset());
        }
    }
    largest
}

/// cases B1, B2, B4, B6: on our kernels every bit is the same, for every family and kind of cache, also when rows have
/// different kinds.
#[test]
fn rows_on_our_kernels_equal_rows_alone() {
    for name in ["llama-f32", "llama-bf16", "llama-4bit", "qwen2-f32", "qwen3-8bit", "gemma3_text-f32"] {
        let model = loaded(name, Kernels::Ours).unwrap().model;
        assert_eq!(difference(&*model, &[false]), 0.0, "{name}");
        if !name.starts_with("gemma") {
            assert_eq!(difference(&*model, &[true]), 0.0, "{name}, packed");
            assert_eq!(difference(&*model, &[false, true]), 0.0, "{name}, mixed");
        }
    }
}

/// cases B1, B2, B4, B6: MLX multiplies several rows in another order than one, which shows in the last bits: a millionth
/// of the largest logit in float32, a fiftieth in bfloat16.
#[test]
fn rows_on_mlx_equal_rows_alone_but_for_the_last_bits() {
    for (name, bound) in [
        ("llama-f32", 1e-6),
        ("qwen2-f32", 1e-6),
        ("qwen3-f32", 1e-6),
        ("gemma3_text-f32", 1e-6),
        ("llama-bf16", 0.02),
        ("qwen3-4bit", 0.02),
    ] {
        let model = loaded(name, Kernels::Stock).unwrap().model;
        let found = difference(&*model, &[false]);
        assert!(found <= bound, "{name}: {found}");
        if name == "llama-f32" {
            let found = difference(&*model, &[true, false]);
            assert!(found <= bound, "{name}, mixed: {found}");
        }
    }
}
