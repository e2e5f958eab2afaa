//! `generate`, `chat` and `cache-prompt` on a tiny random model, from outside.

#![allow(clippy::unwrap_used)] // clippy counts helpers outside of test functions as production code

mod support;

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Command, Output, Stdio};

use serde_json::Value;
use support::mlx_bun;

/// A model of a few layers with random weights; its end-of-sequence id is 2.
fn model(name: &str) -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures/checkpoints").join(name).display().to_string()
}

/// A verb on the tiny model.
fn on_model(verb: &str, arguments: &[&str]) -> Command {
    let mut command = mlx_bun(&[verb, "--model", &model("llama-f32")]);
    command.args(arguments);
    command
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Standard output of a command that must succeed.
fn stdout(command: &mut Command) -> String {
    let Output { status, stdout, stderr } = command.output().unwrap();
    assert!(status.success(), "{}", text(&stderr));
    text(&stdout)
}

/// The object that `generate --raw --json` prints.
fn json(arguments: &[&str]) -> Value {
    let mut command = on_model("generate", &["--raw", "--json", "-q"]);
    serde_json::from_str(&stdout(command.args(arguments))).unwrap()
}

#[test]
fn text_to_stdout_statistics_to_stderr() {
    let output = on_model("generate", &["--raw", "-m", "5", "Hello"]).output().unwrap();
    let object = json(&["-m", "5", "Hello"]);
    assert_eq!(text(&output.stdout), format!("{}\n", object["text"].as_str().unwrap()));
    let stderr = text(&output.stderr);
    let starts: Vec<_> = stderr.lines().map(|line| line.split(' ').next().unwrap()).collect();
    assert_eq!(starts, ["Prompt:", "Generation:", "Peak"], "{stderr}");
    assert!(stderr.contains("Generation: 5 tokens, "), "{stderr}");
    let quiet = on_model("generate", &["--raw", "--verbose", "false", "-m", "5", "Hello"]).output().unwrap();
    assert_eq!((quiet.stdout, text(&quiet.stderr).as_str()), (output.stdout, ""));
}

#[test]
fn replies_have_the_structure_asked_for() {
    let schema = r#"{"type": "object", "properties": {"n": {"type": "integer", "maximum": 9}, "s": {"enum": ["a", "b"]}},
        "required": ["n", "s"], "additionalProperties": false}"#;
    for seed in ["1", "2", "3"] {
        let object = json(&["-m", "400", "--temp", "1", "--seed", seed, "--json-schema", schema, "Hello"]);
        assert_eq!(object["finish_reason"], "stop", "{object}");
        let reply: Value = serde_json::from_str(object["text"].as_str().unwrap()).unwrap();
        assert!(
            reply["n"].as_i64().unwrap() <= 9 && ["a", "b"].contains(&reply["s"].as_str().unwrap()),
            "{reply}"
        );
    }
    let choice = json(&["--choice", "yes", "--choice", "no", "Hello"]);
    assert!(["yes", "no"].contains(&choice["text"].as_str().unwrap()), "{choice}");
    let sum = json(&["--grammar", "root ::= [0-9] \"+\" [0-9]", "Hello"]);
    assert_eq!(sum["text"].as_str().unwrap().len(), 3, "{sum}");
}

