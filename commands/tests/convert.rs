//! `mlx-bun convert` on the tiny checkpoints: the files of mlx_lm.convert, and nothing half-way when it fails.

#![allow(clippy::unwrap_used)] // clippy counts helpers outside of test functions as production code

mod support;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use mlx_bun::checkpoint::safetensors::SafetensorsFile;
use mlx_bun::checkpoint::safetensors_writer::write_safetensors;
use mlx_bun::checkpoint::{ElementType, Tensor};
use serde_json::Value;
use sha2::{Digest, Sha256};
use support::mlx_bun;

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures")
}

fn checkpoint(name: &str) -> String {
    fixtures().join("checkpoints").join(name).to_str().unwrap().to_owned()
}

fn convert(source: &str, target: &Path, arguments: &[&str]) -> Command {
    let mut command = mlx_bun(&["--no-progress", "convert", source, "--mlx-path", target.to_str().unwrap()]);
    command.args(arguments);
    command
}

fn stderr(command: &mut Command, status: i32) -> String {
    let output = command.output().unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(status), "{text}");
    text
}

fn tensors(directory: &Path) -> BTreeMap<String, Tensor> {
    let mut tensors = BTreeMap::new();
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "safetensors") {
            let file = SafetensorsFile::open(&path).unwrap();
            tensors.extend(file.tensors().map(|(name, tensor)| (name.to_owned(), tensor)));
        }
    }
    tensors
}

fn mlx_name(dtype: ElementType) -> &'static str {
    match dtype {
        ElementType::F16 => "float16",
        ElementType::BF16 => "bfloat16",
        ElementType::F32 => "float32",
        ElementType::U32 => "uint32",
        ElementType::U8 => "uint8",
        _ => "other",
    }
}

fn described(tensor: &Tensor) -> String {
    let hash = Sha256::digest(tensor.bytes());
    let hash: String = hash.iter().take(4).map(|byte| format!("{byte:02x}")).collect();
    format!("{}{:?} {hash}", mlx_name(tensor.dtype), tensor.shape)
}

fn children(directory: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        fs::read_dir(directory).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn conversions_are_those_of_mlx_lm() {
    let cases: Vec<Value> =
        serde_json::from_slice(&fs::read(fixtures().join("convert.json")).unwrap()).unwrap();
    let folder = tempfile::tempdir().unwrap();
    for (number, case) in cases.iter().enumerate() {
        let label = format!("{} {}", case["checkpoint"], case["options"]);
        let mut arguments = Vec::new();
        for (name, value) in case["options"].as_object().unwrap() {
            match name.as_str() {
                "quantize" => arguments.push("-q".to_owned()),
                "dequantize" => arguments.push("-d".to_owned()),
                name => arguments.extend([
                    format!("--{}", name.replace('_', "-")),
                    value.as_str().map_or_else(|| value.to_string(), str::to_owned),
                ]),
            }
        }
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let target = folder.path().join(number.to_string());
        stderr(&mut convert(&checkpoint(case["checkpoint"].as_str().unwrap()), &target, &arguments), 0);

        let expected: BTreeMap<String, String> = serde_json::from_value(case["tensors"].clone()).unwrap();
        let tensors = tensors(&target);
        let ours = tensors.iter().map(|(name, tensor)| (name.clone(), described(tensor)));
        let ours: BTreeMap<_, _> = ours.collect();
        assert_eq!(ours.keys().collect::<Vec<_>>(), expected.keys().collect::<Vec<_>>(), "{label}");
        for (name, tensor) in &ours {
            assert_eq!(*tensor, expected[name], "{name} of {label}");
        }
        let text = |name: &str| fs::read_to_string(target.join(name)).unwrap();
        assert_eq!(text("config.json"), case["config"].as_str().unwrap(), "{label}");
        assert_eq!(text("README.md"), case["card"].as_str().unwrap(), "{label}");
        let index: Value = serde_json::from_str(&text("model.safetensors.index.json")).unwrap();
        assert_eq!(index["metadata"], case["metadata"], "{label}");
    }
}

/// case L9: what was converted can be converted again.
#[test]
fn converting_twice_changes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let (once, twice) = (folder.path().join("once"), folder.path().join("twice"));
    stderr(&mut convert(&checkpoint("gemma3_text-bf16"), &once, &[]), 0);
    stderr(&mut convert(once.to_str().unwrap(), &twice, &[]), 0);
    let bytes =
        |path: &Path| tensors(path).into_iter().map(|(n, t)| (n, t.bytes().to_vec())).collect::<Vec<_>>();
    assert_eq!(bytes(&once), bytes(&twice));
    assert_eq!(fs::read(once.join("config.json")).unwrap(), fs::read(twice.join("config.json")).unwrap());
}

