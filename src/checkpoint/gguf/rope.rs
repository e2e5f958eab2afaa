//! `rope_scaling` of the configuration: from metadata, or for llama3 recovered from its table of factors.

use serde_json::{Value, json};

use super::error::Fault;
use super::value::Metadata;

/// The tensor in which llama.cpp's converter stores llama3's scaling, one divisor a rotated pair.
pub const FACTORS: &str = "rope_freqs.weight";

/// How far apart two computations of one divisor may be: both round to single precision at each step.
const TOLERANCE: f64 = 1e-5;

/// The scaling that the metadata of `architecture` names, in Hugging Face's form, if any.
///
/// # Errors
/// If it is one that the model files cannot express.
pub fn scaling(metadata: &Metadata<'_>, architecture: &str, context: u64) -> Result<Option<Value>, Fault> {
    let key = |name: &str| format!("{architecture}.rope.scaling.{name}");
    let kind_key = key("type");
    let factor_key = key("factor");
    let mut factor = metadata.number(&factor_key)?;
    if factor.is_none() {
        factor = metadata.number(&format!("{architecture}.rope.scale_linear"))?;
    }
    // As llama.cpp: without a type, a factor means linear; a factor of zero or none means no scaling.
    let kind = metadata.text(&kind_key)?.unwrap_or("linear");
    let factor = factor.filter(|&factor| factor != 0.0);
    match (kind, factor) {
        ("none", _) | ("linear", None) => Ok(None),
        ("linear", Some(factor)) => {
            Ok((factor != 1.0).then(|| json!({"rope_type": "linear", "factor": factor})))
        }
        ("yarn", None) => Err(Fault::MissingKey(factor_key)),
        ("yarn", Some(factor)) => yarn(metadata, &key, factor, context).map(Some),
        _ => Err(Fault::key(
            &kind_key,
            format!("is {kind:?}, which is not supported (none, linear and yarn are)"),
        )),
    }
}

fn yarn(
    metadata: &Metadata<'_>,
    key: &impl Fn(&str) -> String,
    factor: f64,
    context: u64,
) -> Result<Value, Fault> {
    for (name, neutral) in [("attn_factor", 1.0), ("yarn_log_multiplier", 0.0), ("yarn_ext_factor", 1.0)] {
        let key = key(name);
        if metadata.number(&key)?.is_some_and(|value| value != neutral) {
            return Err(Fault::key(&key, format!("is not {neutral}, which is not supported")));
        }
    }
    let original = metadata.integer(&key("original_context_length"))?.unwrap_or(context);
    let mut scaling = json!({
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
    });
    for (name, field) in [("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")] {
        if let Some(value) = metadata.number(&key(name))? {
            scaling[field] = json!(value);
        }
    }
    Ok(scaling)
}

/// llama3's parameters. Only `original / low` and `original / high` matter, so `low` is 1 without loss.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Llama3 {
    factor: f64,
    high: f64,
    original: f64,
}

impl Llama3 {
    /// The divisor of a frequency with this wavelength (transformers' `_compute_llama3_parameters`).
    fn divisor(self, wavelength: f64) -> f64 {
        if wavelength < self.original / self.high {
            1.0
        } else if wavelength > self.original {
            self.factor
        } else {
            let smooth = (self.original / wavelength - 1.0) / (self.high - 1.0);
            1.0 / ((1.0 - smooth) / self.factor + smooth)
        }
    }

    fn reproduces(self, divisors: &[f32], wavelengths: &[f64]) -> bool {
        let close = |(&stored, &wavelength): (&f32, &f64)| {
            (self.divisor(wavelength) / f64::from(stored) - 1.0).abs() < TOLERANCE
        };
        divisors.iter().zip(wavelengths).all(close)
    }
}

/// The llama3 scaling whose divisors are `divisors`, for frequencies `theta ^ (-2 i / dimensions)`; `None`
/// if all are 1, that is, no scaling.
///
/// # Errors
/// If no parameters reproduce them.
pub fn llama3(divisors: &[f32], theta: f64, dimensions: u64) -> Result<Option<Value>, Fault> {
    if divisors.len() as u64 != dimensions / 2 {
        let problem = format!("has {} elements where {} are expected", divisors.len(), dimensions / 2);
        return Err(Fault::tensor(FACTORS, problem));
    }
    if divisors.iter().all(|&divisor| divisor == 1.0) {
        return Ok(None);
    }
    let wavelengths: Vec<f64> = (0..divisors.len())
        .map(|pair| std::f64::consts::TAU * theta.powf(2.0 * pair as f64 / dimensions as f64))
        .collect();
    let factor = divisors.last().map_or(1.0, |&last| f64::from(last));
    // Every published model has the first; the solution covers others with enough pairs between the plateaus.
    let published = Llama3 { factor, high: 4.0, original: 8192.0 };
    let found = std::iter::once(published)
        .chain(solve(divisors, &wavelengths, factor))
        .find(|candidate| candidate.reproduces(divisors, &wavelengths));
    match found {
        Some(Llama3 { factor, high, original }) => Ok(Some(json!({
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": high,
            "original_max_position_embeddings": original as u64,
        }))),
        None => Err(Fault::tensor(FACTORS, "holds factors that no llama3 rope scaling produces")),
    }
}