#[test]
fn j5_a_structure_that_cannot_be_enforced_is_an_error() {
    for (flag, argument, word) in [
        ("--json-schema", r#"{"properties": {"x": {"not": {"type": "null"}}}}"#, "`not` at `#/properties/x`"),
        ("--regex", "(?=a)b", "look-around"),
        ("--grammar", "root ::= missing", "`missing`"),
    ] {
        let output = on_model("generate", &["--raw", flag, argument, "Hello"]).output().unwrap();
        assert_eq!((output.status.code(), text(&output.stdout).as_str()), (Some(1), ""), "{flag}");
        assert!(text(&output.stderr).contains(word), "{}", text(&output.stderr));
    }
}

#[test]
fn json_has_tokens_reason_and_figures() {
    let object = json(&["-m", "5", "--top-logprobs", "2", "Hello"]);
    assert_eq!(object["schema_version"], 1);
    assert_eq!(object["tokens"].as_array().unwrap().len(), 5);
    assert_eq!(object["finish_reason"], "length");
    assert_eq!(object["stats"]["generation_tokens"], 5);
    let logprobs = object["logprobs"].as_array().unwrap();
    assert_eq!(logprobs.len(), 5);
    // Greedy: the token taken is the likeliest.
    assert_eq!(logprobs[0]["id"], logprobs[0]["top_logprobs"][0]["id"]);
    // Text, not the vocabulary's spelling of it: the chosen tokens' bytes are the reply's.
    let bytes = logprobs.iter().flat_map(|one| one["bytes"].as_array().unwrap());
    let bytes: Vec<u8> = bytes.map(|byte| byte.as_u64().unwrap() as u8).collect();
    assert_eq!(String::from_utf8_lossy(&bytes), object["text"].as_str().unwrap());
    assert_eq!(logprobs[0]["top_logprobs"].as_array().unwrap().len(), 2);
}

#[test]
fn s3_flags_change_the_output() {
    let plain = json(&["-m", "12", "Hello"]);
    let tokens = |arguments: &[&str]| json(&[&["-m", "12", "Hello"], arguments].concat())["tokens"].clone();
    let first = plain["tokens"][0].to_string();
    for arguments in [
        &["--temp", "2", "--seed", "1"][..],
        &["--temp", "2", "--seed", "2"],
        &["--temp", "2", "--seed", "1", "--top-k", "2"],
        &["--temp", "2", "--seed", "1", "--hlg-sampling", "on"],
        &["--logit-bias", &format!("{first}=-1000")],
        &["--repetition-penalty", "50"],
        &["--presence-penalty", "100"],
        &["--frequency-penalty", "100"],
        &["--max-tokens", "3"],
        &["--extra-eos-token", &first],
    ] {
        assert_ne!(tokens(arguments), plain["tokens"], "{arguments:?}");
    }
    let seeded = ["--temp", "2", "--seed", "7"];
    assert_eq!(tokens(&seeded), tokens(&seeded));
}

#[test]
fn a_stop_text_ends_the_reply_and_is_not_printed() {
    let whole = json(&["-m", "12", "Hello"])["text"].as_str().unwrap().to_owned();
    let stop: String = whole.chars().skip(2).take(1).collect();
    let cut = json(&["-m", "12", "--stop", &stop, "Hello"]);
    assert_eq!(cut["finish_reason"], "stop");
    assert_eq!(cut["text"], whole[..whole.find(&stop).unwrap()]);
}

#[test]
fn a_prompt_file_is_answered_in_order_as_if_each_line_stood_alone() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("prompts.jsonl");
    let lines = "{\"prompt\": \"Hello\", \"id\": \"a\"}\n{\"prompt\": \"Hello you\", \"max_tokens\": 2}\n";
    fs::write(&file, lines).unwrap();
    let path = file.to_str().unwrap();
    let out = stdout(&mut on_model("generate", &["--raw", "-m", "4", "--prompt-file", path]));
    let answers: Vec<Value> = out.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!((&answers[0]["index"], &answers[0]["id"]), (&Value::from(0), &Value::from("a")));
    assert_eq!(answers[0]["tokens"], json(&["-m", "4", "Hello"])["tokens"]);
    assert_eq!(answers[1]["tokens"], json(&["-m", "2", "Hello you"])["tokens"]);
    assert_eq!(answers[1]["stats"]["cached_tokens"], 0);
    assert_eq!(answers.len(), 2);
}

#[test]
fn a_saved_cache_goes_on_as_the_unbroken_prompt_would() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("cache.safetensors");
    let path = file.to_str().unwrap();
    for packing in [&[][..], &["--kv-bits", "8", "--kv-group-size", "32", "--quantized-kv-start", "0"]] {
        let save = ["--raw", "--prompt", "The beginning", "--prompt-cache-file", path];
        assert_eq!(stdout(on_model("cache-prompt", &save).args(packing)), "");
        let rest = ["--raw", "--json", "-m", "8", "--prompt-cache-file", path, " and the end"];
        let continued: Value =
            serde_json::from_str(&stdout(mlx_bun(&["generate"]).args(rest).args(packing))).unwrap();
        let whole = json(&[&["-m", "8", "The beginning and the end"], packing].concat());
        assert_eq!(continued["tokens"], whole["tokens"], "{packing:?}");
        assert!(continued["stats"]["cached_tokens"].as_u64().unwrap() > 0);
    }
}