/// case L17: every width and group size loads and answers.
#[test]
fn converted_models_generate_also_from_gguf() {
    let folder = tempfile::tempdir().unwrap();
    let gguf = fixtures().join("gguf/llama.gguf");
    let sources = [
        (checkpoint("llama-bf16"), vec!["-q", "--q-bits", "2", "--q-group-size", "32"]),
        (gguf.to_str().unwrap().to_owned(), vec!["-q", "--q-bits", "6", "--q-group-size", "32"]),
        (gguf.to_str().unwrap().to_owned(), vec![]),
        (gguf.to_str().unwrap().to_owned(), vec!["-d"]),
    ];
    for (number, (source, arguments)) in sources.iter().enumerate() {
        let target = folder.path().join(number.to_string());
        stderr(&mut convert(source, &target, arguments), 0);
        let target = target.to_str().unwrap();
        stderr(&mut mlx_bun(&["generate", "--model", target, "--raw", "a b", "--max-tokens", "3"]), 0);
    }
}

/// Chat templates stand in files of their own, as transformers writes them, also those that only a config names.
#[test]
fn chat_templates_get_files_of_their_own() {
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("source");
    fs::create_dir(&source).unwrap();
    for file in fs::read_dir(checkpoint("qwen3-f32")).unwrap().map(Result::unwrap) {
        fs::copy(file.path(), source.join(file.file_name())).unwrap();
    }
    let config = source.join("tokenizer_config.json");
    let mut fields: Value = serde_json::from_slice(&fs::read(&config).unwrap()).unwrap();
    let named = |name: &str, text: &str| serde_json::json!({"name": name, "template": text});
    fields["chat_template"] = Value::Array(vec![named("default", "plain"), named("tool_use", "with tools")]);
    fs::write(&config, fields.to_string()).unwrap();
    let (first, second) = (folder.path().join("first"), folder.path().join("second"));
    stderr(&mut convert(source.to_str().unwrap(), &first, &[]), 0);
    let read = |file: PathBuf| fs::read_to_string(file).unwrap();
    assert_eq!(read(first.join("chat_template.jinja")), "plain");
    assert_eq!(read(first.join("additional_chat_templates/tool_use.jinja")), "with tools");
    // One that stands there already wins, as it does when the model answers.
    fs::write(source.join("chat_template.jinja"), "own file").unwrap();
    stderr(&mut convert(source.to_str().unwrap(), &second, &[]), 0);
    assert_eq!(read(second.join("chat_template.jinja")), "own file");
}

/// A slip of the hand does not cost anybody a file.
#[test]
fn results_of_probing_replace_nothing_else() {
    let folder = tempfile::tempdir().unwrap();
    let (file, target) = (folder.path().join("mine.json"), folder.path().join("out"));
    for content in ["{\"precious\": 1}", "[]", "null"] {
        fs::write(&file, content).unwrap();
        for flags in [["--target-bpw", "9"], ["--method", "dynamic_quant"]] {
            let mut command = convert(&checkpoint("llama-f32"), &target, &flags);
            let text = stderr(command.arg("--sensitivities").arg(&file), 1);
            assert!(text.contains("is no file of sensitivities"), "{text}");
            assert_eq!(fs::read_to_string(&file).unwrap(), content);
        }
    }
}

#[test]
fn a_target_out_of_reach_is_said() {
    let folder = tempfile::tempdir().unwrap();
    for (target, words) in [("99", "the most bits a weight"), ("1", "the fewest bits a weight")] {
        let out = folder.path().join(target);
        let text = stderr(&mut convert(&checkpoint("llama-f32"), &out, &["--target-bpw", target]), 0);
        assert!(text.contains(words), "{text}");
    }
}

#[test]
fn an_existing_folder_is_refused_before_any_work() {
    let folder = tempfile::tempdir().unwrap();
    let text = stderr(&mut convert("nowhere", folder.path(), &["-q"]), 1);
    assert!(
        text.starts_with("error: cannot save to the path `") && text.contains("hint: delete it"),
        "{text}"
    );
}

