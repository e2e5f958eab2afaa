//! Memory over a long decode; alone in its process, because MLX counts for the whole of it.

#![allow(clippy::unwrap_used)] // a test may panic

use std::path::Path;

use mlx_bun::cache::{LayerCache, make_prompt_cache};
use mlx_bun::checkpoint::Checkpoint;
use mlx_bun::generate::step::{StepOptions, TokenGenerator};
use mlx_bun::mlx::memory;
use mlx_bun::models;

/// cases P15: nothing grows in a long decode but the cache's own buffers.
#[test]
fn a_long_decode_holds_no_more_memory_than_its_cache() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/checkpoints/gemma3_text-f32");
    let mut checkpoint = Checkpoint::open(&folder).unwrap();
    let tensors = checkpoint.take_tensors();
    let model = models::load(&checkpoint.config, tensors, None).unwrap();
    let mut caches = make_prompt_cache(model.layer_kinds(), None);
    let options = StepOptions { max_tokens: Some(1500), ..StepOptions::default() };
    let mut generator = TokenGenerator::new(&*model, &mut caches, &[1, 2, 3, 4], &options).unwrap();
    let mut active = Vec::new();
    while let Some(step) = generator.next().unwrap() {
        drop(step);
        active.push(memory::active().unwrap());
    }
    drop(generator);
    let kept: usize = caches.iter().map(LayerCache::nbytes).sum();
    let (early, late) = (active[300], active[1400]);
    assert!(
        late < early + kept + (1 << 20),
        "{early} bytes after 300 steps, {late} after 1400, cache {kept}"
    );
}