#[test]
fn a_saved_cache_of_another_model_or_packing_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("cache.safetensors");
    let path = file.to_str().unwrap();
    stdout(&mut on_model(
        "cache-prompt",
        &["--raw", "--prompt", "x", "--kv-quant", "8", "--kv-group-size", "32", "--prompt-cache-file", path],
    ));
    let refused = |arguments: &[&str]| {
        let output = mlx_bun(&["generate", "--raw", "--prompt-cache-file", path, "y"])
            .args(arguments)
            .output()
            .unwrap();
        (output.status.code().unwrap(), text(&output.stderr))
    };
    let (code, said) = refused(&["--model", &model("qwen2-f32")]);
    assert!(code == 1 && said.contains("the prompt cache was made with"), "{said}");
    let (code, said) = refused(&["--kv-bits", "4", "--kv-group-size", "32"]);
    assert!(code == 2 && said.contains("packed to 8 bits in groups of 32, not 4"), "{said}");
    let (code, said) = refused(&["--kv-quant", "off"]);
    assert!(code == 2 && said.contains("packed to 8 bits, and `--kv-quant off` cannot unpack it"), "{said}");
    fs::write(&file, b"not a cache").unwrap();
    let (code, said) = refused(&[]);
    assert!(code == 1 && said.contains("cache.safetensors"), "{said}");
}

#[test]
fn a_bounded_cache_cannot_be_packed_later() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("cache.safetensors");
    let path = file.to_str().unwrap();
    let save = ["--raw", "--prompt", "x y", "--max-kv-size", "64", "--prompt-cache-file", path];
    stdout(&mut on_model("cache-prompt", &save));
    let go_on = ["generate", "--raw", "-q", "-m", "2", "--prompt-cache-file", path, "z"];
    stdout(&mut mlx_bun(&go_on));
    let output = mlx_bun(&go_on).args(["--kv-bits", "8", "--kv-group-size", "32"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("made with `--max-kv-size` and cannot be packed"));
}

#[test]
fn a_saved_cache_must_fit_the_model() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("cache.safetensors");
    let path = file.to_str().unwrap();
    let bf16 = model("llama-bf16");
    stdout(&mut mlx_bun(&[
        "cache-prompt",
        "--model",
        &bf16,
        "--raw",
        "--prompt",
        "x",
        "--prompt-cache-file",
        path,
    ]));
    // As if the model's folder now held another model: same names and layers, other types.
    let bytes = fs::read(&file).unwrap();
    let name = fs::canonicalize(&bf16).unwrap().display().to_string();
    let other = fs::canonicalize(model("llama-f32")).unwrap().display().to_string();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header = String::from_utf8(bytes[8..8 + length].to_vec()).unwrap().replace(&name, &other);
    let mut changed = (header.len() as u64).to_le_bytes().to_vec();
    changed.extend(header.bytes());
    changed.extend(&bytes[8 + length..]);
    fs::write(&file, changed).unwrap();
    let output = mlx_bun(&["generate", "--raw", "--prompt-cache-file", path, "y"]).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let said = text(&output.stderr);
    assert!(said.contains("the prompt cache does not fit the model: layer 0 holds"), "{said}");
    assert!(output.stdout.is_empty());
}

/// A copy of the tiny model.
fn copy(folder: &Path) {
    for entry in fs::read_dir(model("llama-f32")).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), folder.join(entry.file_name())).unwrap();
    }
}

#[test]
fn broken_files_of_a_model_are_named_once_in_words() {
    for (file, content, said) in [
        (
            "generation_config.json",
            "{",
            "generation_config.json: not valid JSON: it breaks off at line 1, column 1",
        ),
        (
            "generation_config.json",
            "{\"eos_token_id\": \"x\"}",
            "generation_config.json: field `eos_token_id`: expected a token id or a list of token ids",
        ),
        (
            "tokenizer.json",
            "{\"a\": oh}",
            "tokenizer.json` is not valid JSON at line 1, column 7; download it again",
        ),
        (
            "config.json",
            "{\"model_type\": \"llama\", \"eos_token_id\": 1.5}",
            "config.json: field `eos_token_id`: expected",
        ),
        (
            "config.json",
            "{\"model_type\": \"llama\", \"max_position_embeddings\": -1}",
            "config.json: field `max_position_embeddings`: must be a whole number of 0 or more, not -1",
        ),
        (
            "config.json",
            "{\"model_type\": \"llama\", \"hidden_size\": \"big\"}",
            "must be a whole number, not the text \"big\"",
        ),
    ] {
        let folder = tempfile::tempdir().unwrap();
        copy(folder.path());
        fs::write(folder.path().join(file), content).unwrap();
        let path = folder.path().to_str().unwrap();
        let output = mlx_bun(&["generate", "--raw", "--model", path, "x"]).output().unwrap();
        let stderr = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{stderr}");
        assert_eq!(stderr.matches(said).count(), 1, "{stderr}");
        assert_eq!(stderr.matches("column").count(), said.matches("column").count(), "{stderr}");
    }
}

