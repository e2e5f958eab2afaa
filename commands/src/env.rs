//! Every environment variable the program reads, with its documentation; the reference page comes from here.

use mlx_bun::levers;
use mlx_bun_evals::{data, prompt, sandbox};

/// A variable and what it does.
pub struct Variable {
    /// Its name.
    pub name: &'static str,
    /// What setting it does.
    pub doc: &'static str,
}

/// A heading and the variables under it.
pub type Group = (&'static str, &'static [Variable]);

/// `--model` when the flag is absent.
pub const MLX_BUN_MODEL: &str = "MLX_BUN_MODEL";
/// `--no-progress`.
pub const MLX_BUN_NO_PROGRESS: &str = "MLX_BUN_NO_PROGRESS";
/// `--threads`.
pub const MLX_BUN_THREADS: &str = "MLX_BUN_THREADS";
/// `--cpu-kernels`.
pub const MLX_BUN_CPU_KERNELS: &str = "MLX_BUN_CPU_KERNELS";
/// `--cpu-precision`.
pub const MLX_BUN_CPU_PRECISION: &str = "MLX_BUN_CPU_PRECISION";
/// `--calibration-mix`.
pub const MLX_BUN_CALIBRATION_JSONL: &str = "MLX_BUN_CALIBRATION_JSONL";
/// The key that clients of `serve` must send.
pub const MLX_BUN_API_KEY: &str = "MLX_BUN_API_KEY";
/// Which vector instructions our CPU kernels use.
pub const MLX_BUN_CPU_ISA: &str = "MLX_BUN_CPU_ISA";
/// Slows down every decode step.
pub const MLX_BUN_DEBUG_STEP_DELAY_MS: &str = levers::STEP_DELAY;
/// The key that measured servers are sent, when `MLX_BUN_API_KEY` is not set.
pub const OPENAI_API_KEY: &str = "OPENAI_API_KEY";
/// Which MLX build the launcher put in place.
pub const MLX_BUN_BACKEND: &str = "MLX_BUN_BACKEND";
/// No progress bars for transfers.
pub const HF_HUB_DISABLE_PROGRESS_BARS: &str = "HF_HUB_DISABLE_PROGRESS_BARS";
/// Where state lives.
pub const XDG_STATE_HOME: &str = "XDG_STATE_HOME";
/// The user's home.
pub const HOME: &str = "HOME";
/// No colour.
pub const NO_COLOR: &str = "NO_COLOR";
/// Colour even without a terminal.
pub const FORCE_COLOR: &str = "FORCE_COLOR";
/// Colour even without a terminal.
pub const CLICOLOR_FORCE: &str = "CLICOLOR_FORCE";
/// The kind of terminal.
pub const TERM: &str = "TERM";

