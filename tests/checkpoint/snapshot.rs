//! Snapshot directories: shards and their index, config.json, generation_config.json, quantization.

use mlx_bun::checkpoint::{Checkpoint, QuantMode, QuantParams};
use serde::Deserialize;

use super::support::{Folder, assert_message};

#[track_caller]
fn assert_refused(folder: &Folder, parts: &[&str]) {
    match Checkpoint::open(folder.path()) {
        Ok(_) => panic!("it was opened"),
        Err(error) => assert_message(&error, parts),
    }
}

fn names(folder: &Folder) -> Vec<String> {
    Checkpoint::open(folder.path()).unwrap().tensors.into_keys().collect()
}

/// A config and no weights yet.
fn config(text: &str) -> Folder {
    let folder = Folder::new();
    folder.write("config.json", text);
    folder
}

#[test]
fn a_single_file_is_opened() {
    let folder = Folder::snapshot();
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    assert_eq!(checkpoint.config.family().unwrap(), "llama");
    assert_eq!(checkpoint.weights_label, "model.safetensors");
    assert_eq!(checkpoint.tensors["a"].shape, [1]);
    assert!(checkpoint.eos_token_ids.is_empty());
}

#[test]
fn shards_are_joined() {
    let folder = config("{}");
    folder.weights("model-00001-of-00002.safetensors", &["a"]);
    folder.weights("model-00002-of-00002.safetensors", &["b"]);
    folder.weights("adapters.safetensors", &["x"]);
    assert_eq!(names(&folder), ["a", "b"]);
    folder.index(&[("a", "model-00001-of-00002.safetensors"), ("b", "model-00002-of-00002.safetensors")]);
    assert_eq!(names(&folder), ["a", "b"]);
}

#[test]
fn a_missing_shard_is_named() {
    let folder = config("{}");
    folder.weights("model-1.safetensors", &["a"]);
    folder.index(&[("a", "model-1.safetensors"), ("b", "model-2.safetensors"), ("c", "model-2.safetensors")]);
    assert_refused(&folder, &["shard `model-2.safetensors` is missing", "2 tensors"]);
}

#[test]
fn a_shard_name_outside_the_directory_is_refused() {
    let folder = Folder::new();
    folder.weights("x.safetensors", &["b"]);
    folder.write("model/config.json", "{}");
    folder.weights("model/model.safetensors", &["a"]);
    let absolute = folder.join("x.safetensors").to_string_lossy().into_owned();
    for name in
        ["../x.safetensors", "../../x.safetensors", "sub/x.safetensors", "..\\x.safetensors", "..", &absolute]
    {
        let index = serde_json::json!({"weight_map": {"b": name}});
        folder.write("model/model.safetensors.index.json", index.to_string());
        let error = Checkpoint::open(&folder.join("model")).unwrap_err();
        assert_message(&error, &["model.safetensors.index.json", "tensor `b`", name, "without a path"]);
    }
}

#[test]
fn a_tensor_that_its_shard_lacks_is_named() {
    let folder = config("{}");
    folder.weights("model-1.safetensors", &["a"]);
    folder.weights("model-2.safetensors", &["b"]);
    folder.index(&[("a", "model-1.safetensors"), ("b", "model-1.safetensors")]);
    assert_refused(&folder, &["model-1.safetensors: tensor `b`", "not in this shard"]);
}

#[test]
fn a_tensor_in_two_shards_is_named_with_both() {
    let folder = config("{}");
    folder.weights("model-1.safetensors", &["a", "b"]);
    folder.weights("model-2.safetensors", &["b"]);
    assert_refused(&folder, &["tensor `b`", "model-1.safetensors", "model-2.safetensors"]);
}

#[test]
fn a_stale_index_beside_a_whole_model_is_ignored() {
    let folder = Folder::snapshot();
    folder.index(&[("a", "model-1.safetensors"), ("b", "model-2.safetensors")]);
    assert_eq!(names(&folder), ["a"]);
    folder.weights("model-1.safetensors", &["a"]);
    assert_eq!(names(&folder), ["a"]);
}

