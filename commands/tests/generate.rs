//! `generate`, `chat` and `cache-prompt` on a tiny random model, from outside.

#![allow(clippy::unwrap_used)] // clippy counts helpers outside of test functions as production code

mod support;

use std::fs;
use std::io::{Read, Write};
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
        assert_eq!(output.status.code(), Some(1));
        text(&output.stderr)
    };
    let said = refused(&["--model", &model("qwen2-f32")]);
    assert!(said.contains("the prompt cache was made with"), "{said}");
    let said = refused(&["--kv-bits", "4", "--kv-group-size", "32"]);
    assert!(said.contains("packed to 8 bits in groups of 32, not 4"), "{said}");
    fs::write(&file, b"not a cache").unwrap();
    assert!(refused(&[]).contains("cache.safetensors"));
}

#[test]
fn p11_a_group_that_does_not_fit_the_heads_is_refused_at_the_start() {
    let output =
        on_model("generate", &["--raw", "--kv-bits", "8", "--kv-group-size", "128", "x"]).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
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

/// A copy of the tiny model that ships no chat template.
fn without_template(folder: &Path) {
    for entry in fs::read_dir(model("llama-f32")).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), folder.join(entry.file_name())).unwrap();
    }
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
