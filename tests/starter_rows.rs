//! The starter model on our CPU kernels against what mlx-lm computed of it in float32.
//!
//! mlx-lm's weights were rounded to bfloat16, the GGUF's are not; that is all the bounds allow for. The exact comparison
//! is bench/src/bin/oracle_rows.rs.

#![allow(clippy::unwrap_used)] // a test may panic

use std::ops::ControlFlow;
use std::path::Path;

use mlx_bun::checkpoint::environment::Environment;
use mlx_bun::checkpoint::safetensors::SafetensorsFile;
use mlx_bun::checkpoint::source::{ModelSource, STARTER_FILE};
use mlx_bun::load::load;
use mlx_bun::mlx::cpu_ops::{self, Settings};
use mlx_bun::mlx::{Array, Dtype};
use mlx_bun::perplexity::evaluate;

#[test]
fn predictions_of_the_starter_are_those_of_mlx_lm_in_float32() {
    let starter = Environment::of_process().mlx_bun_cache().join("models").join(STARTER_FILE);
    assert!(starter.exists(), "{} is missing: python3 scripts/setup.py starter", starter.display());
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/starter_rows.safetensors");
    let file = SafetensorsFile::open(&fixture).unwrap();
    let array = |wanted: &str| {
        Array::from_tensor(&file.tensors().find(|(name, _)| *name == wanted).unwrap().1).unwrap()
    };
    // The first row; each takes seconds in a build for tests.
    let row = array("tokens").slice(0, 0, 1).unwrap().astype(Dtype::Uint32).unwrap().to_vec::<u32>().unwrap();
    let expected = array("logprobs").slice(0, 0, 1).unwrap().to_f32_vec().unwrap();

    cpu_ops::enable(Settings::default()).unwrap();
    let loaded = load(&ModelSource::Gguf(starter)).unwrap();
    let found =
        evaluate(&*loaded.model, None, &[row], 1, &mut |_| ControlFlow::Continue(())).unwrap().unwrap();
    let losses = &found.sequences[0].losses;
    assert_eq!(losses.len(), expected.len());
    let differences: Vec<f32> = losses.iter().zip(&expected).map(|(loss, logprob)| loss + logprob).collect();
    let mean = differences.iter().sum::<f32>() / differences.len() as f32;
    let largest = differences.iter().fold(0f32, |largest, difference| largest.max(difference.abs()));
    assert!(mean.abs() < 2e-3, "the mean loss is off by {mean}");
    assert!(largest < 0.2, "a log-probability is off by {largest}");
}