/// All of them.
pub const GROUPS: &[Group] = &[
    (
        "mlx-bun",
        &[
            Variable { name: MLX_BUN_MODEL, doc: "The model to use when `--model` is not given" },
            Variable {
                name: "MLX_BUN_CACHE",
                doc: "Where mlx-bun keeps models and measurements; default `$XDG_CACHE_HOME/mlx-bun`, else `~/.cache/mlx-bun`",
            },
            Variable { name: MLX_BUN_THREADS, doc: "`--threads` when the flag is absent" },
            Variable { name: MLX_BUN_CPU_KERNELS, doc: "`--cpu-kernels` when the flag is absent" },
            Variable { name: MLX_BUN_CPU_PRECISION, doc: "`--cpu-precision` when the flag is absent" },
            Variable {
                name: MLX_BUN_CALIBRATION_JSONL,
                doc: "`--calibration-mix` of `convert` when the flag is absent",
            },
            Variable {
                name: MLX_BUN_API_KEY,
                doc: "The key that clients of `serve` must send, without `--api-key` and `--api-key-file`",
            },
            Variable {
                name: MLX_BUN_CPU_ISA,
                doc: "Vector instructions of our CPU kernels: `auto` (default), `plain`, `avx2`, `avx512`, `avx512-vnni` or `neon`",
            },
            Variable {
                name: MLX_BUN_BACKEND,
                doc: "Read by `scripts/mlx-bun`: `cpu` (default) or `cuda13`, the MLX build to run on (Linux)",
            },
            Variable {
                name: MLX_BUN_DEBUG_STEP_DELAY_MS,
                doc: "Milliseconds to sleep at each decode step: for testing that `bench-matrix --max-regression` and `ab` notice a slower program",
            },
            Variable {
                name: OPENAI_API_KEY,
                doc: "The key that `bench-matrix --url` sends, when `MLX_BUN_API_KEY` is not set",
            },
            Variable {
                name: data::MLX_BUN_EVAL_DATA,
                doc: "Where `eval` finds rows; default `eval-data` in mlx-bun's cache",
            },
            Variable {
                name: prompt::MLX_BUN_EVAL_THINK,
                doc: "`1`: models that can think do so in `eval`, when `--thinking` is absent",
            },
            Variable {
                name: "MLX_BUN_<TASK>_FROZEN",
                doc: "`0`: `eval` draws from the whole set of a task though there is a frozen choice of its rows",
            },
            Variable {
                name: sandbox::MLX_BUN_ORACLE_PYTHON,
                doc: "The Python that runs the code of `eval humaneval`; default `python3`",
            },
            Variable {
                name: "PIP_INDEX_URL",
                doc: "The package index of `eval fetch-data`; default `https://pypi.org/simple`",
            },
            Variable {
                name: "PIP_CERT",
                doc: "Certificates for that index, before `REQUESTS_CA_BUNDLE` and `SSL_CERT_FILE`",
            },
            Variable {
                name: MLX_BUN_NO_PROGRESS,
                doc: "Set to `1` for no progress bars, as `--no-progress`",
            },
        ],
    ),
    (
        "Hugging Face",
        &[
            Variable {
                name: "HF_HUB_CACHE",
                doc: "The hub cache in which models are looked up; default `$HF_HOME/hub`",
            },
            Variable { name: "HUGGINGFACE_HUB_CACHE", doc: "Older name of `HF_HUB_CACHE`" },
            Variable {
                name: "HF_HOME",
                doc: "Hugging Face's folder; default `$XDG_CACHE_HOME/huggingface`, else `~/.cache/huggingface`",
            },
            Variable {
                name: "HF_TOKEN",
                doc: "The access token; default the file `$HF_TOKEN_PATH`. It is sent to the hub and to nobody else",
            },
            Variable { name: "HUGGING_FACE_HUB_TOKEN", doc: "Older name of `HF_TOKEN`" },
            Variable { name: "HF_TOKEN_PATH", doc: "The file with the token; default `$HF_HOME/token`" },
            Variable {
                name: "HF_HUB_DISABLE_IMPLICIT_TOKEN",
                doc: "`1`, `on`, `yes` or `true`: downloads send no token",
            },
            Variable { name: "HF_ENDPOINT", doc: "The hub's address; default `https://huggingface.co`" },
            Variable {
                name: "HF_HUB_OFFLINE",
                doc: "`1`, `on`, `yes` or `true`: the network is not used; `TRANSFORMERS_OFFLINE` likewise",
            },
            Variable { name: "TRANSFORMERS_OFFLINE", doc: "As `HF_HUB_OFFLINE`" },
            Variable {
                name: "HF_HUB_ETAG_TIMEOUT",
                doc: "Seconds to wait for the hub's answers; default 10",
            },
            Variable {
                name: "HF_HUB_DOWNLOAD_TIMEOUT",
                doc: "Seconds to wait for more of a file before the connection is made anew; default 10",
            },
            Variable {
                name: HF_HUB_DISABLE_PROGRESS_BARS,
                doc: "`1`, `on`, `yes` or `true`: no progress bars for downloads and uploads",
            },
            Variable {
                name: "SSL_CERT_FILE",
                doc: "Certificates to trust instead of the built-in ones; `REQUESTS_CA_BUNDLE` likewise",
            },
            Variable { name: "REQUESTS_CA_BUNDLE", doc: "As `SSL_CERT_FILE`" },
            Variable {
                name: "HTTPS_PROXY",
                doc: "The proxy to the hub; `ALL_PROXY`, `HTTP_PROXY` and `NO_PROXY` likewise",
            },
        ],
    ),
    (
        "Terminal and files",
        &[
            Variable { name: NO_COLOR, doc: "Any value but the empty one: no colours" },
            Variable {
                name: FORCE_COLOR,
                doc: "Any value but the empty one and `0`: colours even into a pipe",
            },
            Variable { name: CLICOLOR_FORCE, doc: "As `FORCE_COLOR`" },
            Variable { name: TERM, doc: "`dumb`: no colours and no progress bars" },
            Variable {
                name: XDG_STATE_HOME,
                doc: "`chat` keeps its history in `mlx-bun/` there; default `~/.local/state`",
            },
            Variable { name: "XDG_CACHE_HOME", doc: "Where caches go; default `~/.cache`" },
            Variable { name: HOME, doc: "The folder that `~` stands for" },
        ],
    ),
];

/// A variable that is set and not empty.
pub fn get(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_variable_is_listed_once() {
        let mut names: Vec<_> = GROUPS.iter().flat_map(|(_, list)| list.iter().map(|v| v.name)).collect();
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), count);
    }
}