#[test]
fn damaged_weights_are_refused_and_named_and_nothing_is_left() {
    let folder = tempfile::tempdir().unwrap();
    let broken = folder.path().join("broken");
    fs::create_dir(&broken).unwrap();
    for name in ["config.json", "tokenizer.json", "tokenizer_config.json"] {
        fs::copy(Path::new(&checkpoint("llama-f32")).join(name), broken.join(name)).unwrap();
    }
    let stored = tensors(Path::new(&checkpoint("llama-f32")));
    for bad in [f32::NAN, f32::NEG_INFINITY] {
        let mut bytes: BTreeMap<&str, Vec<u8>> =
            stored.iter().map(|(name, tensor)| (name.as_str(), tensor.bytes().to_vec())).collect();
        bytes.get_mut("model.layers.1.mlp.up_proj.weight").unwrap()[400..404]
            .copy_from_slice(&bad.to_le_bytes());
        let written = stored.iter().map(|(name, tensor)| {
            (name.as_str(), tensor.dtype, tensor.shape.as_slice(), &bytes[name.as_str()])
        });
        write_safetensors(&broken.join("model.safetensors"), written, &BTreeMap::new()).unwrap();
        let target = folder.path().join("out");
        let text = stderr(&mut convert(broken.to_str().unwrap(), &target, &["-q"]), 1);
        assert_eq!(
            text,
            "error: tensor `model.layers.1.mlp.up_proj.weight` holds NaN or infinity; the checkpoint is damaged\n"
        );
        assert_eq!(children(folder.path()), ["broken"]);
    }
}

#[test]
fn rows_that_groups_do_not_divide_stay_and_are_said() {
    let folder = tempfile::tempdir().unwrap();
    let text = stderr(&mut convert(&checkpoint("llama-bf16"), &folder.path().join("out"), &["-q"]), 0);
    assert!(
        text.starts_with(
            "warning: left unquantized, since the group size does not divide their rows: \
             `model.layers.0.mlp.down_proj` (96 columns), `model.layers.1.mlp.down_proj` (96 columns)\n"
        ),
        "{text}"
    );
}

/// The target is a floor, the results of probing are used again, and the model answers.
#[test]
fn mixed_precision_reaches_its_target_and_remembers_what_it_measured() {
    let folder = tempfile::tempdir().unwrap();
    let results = folder.path().join("results.json");
    let mut runs = Vec::new();
    for (name, target) in [("a", "7"), ("b", "8.5")] {
        let out = folder.path().join(name);
        let arguments =
            ["--target-bpw", target, "--q-group-size", "32", "--n-calibration", "1", "--sensitivities"];
        let mut command = convert(&checkpoint("llama-f32"), &out, &arguments);
        let text = stderr(command.arg(&results), 0);
        let (_, reached) = text.split_once("Mixed 14 modules: ").unwrap();
        let reached: f64 = reached.split(' ').next().unwrap().parse().unwrap();
        let wanted: f64 = target.parse().unwrap();
        assert!(reached >= wanted && reached <= wanted * 1.02, "{text}");
        // The whole file's, scales and norms included.
        assert!(text.contains(&format!("): {reached:.3} bits per weight")), "{text}");
        let config: Value = serde_json::from_slice(&fs::read(out.join("config.json")).unwrap()).unwrap();
        let bits = |module: &str| config["quantization"][module]["bits"].as_u64();
        let modules =
            ["q_proj", "k_proj", "v_proj", "o_proj"].map(|name| format!("model.layers.1.self_attn.{name}"));
        assert!(modules.iter().filter(|module| bits(module) >= Some(4)).count() >= 2, "{config}");
        assert_eq!(config["quantization"]["bits"], 4);
        let out = out.to_str().unwrap().to_owned();
        stderr(&mut mlx_bun(&["generate", "--model", &out, "--raw", "a b", "--max-tokens", "3"]), 0);
        runs.push((reached, fs::metadata(&results).unwrap().modified().unwrap()));
    }
    assert!(runs[0].0 < runs[1].0);
    assert_eq!(runs[0].1, runs[1].1, "nothing was measured twice");
    let packed =
        stderr(&mut convert(&checkpoint("llama-4bit"), &folder.path().join("c"), &["--target-bpw", "5"]), 1);
    assert!(packed.starts_with("error: the model is quantized already"), "{packed}");
}

#[test]
fn a_cache_config_lists_every_layer_of_full_attention() {
    let folder = tempfile::tempdir().unwrap();
    for (model, target, expected) in [("llama-f32", "6", 2), ("gemma3_text-f32", "8", 1)] {
        let out = folder.path().join(model);
        stderr(
            &mut convert(&checkpoint(model), &out, &["--kv-target-bits", target, "--n-calibration", "1"]),
            0,
        );
        let layers: Vec<Value> =
            serde_json::from_slice(&fs::read(out.join("kv_config.json")).unwrap()).unwrap();
        assert_eq!(layers.len(), expected, "{model}");
        let bits: u64 = layers.iter().map(|layer| layer["bits"].as_u64().unwrap()).sum();
        assert_eq!(bits / expected as u64, target.parse::<u64>().unwrap());
        assert!(layers.iter().all(|layer| layer["group_size"] == 32 && layer["layer_idx"].is_u64()));
    }
}

