//! Adapters of random factors for the llama fixtures.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use mlx_bun::checkpoint::ElementType;
use mlx_bun::checkpoint::safetensors_writer::write_safetensors;

/// Numbers that are the same everywhere, of about the size given.
pub fn numbers(count: usize, seed: u32, size: f32) -> Vec<u8> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        ((state >> 8) as f32 / 8_388_608.0 - 1.0) * size
    };
    (0..count).flat_map(|_| next().to_le_bytes()).collect()
}

pub const RANK: usize = 4;
/// Input and output features of the llama fixtures' modules.
pub const MODULES: [(&str, usize, usize); 3] =
    [("self_attn.q_proj", 64, 128), ("self_attn.v_proj", 64, 64), ("mlp.down_proj", 96, 64)];

#[derive(Clone, Copy, PartialEq)]
pub enum Layout {
    MlxLm,
    Peft,
    Dora,
}

/// An adapter of random factors for both layers of a llama fixture.
pub fn adapter(directory: &Path, layout: Layout, size: f32) {
    fs::create_dir_all(directory).unwrap();
    let mut tensors: Vec<(String, Vec<usize>, Vec<u8>)> = Vec::new();
    for layer in 0..2u32 {
        for (index, (module, input, output)) in MODULES.into_iter().enumerate() {
            let path = format!("model.layers.{layer}.{module}");
            let seed = 7 + layer * 10 + index as u32;
            let (a, b) = (numbers(input * RANK, seed, size), numbers(RANK * output, seed + 100, size));
            if layout == Layout::Peft {
                // The same numbers, turned.
                let turned = |bytes: &[u8], rows: usize, columns: usize| -> Vec<u8> {
                    let at = |row: usize, column: usize| &bytes[(row * columns + column) * 4..][..4];
                    (0..columns).flat_map(|c| (0..rows).flat_map(move |r| at(r, c).to_vec())).collect()
                };
                let path = format!("base_model.model.{path}");
                tensors.push((format!("{path}.lora_A.weight"), vec![RANK, input], turned(&a, input, RANK)));
                tensors.push((format!("{path}.lora_B.weight"), vec![output, RANK], turned(&b, RANK, output)));
                continue;
            }
            tensors.push((format!("{path}.lora_a"), vec![input, RANK], a));
            tensors.push((format!("{path}.lora_b"), vec![RANK, output], b));
            if layout == Layout::Dora {
                let lengths = (0..output).flat_map(|row| (1.0 + row as f32 / 64.0).to_le_bytes()).collect();
                tensors.push((format!("{path}.m"), vec![output], lengths));
            }
        }
    }
    let (name, config) = match layout {
        Layout::Peft => ("adapter_model.safetensors", r#"{"r": 4, "lora_alpha": 8}"#),
        Layout::MlxLm => (
            "adapters.safetensors",
            r#"{"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": {"rank": 4, "scale": 2.0, "dropout": 0.0}}"#,
        ),
        Layout::Dora => (
            "adapters.safetensors",
            r#"{"fine_tune_type": "dora", "num_layers": 2, "lora_parameters": {"rank": 4, "scale": 2.0, "dropout": 0.0}}"#,
        ),
    };
    fs::write(directory.join("adapter_config.json"), config).unwrap();
    let tensors =
        tensors.iter().map(|(name, shape, bytes)| (name.as_str(), ElementType::F32, shape.as_slice(), bytes));
    write_safetensors(&directory.join(name), tensors, &BTreeMap::new()).unwrap();
}
