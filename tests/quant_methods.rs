//! The calibrated methods against mlx-lm's on tiny checkpoints, by MLX's own kernels;
//! scripts/oracle/quant_methods.py writes the expectations.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use mlx_bun::checkpoint::source::ModelSource;
use mlx_bun::checkpoint::{ElementType, QuantMode, QuantParams, Taken, Tensor, WeightTensors};
use mlx_bun::mlx::{Array, Dtype, cpu_ops};
use mlx_bun::quantize::{
    AwqOptions, DwqOptions, DynamicOptions, FloatType, GptqOptions, SourceModel, awq, dwq,
    dynamic_allocation, dynamic_sensitivities, gptq,
};
use serde_json::Value;
use sha2::{Digest, Sha256};

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures")
}

fn cases(method: &str) -> Vec<Value> {
    let cases: Vec<Value> =
        serde_json::from_slice(&std::fs::read(fixtures().join("quant_methods.json")).unwrap()).unwrap();
    cases.into_iter().filter(|case| case["method"] == method).collect()
}

fn open(case: &Value) -> SourceModel {
    cpu_ops::disable();
    let path = fixtures().join("checkpoints").join(case["checkpoint"].as_str().unwrap());
    SourceModel::open(&ModelSource::Snapshot(path)).unwrap()
}

fn rows(count: usize, length: usize, seed: usize) -> Vec<Vec<u32>> {
    let id =
        |row: usize, place: usize| ((row * 131 + place * 37 + place * place * 7 + seed) % 317 + 3) as u32;
    (0..count).map(|row| (0..length).map(|place| id(row, place)).collect()).collect()
}

fn ids(count: usize, length: usize, seed: usize) -> Array {
    Array::from_slice(&rows(count, length, seed).concat(), &[count as i32, length as i32]).unwrap()
}

fn affine(bits: u8) -> QuantParams {
    QuantParams { bits, group_size: 32, mode: QuantMode::Affine }
}

fn go_on(_: usize, _: usize) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

fn tensors(model: &SourceModel) -> BTreeMap<String, Tensor> {
    let mut tensors = BTreeMap::new();
    for taken in &model.tensors {
        match taken {
            Taken::Plain { name, tensor } => {
                tensors.insert(name.clone(), tensor.clone());
            }
            Taken::Weight { path, tensors: WeightTensors::Dense(weight) } => {
                tensors.insert(format!("{path}.weight"), weight.clone());
            }
            Taken::Weight { path, tensors: WeightTensors::Quantized { weight, scales, biases, .. } } => {
                tensors.insert(format!("{path}.weight"), weight.clone());
                tensors.insert(format!("{path}.scales"), scales.clone());
                tensors.insert(format!("{path}.biases"), biases.clone().unwrap());
            }
        }
    }
    tensors
}

fn hash(tensor: &Tensor) -> String {
    Sha256::digest(tensor.bytes()).iter().take(4).map(|byte| format!("{byte:02x}")).collect()
}

/// Names of tensors whose bits differ; floats among them must agree to `tolerance` in the sum of their magnitudes.
fn differing(case: &Value, model: &SourceModel, tolerance: f64) -> Vec<String> {
    let ours = tensors(model);
    let expected = case["tensors"].as_object().unwrap();
    assert_eq!(
        ours.keys().collect::<Vec<_>>(),
        expected.keys().collect::<Vec<_>>(),
        "{}",
        case["checkpoint"]
    );
    let mut differing = Vec::new();
    for (name, tensor) in &ours {
        let (digest, sum) = match &expected[name] {
            Value::Array(pair) => (pair[0].as_str().unwrap(), pair[1].as_f64()),
            digest => (digest.as_str().unwrap(), None),
        };
        if hash(tensor) == digest {
            continue;
        }
        if let Some(sum) = sum {
            let kind = FloatType::of(tensor.dtype).unwrap();
            let found: f64 = kind.decode(tensor.bytes()).iter().map(|value| f64::from(value.abs())).sum();
            assert!(
                (found / sum - 1.0).abs() < tolerance,
                "{} {name}: {found} is not {sum}",
                case["checkpoint"]
            );
        } else {
            assert_eq!(tensor.dtype, ElementType::U32);
        }
        differing.push(name.clone());
    }
    differing
}

#[test]
fn sensitivities_are_those_of_dynamic_quant() {
    for case in cases("dynamic_quant") {
        let model = open(&case);
        let options = DynamicOptions { low: affine(4), high: affine(5) };
        let found = dynamic_sensitivities(&model, &ids(6, 40, 1), options, &mut go_on).unwrap();
        let expected: BTreeMap<String, f64> = serde_json::from_value(case["sensitivities"].clone()).unwrap();
        assert_eq!(found.keys().collect::<Vec<_>>(), expected.keys().collect::<Vec<_>>());
        let spread = case["spread"].as_f64().unwrap();
        for (module, value) in &expected {
            let error = (found[module] - value).abs() / spread;
            assert!(error < 1e-5, "{} {module}: {} {value}", case["checkpoint"], found[module]);
        }
        let target = case["target"].as_f64().unwrap();
        let high = dynamic_allocation(&model, &expected, options, target, None).unwrap();
        let wanted: Vec<String> = serde_json::from_value(case["high"].clone()).unwrap();
        assert!(!wanted.is_empty());
        assert_eq!(high.into_keys().collect::<Vec<_>>(), wanted, "{}", case["checkpoint"]);
    }
}

#[test]
fn gptq_makes_the_tensors_of_mlx_lm() {
    for case in cases("gptq") {
        let model = open(&case);
        let options = GptqOptions { params: affine(4), fallback: affine(6) };
        let reworked = gptq(&model, &ids(10, 40, 2), options, &mut go_on).unwrap();
        let model = model.reworked(reworked);
        assert_eq!(differing(&case, &model, 1e-3), Vec::<String>::new(), "{}", case["checkpoint"]);
    }
}

#[test]
fn awq_makes_the_tensors_of_mlx_lm() {
    for case in cases("awq") {
        let model = open(&case);
        let options = AwqOptions { params: affine(3), embed: affine(4), grid: 10 };
        let (reworked, layers) = awq(&model, &ids(6, 40, 3), options, &mut go_on).unwrap();
        assert!(layers.iter().any(|layer| layer.after < layer.before), "{layers:?}");
        let model = model.reworked(reworked);
        assert_eq!(differing(&case, &model, 1e-3), Vec::<String>::new(), "{}", case["checkpoint"]);
    }
}

#[test]
fn dwq_trains_as_mlx_lm_does() {
    for case in cases("dwq") {
        let model = open(&case);
        let rows: Vec<Vec<u32>> = rows(8, 60, 4)
            .into_iter()
            .enumerate()
            .map(|(index, row)| row[..20 + 5 * index].to_vec())
            .collect();
        let dtype = if case["checkpoint"].as_str().unwrap().contains("bf16") {
            Dtype::Bfloat16
        } else {
            Dtype::Float32
        };
        let options = DwqOptions {
            params: affine(3),
            learning_rate: 1e-4,
            batch_size: 2,
            max_length: 50,
            seed: 5,
            dtype,
        };
        let (reworked, result) = dwq(&model, &rows, &rows[..4], options, &mut go_on).unwrap();
        assert!(result.after < result.before, "{result:?}");
        let differing = differing(&case, &model.reworked(reworked), 1e-4);
        // The codes are not trained; what is may differ in its last bits.
        let is_trained =
            |name: &String| ["scales", "biases", "norm.weight"].iter().any(|end| name.ends_with(end));
        assert!(differing.iter().all(is_trained), "{differing:?}");
    }
}
