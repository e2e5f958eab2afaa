//! The program from outside: help, versions, pages, output and signals. No model is needed.

#![allow(clippy::unwrap_used)] // clippy counts helpers outside of test functions as production code

mod support;

use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};

use insta::assert_snapshot;
use support::{mlx_bun, refused, run};

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
      serve         Answer requests over HTTP, as OpenAI and Anthropic do [alias: server]
      get           Download a model from the hub, or go on with a download
      ls            List the models on this machine [alias: list]
      scan          Look for models in the Hugging Face cache and in folders of yours
      fit           Tell whether a model fits into memory, and how fast it would be
      gc            Delete old snapshots from the Hugging Face cache
      upload        Send a folder to the hub as one commit
      convert       Quantize, dequantize or cast a model
      fuse          Put an adapter into the weights of its model
      eval          Score a model on tasks
      perplexity    Measure how well a model predicts text
      train         Fine-tune a model [alias: lora]
      train-watch   Follow a training run on the terminal
      benchmark     Measure how fast a model reads prompts and generates [alias: bench]
      bench-matrix  Measure features, modes, load and conversions, cell by cell
      ab            Compare two settings, programs or commands by runs in pairs
      evals         List, compare and plot what was measured
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
      143 ended by SIGTERM or SIGHUP
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
          --temp <T>   Temperature; 0 always takes the likeliest token [range: 0 to 5] [default: 0]
                       [alias: --temperature]
          --top-p <P>  Keep the likeliest tokens that make up this share of the probability; 0 and 1
                       keep all [range: 0 to 1] [default: 1]
          --top-k <K>  Keep this many of the likeliest tokens; 0 keeps all [range: 0 to 1000000]
                       [default: 0]
          --min-p <P>  Drop tokens less likely than this share of the likeliest one's probability
                       [range: 0 to 1] [default: 0]
          --seed <N>   Seed of the random draws; the same seed gives the same text [range: 0 to
                       18446744073709551615]

    Penalties:
          --repetition-penalty <X>  Make tokens already seen less likely by this factor; 1 changes
                                    nothing [range: 0, or 0.01 to 100]

    Stopping:
          --stop <TEXT>     Stop before this text; can be given several times
      -m, --max-tokens <N>  Most tokens of a reply; -1 for no limit [default: 100, in chat 256] [range:
                            1 to 10000000]

    Output:
          --logprobs  With --json: the log-probability of each token
          --json      Print one JSON object: text, tokens, finish_reason, stats

    Structure:
          --json-object           Reply with a JSON object
          --json-schema <SCHEMA>  Reply with JSON that a JSON schema describes: the schema itself, a
                                  file, or `-` for standard input

    Key-value cache:
          --kv-quant <off|4|8>        Pack the cache to 4 or 8 bits from the first token on, or not
                                      [possible values: off, 4, 8]
          --prompt-cache-file <FILE>  Continue a prompt cache that `cache-prompt` saved; the model is
                                      the one it was made with

    Numerics:
          --l1  Compute bit for bit as mlx-lm does: only MLX's own kernels (slower on a Linux CPU)

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
    for verb in [
        "generate",
        "chat",
        "cache-prompt",
        "get",
        "ls",
        "scan",
        "fit",
        "gc",
        "upload",
        "convert",
        "fuse",
        "eval",
        "perplexity",
        "train",
        "train-watch",
        "benchmark",
        "evals",
        "bench-matrix",
        "ab",
        "completions",
        "man",
    ] {
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
    assert_eq!(lines[2], "backend cpu");
    // What is loaded counts, not what the environment says.
    let told = mlx_bun(&["--version"]).env("MLX_BUN_BACKEND", "cuda13").output().unwrap();
    assert_eq!(told.stdout, long.as_bytes());
}

#[test]
fn help_tells_every_range() {
    for verb in ["generate", "chat"] {
        let help = String::from_utf8(mlx_bun(&[verb, "--help"]).output().unwrap().stdout).unwrap();
        let words = help.split_whitespace().collect::<Vec<_>>().join(" ");
        for (flag, range) in [
            ("--temp <T>", "[range: 0 to 5]"),
            ("--top-k <K>", "[range: 0 to 1000000]"),
            ("--seed <N>", "[range: 0 to 18446744073709551615]"),
            ("--max-tokens <N>", "[range: 1 to 10000000]"),
            ("--presence-penalty <X>", "[range: -100 to 100]"),
            ("--logit-bias <ID=VALUE>", "from -1000 to 1000"),
            ("--threads <N>", "[range: 1 to 64]"),
            ("--max-kv-size <N>", "[range: 5 to 1000000000]"),
        ] {
            let after = &words[words.find(flag).unwrap_or_else(|| panic!("{verb} {flag}"))..];
            let end = after[2..].find(" --").map_or(after.len(), |end| end + 2);
            assert!(after[..end].contains(range), "{verb} {flag}: {}", &after[..end]);
        }
    }
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
    assert_snapshot!(names.join(" "), @"mlx-bun-ab-levers.1 mlx-bun-ab.1 mlx-bun-bench-matrix-convert.1 mlx-bun-bench-matrix-features.1 mlx-bun-bench-matrix-load.1 mlx-bun-bench-matrix-modes.1 mlx-bun-bench-matrix.1 mlx-bun-benchmark.1 mlx-bun-cache-prompt.1 mlx-bun-chat.1 mlx-bun-completions.1 mlx-bun-convert.1 mlx-bun-eval-fetch-data.1 mlx-bun-eval-import.1 mlx-bun-eval.1 mlx-bun-evals-compare.1 mlx-bun-evals-plot.1 mlx-bun-evals-report.1 mlx-bun-evals.1 mlx-bun-fit.1 mlx-bun-fuse.1 mlx-bun-gc.1 mlx-bun-generate.1 mlx-bun-get.1 mlx-bun-goldens-check.1 mlx-bun-goldens-list.1 mlx-bun-goldens-regen.1 mlx-bun-goldens.1 mlx-bun-ls.1 mlx-bun-man.1 mlx-bun-perplexity.1 mlx-bun-scan.1 mlx-bun-serve.1 mlx-bun-train-plot.1 mlx-bun-train-watch.1 mlx-bun-train.1 mlx-bun-upload.1 mlx-bun.1");
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

#[test]
fn an_empty_variable_counts_as_unset() {
    for name in
        ["MLX_BUN_THREADS", "MLX_BUN_CPU_KERNELS", "MLX_BUN_CPU_PRECISION", "MLX_BUN_CALIBRATION_JSONL"]
    {
        for verb in ["generate", "convert"] {
            let asked = |value: &str| {
                let mut command = mlx_bun(&[verb, "--model", "/nowhere/at/all", "--mlx-path", "x", "hi"]);
                String::from_utf8(command.env(name, value).output().unwrap().stderr).unwrap()
            };
            assert!(!asked("").contains("invalid value"), "{name}: {}", asked(""));
        }
    }
}