#[test]
fn values_that_only_the_model_can_refuse_are_wrong_usage_too() {
    for flags in [
        ["--logit-bias", "4000000000=1"],
        ["--extra-eos-token", "no such token"],
        ["--kv-bits=8", "--kv-group-size=128"],
    ] {
        let output = on_model("generate", &["--raw", "x"]).args(flags).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{flags:?}: {}", text(&output.stderr));
    }
}

#[test]
fn l1_without_a_temporary_folder_says_what_to_do() {
    let generate = |arguments: &[&str]| {
        let mut command = on_model("generate", &["--raw", "-q", "-m", "2", "x"]);
        command.args(arguments).env("TMPDIR", "/dev/null/tmp");
        command.env("MLX_BUN_CACHE", "/dev/null/cache").output().unwrap()
    };
    let refused = generate(&["--l1"]);
    assert_eq!(refused.status.code(), Some(1));
    let said = text(&refused.stderr);
    assert!(said.starts_with("error: MLX compiles fused functions, and neither `"), "{said}");
    assert!(said.contains("hint: set TMPDIR to a folder that can be written"), "{said}");
    for arguments in [&[][..], &["--l1", "--compiled-activations", "off"]] {
        let output = generate(arguments);
        assert!(output.status.success(), "{:?}: {}", output.status, text(&output.stderr));
    }
}

#[test]
fn p11_a_group_that_does_not_fit_the_heads_is_refused_at_the_start() {
    let output =
        on_model("generate", &["--raw", "--kv-bits", "8", "--kv-group-size", "128", "x"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("group size 128"), "{}", text(&output.stderr));
    assert!(output.stdout.is_empty());
}

#[test]
fn a_reader_that_goes_away_ends_a_generation_without_an_error() {
    let mut child =
        on_model("generate", &["--raw", "--max-tokens", "-1", "--logit-bias", "2=-1000", "Hello"])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
    let mut stdout = child.stdout.take().unwrap();
    stdout.read_exact(&mut [0]).unwrap();
    drop(stdout);
    let output = child.wait_with_output().unwrap();
    assert_eq!((output.status.code(), text(&output.stderr).as_str()), (Some(0), ""));
}

#[test]
fn ctrl_c_stops_a_generation_and_keeps_what_was_made() {
    let mut child =
        on_model("generate", &["--raw", "--max-tokens", "-1", "--logit-bias", "2=-1000", "Hello"])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
    child.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130));
    assert!(output.stdout.ends_with(b"\n"));
    assert!(text(&output.stderr).contains("Generation: "), "{}", text(&output.stderr));
}

#[test]
fn ctrl_c_before_the_first_token_leaves_no_trace() {
    // On a busy machine the signal may come too late: then there is a reply, and nothing was tested.
    let said = (0..10).find_map(|_| interrupted_in_its_prompt()).expect("a reply came first, ten times");
    // A busy machine may have to say that it is still stopping.
    assert!(said.iter().all(|line| line.starts_with("hint: stopping")), "{said:?}");
}