/// Between the plateaus the divisor's inverse is linear in the inverse wavelength: two points give the line.
fn solve(divisors: &[f32], wavelengths: &[f64], factor: f64) -> Option<Llama3> {
    let smooth: Vec<(f64, f64)> = divisors
        .iter()
        .zip(wavelengths)
        .filter(|&(&divisor, _)| divisor > 1.0 && f64::from(divisor) < factor)
        .map(|(&divisor, &wavelength)| {
            ((1.0 / f64::from(divisor) - 1.0 / factor) / (1.0 - 1.0 / factor), 1.0 / wavelength)
        })
        .collect();
    let (&(first, first_inverse), &(last, last_inverse)) = (smooth.first()?, smooth.last()?);
    let slope = (first - last) / (first_inverse - last_inverse);
    let intercept = slope * first_inverse - first;
    let high = 1.0 + 1.0 / intercept;
    // Parameters are round numbers; the divisors are too coarse to tell more.
    let high = (high * 64.0).round() / 64.0;
    let original = (slope * (high - 1.0)).round();
    (high > 1.0 && original.is_finite() && original > 0.0).then_some(Llama3 { factor, high, original })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn divisors(parameters: Llama3, theta: f64, dimensions: u64) -> Vec<f32> {
        (0..dimensions / 2)
            .map(|pair| {
                // As the converter: single precision throughout.
                let frequency = 1.0 / (theta as f32).powf(2.0 * pair as f32 / dimensions as f32);
                parameters.divisor(f64::from(std::f32::consts::TAU / frequency)) as f32
            })
            .collect()
    }

    #[test]
    fn recovers_llama3_parameters() {
        for (factor, high, original) in [
            (8.0, 4.0, 8192.0),
            (32.0, 4.0, 8192.0),
            (16.0, 4.0, 4096.0),
            (8.0, 8.0, 2048.0),
            (4.0, 2.5, 16384.0),
        ] {
            for (theta, dimensions) in [(500_000.0, 128), (500_000.0, 64), (10_000.0, 128)] {
                let parameters = Llama3 { factor, high, original };
                let stored = divisors(parameters, theta, dimensions);
                if f64::from(*stored.last().unwrap()) != factor {
                    continue; // never reaches the upper plateau
                }
                let found = llama3(&stored, theta, dimensions).unwrap().unwrap();
                assert_eq!(found["factor"], factor);
                assert_eq!(found["high_freq_factor"], high, "{parameters:?} {theta} {dimensions}");
                assert_eq!(found["original_max_position_embeddings"], original as u64);
            }
        }
    }

    #[test]
    fn scaling_from_metadata() {
        use super::super::value::Value as Stored;
        let read = |entries: &[(&'static str, Stored<'static>)]| {
            let mut metadata = Metadata::default();
            metadata.entries.extend(entries.iter().copied());
            scaling(&metadata, "qwen2", 32768)
        };
        let kind = |name: &'static str| ("qwen2.rope.scaling.type", Stored::String(name.as_bytes()));
        let factor = ("qwen2.rope.scaling.factor", Stored::F32(4.0));
        assert_eq!(read(&[]).unwrap(), None);
        assert_eq!(read(&[kind("none"), factor]).unwrap(), None);
        assert_eq!(read(&[factor]).unwrap(), Some(json!({"rope_type": "linear", "factor": 4.0})));
        let yarn = json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768});
        assert_eq!(read(&[kind("yarn"), factor]).unwrap(), Some(yarn));
        assert!(read(&[kind("yarn")]).unwrap_err().to_string().contains("factor\" is missing"));
        let other = read(&[kind("longrope"), factor]).unwrap_err().to_string();
        assert!(other.contains("is \"longrope\", which is not supported"), "{other}");
        let attention = ("qwen2.rope.scaling.attn_factor", Stored::F32(1.5));
        assert!(read(&[kind("yarn"), factor, attention]).is_err());
    }

    #[test]
    fn refuses_divisors_of_another_scaling() {
        let mut stored = divisors(Llama3 { factor: 8.0, high: 4.0, original: 8192.0 }, 500_000.0, 128);
        assert_eq!(llama3(&[1.0; 64], 500_000.0, 128).unwrap(), None);
        assert!(llama3(&stored[1..], 500_000.0, 128).is_err());
        stored[40] *= 1.001;
        assert!(llama3(&stored, 500_000.0, 128).is_err());
        stored[40] = f32::NAN;
        assert!(llama3(&stored, 500_000.0, 128).is_err());
    }
}
