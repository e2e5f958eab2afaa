//! The program from outside: what it says, where, and how it ends. No model is needed.

#![allow(clippy::unwrap_used)] // clippy counts helpers outside of test functions as production code

mod support;

use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};

use insta::assert_snapshot;
use support::mlx_bun;

/// What a command printed and how it ended.
fn outcome(command: &mut Command) -> String {
    let output = command.output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    format!(
        "exit {}\n-- stdout\n{}-- stderr\n{}",
        output.status.code().map_or("by signal".to_owned(), |code| code.to_string()),
        text(&output.stdout),
        text(&output.stderr)
    )
}

fn run(arguments: &[&str]) -> String {
    outcome(&mut mlx_bun(arguments))
}

/// The first line of standard error of a command that must be refused as wrong usage.
fn refused(arguments: &[&str]) -> String {
    let output = mlx_bun(arguments).output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{arguments:?}: {stderr}");
    assert!(output.stdout.is_empty(), "{arguments:?}");
    stderr.lines().next().unwrap_or_default().to_owned()
}

/// As [`refused`], for commands that make sense but cannot be done.
fn failed(arguments: &[&str]) -> String {
    let output = mlx_bun(arguments).output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{arguments:?}: {stderr}");
    stderr.trim_end().to_owned()
}

#[test]
fn help_lists_the_verbs() {
    assert_snapshot!(run(&["-h"]), @"
    exit 0
    -- stdout
    Run language models on MLX

    Usage: mlx-bun [OPTIONS] <COMMAND>

    Commands:
      generate      Answer a prompt and exit [alias: gen]
      chat          Talk with a model
      cache-prompt  Compute a long prompt once and save it for `generate --prompt-cache-file`
      convert       Quantize, dequantize or cast a model
      fuse          Put an adapter into the weights of its model
      perplexity    Measure how well a model predicts text
      goldens       Compare the engine with mlx-lm, bit for bit
      completions   Print a completion script for a shell
      man           Print a manual page, or write all of them
      help          Print this message or the help of the given subcommand(s)

    Options:
      -h, --help     Print help (see more with '--help')
      -V, --version  Print version

    Global options:
      -q, --quiet...      Say less: once for no statistics and no progress, twice for errors only
      -v                  Say more: which files are used, how long things take
          --no-progress   No progress bars
          --color <WHEN>  When to use colours [default: auto]

    `mlx-bun help VERB` or `mlx-bun VERB --help` tells more about a verb.
    -- stderr
    ");
}

#[test]
fn long_help_has_the_exit_codes() {
    let output = String::from_utf8(mlx_bun(&["--help"]).output().unwrap().stdout).unwrap();
    assert_snapshot!(output[output.find("Exit codes").unwrap()..], @"
    Exit codes:
      0   success, also when the reader of standard output went away (`mlx-bun ... | head`)
      1   the work could not be done, or a check failed
      2   wrong usage: an unknown flag or verb, a value out of range, flags that exclude each other
      130 interrupted by Ctrl-C (SIGINT)
      143 ended by SIGTERM
    ");
}

#[test]
fn no_verb_is_wrong_usage() {
    let output = mlx_bun(&[]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(output.stdout.is_empty());
    assert!(String::from_utf8(output.stderr).unwrap().contains("Usage: mlx-bun"));
}

#[test]
fn short_help_of_generate_is_for_newcomers() {
    assert_snapshot!(run(&["generate", "-h"]), @r#"
    exit 0
    -- stdout
    Answer a prompt and exit

    Usage: mlx-bun generate [OPTIONS] [PROMPT]...

    Arguments:
      [PROMPT]...  The prompt; `-` reads standard input

    Options:
      -h, --help  Print help (see more with '--help')

    Prompt:
      -p, --prompt <TEXT>            The prompt, as a flag; `-` reads standard input
          --prompt-file <FILE>       Many prompts, one JSON object a line, answered in order as JSON
                                     lines; `-` reads standard input
          --raw                      Feed the prompt as it is, without the chat template [alias:
                                     --ignore-chat-template]
          --prefill-response <TEXT>  Begin the reply with this text
      -e, --escape                   Turn \n, \t, \r, \\, \', \" and \xHH in texts on the command line
                                     into the characters they stand for

    Model:
      -M, --model <MODEL>  The model: a folder, a .gguf file, or the id of a model in the Hugging Face
                           cache

    Chat template:
          --system-prompt <TEXT>   What the model is told before the conversation
          --thinking <true|false>  Let a reasoning model think first, or not; the template's variable
                                   `enable_thinking` [possible values: true, false]

    Sampling:
          --temp <T>   Temperature from 0 to 5; 0 always takes the likeliest token [default: 0] [alias:
                       --temperature]
          --top-p <P>  Keep the likeliest tokens that make up this share of the probability; 0 and 1
                       keep all [default: 1]
          --top-k <K>  Keep this many of the likeliest tokens; 0 keeps all [default: 0]
          --min-p <P>  Drop tokens less likely than this share of the likeliest one's probability
                       [default: 0]
          --seed <N>   Seed of the random draws; the same seed gives the same text

    Penalties:
          --repetition-penalty <X>  Make tokens already seen less likely by this factor; 1 changes
                                    nothing

    Stopping:
          --stop <TEXT>     Stop before this text; can be given several times
      -m, --max-tokens <N>  Most tokens to generate; -1 for no limit [default: 100]

    Key-value cache:
          --kv-quant <off|4|8>        Pack the cache to 4 or 8 bits from the first token on, or not
                                      [possible values: off, 4, 8]
          --prompt-cache-file <FILE>  Continue a prompt cache that `cache-prompt` saved; the model is
                                      the one it was made with

    Numerics:
          --l1  Compute bit for bit as mlx-lm does: only MLX's own kernels (slower on a Linux CPU)

    Output:
          --json      Print one JSON object: text, tokens, finish_reason, stats
          --logprobs  With --json: the log-probability of each token

    Global options:
      -q, --quiet...      Say less: once for no statistics and no progress, twice for errors only
      -v                  Say more: which files are used, how long things take
          --no-progress   No progress bars
          --color <WHEN>  When to use colours [default: auto]

    --help lists every flag, with examples.
    -- stderr
    "#);
}

#[test]
fn long_help_of_every_verb_has_examples() {
    for verb in ["generate", "chat", "cache-prompt", "convert", "fuse", "perplexity", "completions", "man"] {
        let output = String::from_utf8(mlx_bun(&[verb, "--help"]).output().unwrap().stdout).unwrap();
        assert!(output.contains("Example"), "{verb}");
        assert!(output.contains(&format!("mlx-bun {verb}")), "{verb}");
    }
}

#[test]
fn versions() {
    let version = env!("CARGO_PKG_VERSION");
    let text = |flag| String::from_utf8(mlx_bun(&[flag]).output().unwrap().stdout).unwrap();
    assert_eq!(text("-V"), format!("mlx-bun {version}\n"));
    let long = text("--version");
    let lines: Vec<_> = long.lines().collect();
    assert_eq!(lines[0], format!("mlx-bun {version}"));
    assert!(lines[1].starts_with("MLX 0."), "{long}");
    assert!(lines[2].starts_with("backend "), "{long}");
}

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
    ];
    // With `=`, so that a negative number is a value.
    let lines: Vec<_> =
        cases.iter().map(|[flag, value]| refused(&["generate", "hi", &format!("{flag}={value}")])).collect();
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
    error: invalid value '-1' for '--repetition-penalty <X>': must be in [0, 100]
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
    error: invalid value '{' for '--chat-template-config <JSON>': is not JSON: EOF while parsing an object at line 1 column 1
    "#);
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
    hint: put the prompt in quotes, or drop one of the two
    ");
    assert_snapshot!(run(&["generate", "-"]), @"
    exit 1
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
        "{\"prompt\": \"a\"}\nnot json\n",
        "{\"prompt\": \"a\", \"temperature\": 9}\n",
        "{\"prompt\": \"a\", \"tempreature\": 1}\n",
        "{}\n",
        "",
    ] {
        fs::write(folder.path().join("p.jsonl"), content).unwrap();
        let output =
            mlx_bun(&["generate", "--prompt-file", "p.jsonl"]).current_dir(&folder).output().unwrap();
        assert_eq!(output.status.code(), Some(1));
        said.push(String::from_utf8(output.stderr).unwrap());
    }
    assert_snapshot!(said.concat(), @"
    error: p.jsonl, line 2: expected ident (column 2)
    error: p.jsonl, line 1: `temperature` must be in [0, 5]
    error: p.jsonl, line 1: unknown field `tempreature`, expected one of `id`, `prompt`, `messages`, `system_prompt`, `prefill_response`, `chat_template_args`, `chat_template_config`, `chat_template_kwargs`, `max_tokens`, `temp`, `temperature`, `top_p`, `top_k`, `min_p`, `xtc_probability`, `xtc_threshold`, `seed`, `stop`, `repetition_penalty`, `presence_penalty`, `frequency_penalty`, `logit_bias`, `logprobs`, `top_logprobs` (column 29)
    error: p.jsonl, line 1: neither `prompt` nor `messages`
    error: p.jsonl, line 1: no prompts
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

#[test]
fn a_closed_pipe_is_the_end_not_an_error() {
    for arguments in [&["man"][..], &["--help"], &["--version"], &["completions", "bash"]] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let output = mlx_bun(arguments).stdout(writer).output().unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!((output.status.code(), stderr.as_str()), (Some(0), ""), "{arguments:?}");
    }
}

#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_is_an_error() {
    for arguments in [&["man"][..], &["--help"], &["completions", "zsh"]] {
        let full = File::options().write(true).open("/dev/full").unwrap();
        let output = mlx_bun(arguments).stdout(full).output().unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{arguments:?}");
        assert!(stderr.starts_with("error: cannot write to standard output: No space left"), "{stderr}");
    }
}

#[test]
fn colour_follows_the_flag_and_the_environment() {
    let coloured = |arguments: &[&str], variable: Option<(&str, &str)>| {
        let output = mlx_bun(arguments).envs(variable).output().unwrap();
        output.stderr.contains(&0x1b)
    };
    // One error of clap's and one of ours.
    for wrong in [["generate", "--nonsense"], ["generate", "--color=auto"]] {
        let with_color = |color| [wrong[0], color, wrong[1]];
        assert!(!coloured(&wrong, None));
        assert!(coloured(&wrong, Some(("FORCE_COLOR", "1"))));
        assert!(coloured(&wrong, Some(("CLICOLOR_FORCE", "1"))));
        assert!(!coloured(&wrong, Some(("NO_COLOR", "1"))));
        if wrong[1] == "--nonsense" {
            assert!(coloured(&with_color("--color=always"), Some(("NO_COLOR", "1"))));
            assert!(!coloured(&with_color("--color=never"), Some(("FORCE_COLOR", "1"))));
        }
    }
}

#[test]
fn completions_know_the_flags() {
    for shell in ["bash", "zsh", "fish", "powershell", "elvish"] {
        let output = mlx_bun(&["completions", shell]).output().unwrap();
        let script = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.success() && script.contains("temperature"), "{shell}");
        assert!(script.contains("cache-prompt"), "{shell}");
    }
    assert_snapshot!(refused(&["completions", "tcsh"]), @"error: invalid value 'tcsh' for '<SHELL>'");
}

#[test]
fn manual_pages() {
    let folder = tempfile::tempdir().unwrap();
    let output = mlx_bun(&["man", "--dir", folder.path().to_str().unwrap()]).output().unwrap();
    assert!(output.status.success() && output.stdout.is_empty());
    let mut names: Vec<_> = fs::read_dir(&folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    assert_snapshot!(names.join(" "), @"mlx-bun-cache-prompt.1 mlx-bun-chat.1 mlx-bun-completions.1 mlx-bun-convert.1 mlx-bun-fuse.1 mlx-bun-generate.1 mlx-bun-goldens-check.1 mlx-bun-goldens-list.1 mlx-bun-goldens-regen.1 mlx-bun-goldens.1 mlx-bun-man.1 mlx-bun-perplexity.1 mlx-bun.1");
    let page = String::from_utf8(mlx_bun(&["man", "gen"]).output().unwrap().stdout).unwrap();
    for part in [".TH mlx-bun-generate 1", ".SH \"EXIT STATUS\"", ".SH ENVIRONMENT", "\\fB\\-\\-top\\-p\\fR"]
    {
        assert!(page.contains(part), "{part}");
    }
    assert_snapshot!(refused(&["man", "nonsense"]), @"error: no verb `nonsense`");
}

#[test]
fn the_reference_pages_are_as_the_code_says() {
    let folder = tempfile::tempdir().unwrap();
    let output = mlx_bun(&["docs", "--dir", folder.path().to_str().unwrap()]).output().unwrap();
    assert!(output.status.success());
    let committed = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/reference");
    let pages: Vec<_> = fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert!(!pages.is_empty());
    for page in pages {
        let fresh = fs::read_to_string(folder.path().join(&page)).unwrap();
        let stored = fs::read_to_string(committed.join(&page)).unwrap_or_default();
        assert!(fresh == stored, "docs/reference/{} is stale: run `mlx-bun docs`", page.display());
    }
    assert_eq!(fs::read_dir(&committed).unwrap().count(), fs::read_dir(&folder).unwrap().count());
}

/// Sends a signal to a `generate` that waits for its prompt; returns the exit code.
fn signalled(signal: &str) -> Option<i32> {
    let mut child =
        mlx_bun(&["generate", "-v", "-"]).stdin(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    assert_eq!(lines.next().unwrap().unwrap(), "Reading the prompt from standard input");
    let sent = Command::new("kill").args([signal, &child.id().to_string()]).status().unwrap();
    assert!(sent.success());
    // `wait` would close an input that is still its own, and the program would end for want of a prompt.
    let _open = child.stdin.take();
    child.wait().unwrap().code()
}

#[test]
fn signals_have_their_exit_codes() {
    assert_eq!(signalled("-INT"), Some(130));
    assert_eq!(signalled("-TERM"), Some(143));
}