#[test]
fn a_copy_beside_a_complete_index_is_not_loaded_twice() {
    let folder = Folder::snapshot();
    folder.weights("model-1.safetensors", &["a", "b"]);
    folder.index(&[("a", "model-1.safetensors"), ("b", "model-1.safetensors")]);
    assert_eq!(names(&folder), ["a", "b"]);
}

#[test]
fn a_shard_that_the_index_forgot_is_loaded() {
    let folder = config("{}");
    folder.weights("model-1.safetensors", &["a"]);
    folder.weights("model-extra.safetensors", &["b"]);
    folder.index(&[("a", "model-1.safetensors")]);
    assert_eq!(names(&folder), ["a", "b"]);
}

#[test]
fn a_broken_index_is_named() {
    let folder = Folder::snapshot();
    for (text, part) in [
        ("{", "not a valid index"),
        ("[]", "not a valid index"),
        ("{}", "missing field `weight_map`"),
        (r#"{"weight_map":{"a":1}}"#, "invalid type"),
        (r#"{"weight_map":{"a":"x","a":"y"}}"#, "tensor `a` is listed twice"),
    ] {
        folder.write("model.safetensors.index.json", text);
        assert_refused(&folder, &["model.safetensors.index.json: ", part]);
    }
}

#[test]
fn a_directory_without_weights_is_named() {
    assert_refused(&config("{}"), &["holds no model*.safetensors"]);
}

#[test]
fn a_lying_shard_is_named() {
    let folder = Folder::snapshot();
    folder.write("model-2.safetensors", [0xff; 40]);
    assert_refused(&folder, &["model-2.safetensors: ", "over the limit"]);
}

#[test]
fn a_config_that_runs_python_is_refused() {
    let folder = Folder::snapshot();
    folder.write("config.json", r#"{"model_type":"llama","model_file":"evil.py"}"#);
    assert_refused(&folder, &["config.json", "`evil.py`", "never run"]);
    folder.write("config.json", r#"{"model_type":"llama","model_file":null}"#);
    assert!(Checkpoint::open(folder.path()).is_ok());
}

#[test]
fn a_broken_config_is_named() {
    let folder = Folder::snapshot();
    for (text, part) in
        [("{\"a\":", "not valid JSON"), ("[]", "expected an object, found a list"), ("", "breaks off")]
    {
        folder.write("config.json", text);
        assert_refused(&folder, &["config.json: ", part]);
    }
    assert_refused(&Folder::new(), &["cannot read", "config.json"]);
}

#[test]
fn a_field_of_the_wrong_kind_is_named() {
    #[derive(Debug, Deserialize)]
    struct Args {
        #[allow(dead_code)]
        hidden_size: u32,
    }
    let folder = Folder::snapshot();
    folder.write("config.json", r#"{"hidden_size":"big"}"#);
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let error = checkpoint.config.parse_text::<Args>().unwrap_err();
    assert_message(
        &error,
        &["config.json: field `hidden_size`: must be a whole number", "not the text \"big\""],
    );
}

#[test]
fn non_finite_floats_arrive_as_floats() {
    #[derive(Deserialize)]
    struct Args {
        limit: Vec<f32>,
        low: f64,
    }
    let folder = Folder::snapshot();
    folder.write("config.json", r#"{"limit":[0.5,Infinity],"low":{"__float__":"-Infinity"}}"#);
    let args: Args = Checkpoint::open(folder.path()).unwrap().config.parse_text().unwrap();
    assert_eq!(args.limit, [0.5, f32::INFINITY]);
    assert_eq!(args.low, f64::NEG_INFINITY);
}

#[test]
fn eos_of_generation_config_replaces_that_of_config() {
    let folder = Folder::snapshot();
    folder.write("config.json", r#"{"eos_token_id":2}"#);
    let eos = || Checkpoint::open(folder.path()).unwrap().eos_token_ids;
    assert_eq!(eos(), [2]);
    for (generation_config, expected) in [
        (r#"{"eos_token_id":[7,9]}"#, vec![7, 9]),
        (r#"{"eos_token_id":5}"#, vec![5]),
        (r#"{"eos_token_id":null}"#, vec![2]),
        (r#"{"eos_token_id":[]}"#, vec![2]),
        ("{}", vec![2]),
    ] {
        folder.write("generation_config.json", generation_config);
        assert_eq!(eos(), expected, "{generation_config}");
    }
}

#[test]
fn an_odd_value_is_an_error_even_where_another_replaces_it() {
    for (file, content, parts) in [
        (
            "generation_config.json",
            "{\"eos_token_id\":5",
            ["generation_config.json: not valid JSON", "breaks off"],
        ),
        (
            "generation_config.json",
            "{\"eos_token_id\":\"x\"}",
            ["generation_config.json: field `eos_token_id`", "token id"],
        ),
        ("config.json", "{\"eos_token_id\":\"x\"}", ["config.json: field `eos_token_id`", "token id"]),
        (
            "config.json",
            "{\"max_position_embeddings\":0}",
            ["config.json: field `max_position_embeddings`", "at least 1"],
        ),
    ] {
        let folder = Folder::snapshot();
        folder.write("generation_config.json", "{\"eos_token_id\":5}");
        folder.write(file, content);
        assert_message(&Checkpoint::open(folder.path()).unwrap_err(), &parts);
    }
}

#[test]
fn fp8_is_never_read_as_four_bit() {
    let folder = Folder::snapshot();
    for (quantization, name) in [
        (
            r#"{"quant_method":"compressed-tensors","format":"float-quantized"}"#,
            "compressed-tensors (float-quantized)",
        ),
        (r#"{"quant_method":"fp8","weight_block_size":[128,128]}"#, "fp8"),
        (r#"{"quant_method":"awq","bits":4,"group_size":128}"#, "awq"),
        (r#"{"quant_method":"gptq","bits":4,"group_size":128}"#, "gptq"),
        (r#"{"quant_method":"bitnet"}"#, "bitnet"),
    ] {
        folder.write("config.json", format!(r#"{{"quantization_config":{quantization}}}"#));
        assert_refused(&folder, &["config.json: ", &format!("quantization format {name} cannot be read")]);
        folder.write("config.json", format!(r#"{{"text_config":{{"quantization_config":{quantization}}}}}"#));
        assert_refused(&folder, &[name]);
    }
}

#[test]
fn a_modelopt_export_is_refused() {
    let folder = Folder::snapshot();
    folder.write("hf_quant_config.json", r#"{"quantization":{"quant_algo":"FP8"}}"#);
    assert_refused(&folder, &["hf_quant_config.json: ", "modelopt (FP8)"]);
}

#[test]
fn overrides_are_honoured_module_by_module() {
    let folder = Folder::snapshot();
    folder.write(
        "config.json",
        r#"{"quantization":{"group_size":64,"bits":4,"a.q":{"group_size":32,"bits":2},"a.k":false}}"#,
    );
    let quantization = Checkpoint::open(folder.path()).unwrap().quantization;
    let expected = QuantParams { bits: 2, group_size: 32, mode: QuantMode::Affine };
    assert_eq!(quantization.overrides["a.q"], Some(expected));
    assert_eq!(quantization.overrides["a.k"], None);
    assert_eq!(quantization.default, Some(QuantMode::Affine.defaults()));
}

#[test]
fn leftover_tensors_are_counted_and_named() {
    let folder = config("{}");
    let names: Vec<_> = (0..9).map(|at| format!("visual.{at}")).collect();
    folder.weights("model.safetensors", &names.iter().map(String::as_str).collect::<Vec<_>>());
    let source = Checkpoint::open(folder.path()).unwrap().take_tensors();
    let error = source.finish("llama").unwrap_err();
    assert_message(
        &error,
        &["9 tensors of model.safetensors", "family llama", "visual.0, visual.1", "and 4 more"],
    );
    assert!(!error.to_string().contains("visual.5"));
}