#[test]
fn a_gguf_file_is_written_and_answers() {
    let folder = tempfile::tempdir().unwrap();
    for kind in ["F16", "q4_1"] {
        let file = folder.path().join(format!("{kind}.gguf"));
        let source = checkpoint("llama-bf16");
        let arguments =
            ["--no-progress", "convert", &source, "--to-gguf", kind, "--gguf-path", file.to_str().unwrap()];
        let text = stderr(&mut mlx_bun(&arguments), 0);
        assert!(
            text.starts_with("Wrote ") && text.contains(&format!("({}, ", kind.to_uppercase())),
            "{text}"
        );
        let model = file.to_str().unwrap();
        stderr(&mut mlx_bun(&["generate", "--model", model, "--raw", "a b", "--max-tokens", "3"]), 0);
        let again = stderr(&mut mlx_bun(&arguments), 1);
        assert!(again.starts_with("error: cannot save to the path `"), "{again}");
    }
    assert_eq!(children(folder.path()), ["F16.gguf", "q4_1.gguf"]);
    let both = [&checkpoint("llama-bf16"), "--to-gguf", "F16", "-q"];
    stderr(&mut mlx_bun(&[&["convert"], &both[..]].concat()), 2);
}

#[test]
fn every_method_writes_a_model_that_answers() {
    let folder = tempfile::tempdir().unwrap();
    let rows = folder.path().join("rows.jsonl");
    let row =
        |index: usize| format!("{{\"text\": \"{}\"}}\n", "a few words of text, and more ".repeat(index + 2));
    fs::write(&rows, (0..12).map(row).collect::<String>()).unwrap();
    for method in ["dynamic_quant", "awq", "gptq", "dwq"] {
        let out = folder.path().join(method);
        let mut command =
            convert(&checkpoint("llama-f32"), &out, &["--method", method, "--q-group-size", "32"]);
        command.args(["--fallback-group-size", "32", "--high-group-size", "32"]);
        command.args(["--sequence-length", "40", "--num-samples", "8", "--n-grid", "4", "--batch-size", "2"]);
        if method == "dynamic_quant" {
            command.args(["--target-bpw", "7.5"]);
        }
        stderr(command.arg("--calibration-mix").arg(&rows), 0);
        let config: Value = serde_json::from_slice(&fs::read(out.join("config.json")).unwrap()).unwrap();
        assert!(config["quantization"]["bits"].is_u64() && config["quantization_config"].is_object());
        let model = out.to_str().unwrap();
        stderr(&mut mlx_bun(&["generate", "--model", model, "--raw", "a b", "--max-tokens", "3"]), 0);
    }
    let packed = convert(&checkpoint("llama-4bit"), &folder.path().join("x"), &["--method", "gptq"]);
    let text = stderr(&mut { packed }, 1);
    assert!(text.contains("the model is quantized already"), "{text}");
}

/// A limit on the size of files stands for a full disk.
#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let target = folder.path().join("out");
    let command = convert(&checkpoint("llama-f32"), &target, &[]);
    let mut limited = Command::new("bash");
    limited.args(["-c", "trap '' XFSZ; ulimit -f 64; exec \"$0\" \"$@\""]).arg(command.get_program());
    limited.args(command.get_args()).env("MLX_BUN_NO_PROGRESS", "1");
    for (name, value) in command.get_envs() {
        limited.env(name, value.unwrap_or_default());
    }
    let text = stderr(&mut limited, 1);
    assert!(text.starts_with("error: cannot write ") && text.contains("model.safetensors: "), "{text}");
    assert!(children(folder.path()).is_empty());
}

/// Whenever it is killed, the folder is whole or absent, and the next run succeeds.
#[test]
fn a_killed_conversion_leaves_no_half_model() {
    let folder = tempfile::tempdir().unwrap();
    let target = folder.path().join("out");
    let mut completed = 0;
    for step in 0..12u64 {
        let mut child = convert(&checkpoint("llama-f32"), &target, &["-q", "--q-group-size", "32"])
            .stderr(std::process::Stdio::null())
            .spawn()
            .unwrap();
        std::thread::sleep(Duration::from_millis(step * 15));
        child.kill().unwrap();
        child.wait().unwrap();
        if target.exists() {
            assert_eq!(tensors(&target).len(), 50, "after {} ms", step * 15);
            assert!(target.join("config.json").exists() && target.join("tokenizer.json").exists());
            fs::remove_dir_all(&target).unwrap();
            completed += 1;
        }
    }
    stderr(&mut convert(&checkpoint("llama-f32"), &target, &["-q", "--q-group-size", "32"]), 0);
    assert_eq!(children(folder.path()), ["out"], "{completed} were quick enough");
}
