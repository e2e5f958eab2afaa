//! What the program refuses before it loads a model, and how it says so.

#![allow(clippy::unwrap_used)] // clippy counts helpers outside of test functions as production code

mod support;

use std::fs::{self, File};

use insta::assert_snapshot;
use support::{failed, mlx_bun, outcome, refused, run};

#[test]
fn unknown_verbs_and_flags_get_a_suggestion() {
    assert_snapshot!(run(&["generat", "hi"]), @"
    exit 2
    -- stdout
    -- stderr
    error: unrecognized subcommand 'generat'

      hint: some similar subcommands exist: 'convert', 'gen', 'generate'

    Usage: mlx-bun [OPTIONS] <COMMAND>

    For more information, try '--help'.
    ");
    assert_snapshot!(run(&["generate", "--temprature", "1", "hi"]), @"
    exit 2
    -- stdout
    -- stderr
    error: unexpected argument '--temprature' found

      hint: a similar argument exists: '--temperature'

    Usage: mlx-bun generate --temp <T> [PROMPT]...

    For more information, try '--help'.
    ");
    assert_snapshot!(run(&["generate", "--nonsense", "hi"]), @"
    exit 2
    -- stdout
    -- stderr
    error: unexpected argument '--nonsense' found

    Usage: mlx-bun generate [OPTIONS] [PROMPT]...

    For more information, try '--help'.
    ");
}

#[test]
fn flags_of_later_work_do_not_exist() {
    for flag in ["--draft-model", "--image", "--num-draft-tokens", "--quantize-activations"] {
        assert_eq!(
            refused(&["generate", flag, "x", "hi"]),
            format!("error: unexpected argument '{flag}' found")
        );
    }
}

#[test]
fn values_out_of_range_are_told_the_range() {
    let cases = [
        ["--temp", "5.1"],
        ["--temperature", "-0.1"],
        ["--temp", "nan"],
        ["--top-p", "1.01"],
        ["--top-k", "1000001"],
        ["--top-k", "1.5"],
        ["--min-p", "2"],
        ["--min-tokens-to-keep", "0"],
        ["--xtc-probability", "1.1"],
        ["--xtc-threshold", "0.6"],
        ["--max-tokens", "0"],
        ["--max-tokens", "10000001"],
        ["--repetition-penalty", "-1"],
        ["--presence-penalty", "-101"],
        ["--repetition-context-size", "-1"],
        ["--logit-bias", "5"],
        ["--logit-bias", "x=1"],
        ["--logit-bias", "5=9999"],
        ["--hlg-width", "101"],
        ["--top-logprobs", "12"],
        ["--kv-bits", "7"],
        ["--kv-group-size", "16"],
        ["--kv-quant", "6"],
        ["--max-kv-size", "4"],
        ["--prefill-step-size", "0"],
        ["--quantized-kv-start", "-1"],
        ["--seed", "-1"],
        ["--hlg-sampling", "maybe"],
        ["--thinking", "perhaps"],
        ["--chat-template-config", "[1]"],
        ["--chat-template-config", "{"],
        ["--temp", "-1e3"],
        ["--max-tokens", "-5"],
        ["--logit-bias", "-1=2"],
        ["--threads", "-1"],
        ["--hlg-toe", "-0.5"],
        ["--kv-bits", "-4"],
    ];
    let lines: Vec<_> = cases.iter().map(|[flag, value]| refused(&["generate", "hi", flag, value])).collect();
    assert_snapshot!(lines.join("\n"), @r#"
    error: invalid value '5.1' for '--temp <T>': must be in [0, 5]
    error: invalid value '-0.1' for '--temp <T>': must be in [0, 5]
    error: invalid value 'nan' for '--temp <T>': must be in [0, 5]
    error: invalid value '1.01' for '--top-p <P>': must be in [0, 1]
    error: invalid value '1000001' for '--top-k <K>': must be in [0, 1000000]
    error: invalid value '1.5' for '--top-k <K>': must be a whole number in [0, 1000000]
    error: invalid value '2' for '--min-p <P>': must be in [0, 1]
    error: invalid value '0' for '--min-tokens-to-keep <N>': must be in [1, 1000000]
    error: invalid value '1.1' for '--xtc-probability <P>': must be in [0, 1]
    error: invalid value '0.6' for '--xtc-threshold <P>': must be in [0, 0.5]
    error: invalid value '0' for '--max-tokens <N>': must be in [1, 10000000], or -1 for no limit
    error: invalid value '10000001' for '--max-tokens <N>': must be in [1, 10000000], or -1 for no limit
    error: invalid value '-1' for '--repetition-penalty <X>': must be 0 or in [0.01, 100]
    error: invalid value '-101' for '--presence-penalty <X>': must be in [-100, 100]
    error: invalid value '-1' for '--repetition-context-size <N>': must be in [0, 10000000]
    error: invalid value '5' for '--logit-bias <ID=VALUE>': must be ID=VALUE or a JSON object
    error: invalid value 'x=1' for '--logit-bias <ID=VALUE>': `x` is not a token id
    error: invalid value '5=9999' for '--logit-bias <ID=VALUE>': the value of token 5 must be in [-1000, 1000]
    error: invalid value '101' for '--hlg-width <NATS>': must be in [0, 100]
    error: invalid value '12' for '--top-logprobs <N>': must be in [0, 11]
    error: invalid value '7' for '--kv-bits <BITS>'
    error: invalid value '16' for '--kv-group-size <N>'
    error: invalid value '6' for '--kv-quant <off|4|8>'
    error: invalid value '4' for '--max-kv-size <N>': must be in [5, 1000000000]
    error: invalid value '0' for '--prefill-step-size <N>': must be in [1, 1000000]
    error: invalid value '-1' for '--quantized-kv-start <N>': must be in [0, 1000000000]
    error: invalid value '-1' for '--seed <N>': must be a whole number in [0, 18446744073709551615]
    error: invalid value 'maybe' for '--hlg-sampling <ON|OFF>'
    error: invalid value 'perhaps' for '--thinking <true|false>'
    error: invalid value '[1]' for '--chat-template-config <JSON>': must be a JSON object, like '{"enable_thinking": false}'
    error: invalid value '{' for '--chat-template-config <JSON>': is not valid JSON: it breaks off at line 1, column 1
    error: invalid value '-1e3' for '--temp <T>': must be in [0, 5]
    error: invalid value '-5' for '--max-tokens <N>': must be a whole number in [1, 10000000], or -1 for no limit
    error: invalid value '-1=2' for '--logit-bias <ID=VALUE>': `-1` is not a token id
    error: invalid value '-1' for '--threads <N>': must be a whole number in [1, 64]
    error: invalid value '-0.5' for '--hlg-toe <NATS>': must be in [0, 100]
    error: invalid value '-4' for '--kv-bits <BITS>'
    "#);
}

#[test]
fn flags_that_a_saved_cache_would_ignore_are_refused() {
    for flag in [["--system-prompt", "x"], ["--max-kv-size", "64"]] {
        let said = refused(&["generate", "--prompt-cache-file", "f", flag[0], flag[1], "hi"]);
        assert_eq!(
            said,
            format!("error: `{}` cannot change what `--prompt-cache-file` already holds", flag[0])
        );
    }
}

#[test]
fn a_prompt_of_absurd_size_is_told_the_limit() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("large");
    fs::write(&path, vec![b'x'; (16 << 20) + 1]).unwrap();
    assert_snapshot!(outcome(mlx_bun(&["generate", "-"]).stdin(File::open(path).unwrap())), @"
    exit 1
    -- stdout
    -- stderr
    error: standard input has more than 16777216 bytes, the most that a prompt may have
    hint: shorten the prompt; `--prompt-file` takes many of them
    ");
}

#[test]
fn models_are_not_named_by_address() {
    assert_snapshot!(failed(&["generate", "--model", "https://huggingface.co/org/name", "hi"]), @"error: `https://huggingface.co/org/name` is an address, and models are named by path or hub id; download it to the Hugging Face cache and give org/name");
}

#[test]
fn goldens_need_a_checkout() {
    let folder = tempfile::tempdir().unwrap();
    assert_snapshot!(outcome(mlx_bun(&["goldens", "list"]).current_dir(&folder)), @"
    exit 1
    -- stdout
    -- stderr
    error: there are no goldens here: neither in this folder nor above it
    hint: run this inside a checkout of mlx-bun, or name one with --root
    ");
    let error = refused(&["goldens", "list", "--root", "/nonexistent"]);
    assert_eq!(error, "error: `/nonexistent` is no checkout of mlx-bun: it has no goldens");
}

#[test]
fn flags_that_exclude_each_other() {
    assert_snapshot!(run(&["generate", "--kv-quant", "8", "--kv-bits", "4", "hi"]), @"
    exit 2
    -- stdout
    -- stderr
    error: `--kv-quant 8` contradicts `--kv-bits 4`
    hint: give one of the two
    ");
    assert_snapshot!(run(&["generate", "--max-kv-size", "512", "--kv-bits", "4", "hi"]), @"
    exit 2
    -- stdout
    -- stderr
    error: `--max-kv-size` cannot be combined with a packed cache
    hint: a cache that forgets cannot be packed yet: drop `--max-kv-size`, or `--kv-bits`/`--kv-quant`
    ");
    assert_snapshot!(run(&["generate", "--prompt", "a", "--prompt-file", "b"]), @"
    exit 2
    -- stdout
    -- stderr
    error: the argument '--prompt <TEXT>' cannot be used with '--prompt-file <FILE>'

    Usage: mlx-bun generate --prompt <TEXT> [PROMPT]...

    For more information, try '--help'.
    ");
    assert_snapshot!(run(&["generate", "--logprobs", "hi"]), @"
    exit 2
    -- stdout
    -- stderr
    error: `--logprobs` needs `--json`: plain text has no place for numbers
    ");
    assert_snapshot!(run(&["generate", "--trust-remote-code", "hi"]), @"
    exit 2
    -- stdout
    -- stderr
    error: `--trust-remote-code` is refused: mlx-bun never runs code that a model ships
    hint: leave the flag out; the supported families are built in
    ");
}

#[test]
fn prompts_that_are_none() {
    assert_snapshot!(run(&["generate"]), @"
    exit 2
    -- stdout
    -- stderr
    error: no prompt
    hint: give one in quotes, `-` to read standard input, or `--prompt-file` for many
    ");
    assert_snapshot!(run(&["generate", ""]), @"
    exit 2
    -- stdout
    -- stderr
    error: the prompt is empty
    hint: give at least one word to answer
    ");
    assert_snapshot!(run(&["generate", "What", "is", "this"]), @"
    exit 2
    -- stdout
    -- stderr
    error: 3 arguments where a prompt was expected
    hint: put the prompt in quotes
    ");
    assert_snapshot!(run(&["generate", "--model", "m", "other", "hi"]), @"
    exit 2
    -- stdout
    -- stderr
    error: two models: `--model` and the argument `other`
    hint: put a prompt in quotes, or drop one of the two
    ");
    assert_snapshot!(run(&["generate", "-"]), @"
    exit 2
    -- stdout
    -- stderr
    error: the prompt is empty: nothing came on standard input
    ");
    assert_snapshot!(run(&["generate", "--stop", "", "hi"]), @"
    exit 2
    -- stdout
    -- stderr
    error: `--stop` is empty
    ");
    assert_snapshot!(run(&["cache-prompt", "--prompt-cache-file", "f", "--prompt", ""]), @"
    exit 2
    -- stdout
    -- stderr
    error: the prompt is empty
    hint: give at least one word to answer
    ");
    assert_snapshot!(run(&["cache-prompt", "--prompt", "x"]), @"
    exit 2
    -- stdout
    -- stderr
    error: the following required arguments were not provided:
      --prompt-cache-file <FILE>

    Usage: mlx-bun cache-prompt --prompt-cache-file <FILE> --prompt <TEXT>

    For more information, try '--help'.
    ");
}

#[test]
fn a_model_where_the_prompt_should_be() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("m.gguf"), "").unwrap();
    assert_snapshot!(outcome(mlx_bun(&["generate", "m.gguf"]).current_dir(&folder)), @r#"
    exit 2
    -- stdout
    -- stderr
    error: no prompt: `m.gguf` is a model
    hint: mlx-bun generate m.gguf "your prompt"
    "#);
}

#[test]
fn standard_input_that_is_not_text() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("latin1");
    fs::write(&path, b"caf\xe9").unwrap();
    assert_snapshot!(outcome(mlx_bun(&["generate", "-"]).stdin(File::open(path).unwrap())), @"
    exit 1
    -- stdout
    -- stderr
    error: standard input is not UTF-8 text (byte 3)
    ");
}

#[test]
fn prompt_files_are_checked_before_anything_is_done() {
    let folder = tempfile::tempdir().unwrap();
    let mut said = Vec::new();
    for content in [
        "{\"prompt\": \"a\"}\nnot json\n{}\n",
        "{\"prompt\": \"a\", \"temperature\": 9}\n",
        "{\"prompt\": \"a\", \"tempreature\": 1}\n",
        "{}\n",
        "",
    ] {
        fs::write(folder.path().join("p.jsonl"), content).unwrap();
        let output =
            mlx_bun(&["generate", "--prompt-file", "p.jsonl"]).current_dir(&folder).output().unwrap();
        assert_eq!(output.status.code(), Some(2));
        said.push(String::from_utf8(output.stderr).unwrap());
    }
    assert_snapshot!(said.concat(), @"
    error: p.jsonl:2: not valid JSON at column 2
    error: p.jsonl:3: neither `prompt` nor `messages`
    error: p.jsonl:1: `temperature` must be in [0, 5]
    error: p.jsonl:1: there is no field `tempreature`; did you mean `temperature`?
    error: p.jsonl:1: neither `prompt` nor `messages`
    error: p.jsonl:1: no prompts
    ");
    assert!(
        failed(&["generate", "--prompt-file", "/nonexistent/x"])
            .starts_with("error: cannot read `/nonexistent/x`")
    );
}

#[test]
fn models_that_are_none() {
    let error = failed(&["generate", "--model", "/nonexistent/model", "hi"]);
    assert_snapshot!(error, @"error: there is no model at /nonexistent/model");
    let error = failed(&["generate", "hi"]);
    assert!(error.contains("no model is named"), "{error}");
    assert!(
        failed(&["generate", "--chat-template", "/nonexistent/t", "hi"])
            .contains("cannot read the chat template")
    );
}

#[test]
fn a_cache_file_that_cannot_be_written_is_known_before_the_work() {
    let arguments = ["cache-prompt", "--prompt", "x", "--prompt-cache-file", "/nonexistent/folder/f"];
    assert_snapshot!(failed(&arguments), @"error: cannot write `/nonexistent/folder/f`: there is no folder `/nonexistent/folder`");
}

#[test]
fn warnings_about_flags_without_effect() {
    let said = failed(&["generate", "--top-p", "0.5", "--raw", "--thinking", "true", "hi"]);
    let warnings: Vec<_> = said.lines().filter(|line| line.starts_with("warning: ")).collect();
    assert_snapshot!(warnings.join("\n"), @"
    warning: `--thinking` does nothing with `--raw`
    warning: `--top-p` does nothing at temperature 0; set `--temp`
    ");
    let silent = failed(&["generate", "-qq", "--top-p", "0.5", "hi"]);
    assert!(!silent.contains("warning: "), "{silent}");
}