/// Sends Ctrl-C to a `generate` that reads its prompt; what it says then, `None` if its reply came first.
fn interrupted_in_its_prompt() -> Option<Vec<String>> {
    let prompt = "Hello ".repeat(80);
    let mut child = on_model("generate", &["--raw", "-v", "--prefill-step-size", "1", "--l1", &prompt])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // Stands ready, since the prompt does not take long.
    let mut killer = Command::new("sh")
        .args(["-c", "read _; kill -INT $0", &child.id().to_string()])
        .stdin(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    assert!(lines.next().unwrap().unwrap().starts_with("model: "));
    killer.stdin.take().unwrap().write_all(b"\n").unwrap();
    killer.wait().unwrap();
    let said = lines.map(Result::unwrap).collect();
    let output = child.wait_with_output().unwrap();
    if !output.stdout.is_empty() {
        return None;
    }
    assert_eq!(output.status.code(), Some(130));
    Some(said)
}

#[test]
fn a_prompt_beyond_the_context_is_told_both_numbers() {
    let output = on_model("generate", &["--raw", &"Hello ".repeat(400)]).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let said = text(&output.stderr);
    assert!(said.contains(" tokens, but the model's context is 512"), "{said}");
}

#[test]
fn a_long_prompt_is_never_blamed_on_the_template() {
    let mut child =
        on_model("generate", &["-"]).stdin(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(&vec![b'x'; 3 << 20]).unwrap();
    let said = text(&child.wait_with_output().unwrap().stderr);
    assert!(said.contains(" tokens, but the model's context is 512"), "{said}");
}

/// A copy of the tiny model that ships no chat template.
fn without_template(folder: &Path) {
    copy(folder);
    let _ = fs::remove_file(folder.join("chat_template.jinja"));
    let path = folder.join("tokenizer_config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    config.as_object_mut().unwrap().remove("chat_template");
    fs::write(&path, config.to_string()).unwrap();
}

#[test]
fn a_conversation_needs_a_template() {
    let folder = tempfile::tempdir().unwrap();
    without_template(folder.path());
    let path = folder.path().to_str().unwrap();
    let output = mlx_bun(&["generate", "--model", path, "hi"]).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(
        text(&output.stderr),
        "error: the model has no chat template\n\
         hint: use --raw to give the prompt as it is, or --use-default-chat-template for ChatML\n"
    );
}

/// What `chat` prints for lines that come through a pipe.
fn chat(lines: &str) -> String {
    let mut child = on_model("chat", &["-q", "-m", "4"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(lines.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!((output.status.code(), text(&output.stderr).as_str()), (Some(0), ""));
    text(&output.stdout)
}

#[test]
fn chat_without_a_terminal_reads_lines_and_prints_replies_only() {
    let once = stdout(&mut on_model("generate", &["-q", "-m", "4", "Hello"]));
    assert_eq!(chat("\n/help\nHello\n/reset\nHello\n"), format!("{once}{once}"));
}

#[test]
fn p2_a_warm_turn_says_what_a_cold_one_would() {
    let warm = chat("Hello\nGo on\n");
    let first = stdout(&mut on_model("generate", &["-q", "-m", "4", "Hello"]));
    let second = warm.strip_prefix(&first).unwrap();
    let messages = serde_json::json!({"messages": [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": first.strip_suffix('\n').unwrap()},
        {"role": "user", "content": "Go on"},
    ]});
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("p.jsonl");
    fs::write(&file, messages.to_string()).unwrap();
    let out = stdout(&mut on_model("generate", &["-q", "-m", "4", "--prompt-file", file.to_str().unwrap()]));
    let cold: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(second, format!("{}\n", cold["text"].as_str().unwrap()));
}

/// The tokens that answer a question about a saved cache, and those that answer the same prompt in one piece.
fn about_saved_cache(arguments: &[&str]) -> (Value, Value) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("cache.safetensors");
    let path = file.to_str().unwrap();
    stdout(&mut on_model("cache-prompt", &["--prompt", "The book. ", "--prompt-cache-file", path]));
    let tokens = |command: &mut Command| {
        let out = stdout(command.args(["--json", "-q", "-m", "6"]).args(arguments));
        serde_json::from_str::<Value>(&out).unwrap()["tokens"].clone()
    };
    let continued = tokens(&mut mlx_bun(&["generate", "--prompt-cache-file", path, "Who?"]));
    (continued, tokens(&mut on_model("generate", &["The book. Who?"])))
}

#[test]
fn c8_a_question_about_a_saved_cache_is_the_users_message_going_on() {
    let (continued, whole) = about_saved_cache(&[]);
    assert_eq!(continued, whole);
}

#[test]
fn c8_a_prefilled_reply_comes_after_the_question() {
    let (continued, whole) = about_saved_cache(&["--prefill-response", "It"]);
    assert_eq!(continued, whole);
}

#[test]
fn an_eos_token_given_to_cache_prompt_holds_for_what_continues_it() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("cache.safetensors");
    let path = file.to_str().unwrap();
    let free = json(&["-m", "6", "The beginning and"]);
    let third = free["tokens"][2].to_string();
    let save = ["--raw", "--prompt", "The beginning", "--eos-token", &third, "--prompt-cache-file", path];
    stdout(&mut on_model("cache-prompt", &save));
    let mut command =
        mlx_bun(&["generate", "--raw", "--json", "-q", "-m", "6", "--prompt-cache-file", path, " and"]);
    let object: Value = serde_json::from_str(&stdout(&mut command)).unwrap();
    assert_eq!(object["finish_reason"], "stop");
    assert!(object["tokens"].as_array().unwrap().len() < 3);
}

/// Whatever a hand slips to: the weights of the very model, or notes.
#[test]
fn cache_prompt_replaces_nothing_but_prompt_caches() {
    let folder = tempfile::tempdir().unwrap();
    let weights = folder.path().join("model.safetensors");
    fs::copy(Path::new(&model("llama-f32")).join("model.safetensors"), &weights).unwrap();
    let notes = folder.path().join("notes.txt");
    fs::write(&notes, "precious").unwrap();
    for file in [&weights, &notes] {
        let before = fs::read(file).unwrap();
        let file_name = file.to_str().unwrap();
        let mut command =
            on_model("cache-prompt", &["--prompt-cache-file", file_name, "--prompt", "x", "--raw"]);
        let output = command.output().unwrap();
        assert_eq!(output.status.code(), Some(1));
        assert!(text(&output.stderr).contains("exists and is no prompt cache"), "{}", text(&output.stderr));
        assert!(fs::read(file).unwrap() == before);
    }
    let cache = folder.path().join("cache.safetensors");
    for _ in 0..2 {
        let file = ["--prompt-cache-file", cache.to_str().unwrap(), "--prompt", "x", "--raw"];
        stdout(&mut on_model("cache-prompt", &file));
    }
}

/// `generate --l1`, whose functions MLX compiles into `cache`.
fn compiling(cache: &Path) -> Command {
    let mut command = on_model("generate", &["--l1", "--raw", "-q", "-m", "4", "x"]);
    command.env("MLX_BUN_CACHE", cache).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// The libraries that runs keep for each other.
fn kept_libraries(cache: &Path) -> usize {
    let folders = fs::read_dir(cache.join("compiled")).unwrap().map(|entry| entry.unwrap().path());
    let folders: Vec<_> = folders.collect();
    assert_eq!(folders.len(), 1, "folders of runs stay behind: {folders:?}");
    fs::read_dir(&folders[0]).unwrap().count()
}

#[test]
fn l1_runs_that_start_together_do_not_disturb_each_other() {
    let cache = tempfile::tempdir().unwrap();
    let children: Vec<_> = (0..2).map(|_| compiling(cache.path()).spawn().unwrap()).collect();
    let outputs: Vec<_> = children.into_iter().map(|child| child.wait_with_output().unwrap()).collect();
    for output in &outputs {
        assert!(output.status.success(), "{}", text(&output.stderr));
        assert_eq!(output.stdout, outputs[0].stdout);
    }
    let kept = kept_libraries(cache.path());
    assert!(kept > 0);
    // What was kept is used: nothing is compiled any more.
    assert!(compiling(cache.path()).env("PATH", without_compiling()).output().unwrap().status.success());
    assert_eq!(kept_libraries(cache.path()), kept);
}

/// A PATH with a `g++` that answers, and compiles nothing.
fn without_compiling() -> String {
    use std::os::unix::fs::PermissionsExt;
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("no-compiler");
    fs::create_dir_all(&folder).unwrap();
    let compiler = folder.join("g++");
    fs::write(&compiler, "#!/bin/sh\ncase $1 in -dumpversion | --version) exit 0 ;; esac\nexit 1\n").unwrap();
    fs::set_permissions(&compiler, fs::Permissions::from_mode(0o755)).unwrap();
    format!("{}:/usr/bin:/bin", folder.display())
}

/// A terminal sends Ctrl-C to the compiler, too.
#[test]
fn ctrl_c_while_mlx_compiles_is_an_interrupt() {
    use std::os::unix::process::CommandExt;
    let cache = tempfile::tempdir().unwrap();
    let child = compiling(cache.path()).process_group(0).spawn().unwrap();
    let compiled = cache.path().join("compiled");
    while !fs::read_dir(&compiled).is_ok_and(|entries| entries.count() > 1) {
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    std::thread::sleep(std::time::Duration::from_millis(150));
    let group = format!("-{}", child.id());
    assert!(Command::new("kill").args(["-INT", "--", &group]).status().unwrap().success());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{}", text(&output.stderr));
    assert_eq!(kept_libraries(cache.path()), 0);
}
