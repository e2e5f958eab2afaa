//! Every environment variable the program reads, with its documentation; the reference page comes from here.

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
/// Which vector instructions our CPU kernels use.
pub const MLX_BUN_CPU_ISA: &str = "MLX_BUN_CPU_ISA";
/// Which MLX build the launcher put in place.
pub const MLX_BUN_BACKEND: &str = "MLX_BUN_BACKEND";
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
                doc: "Where mlx-bun keeps models; default `$XDG_CACHE_HOME/mlx-bun`, else `~/.cache/mlx-bun`",
            },
            Variable { name: MLX_BUN_THREADS, doc: "`--threads` when the flag is absent" },
            Variable { name: MLX_BUN_CPU_KERNELS, doc: "`--cpu-kernels` when the flag is absent" },
            Variable { name: MLX_BUN_CPU_PRECISION, doc: "`--cpu-precision` when the flag is absent" },
            Variable {
                name: MLX_BUN_CPU_ISA,
                doc: "Vector instructions of our CPU kernels: `auto` (default), `plain`, `avx2`, `avx512`, `avx512-vnni` or `neon`",
            },
            Variable {
                name: MLX_BUN_BACKEND,
                doc: "Read by `scripts/mlx-bun`: `cpu` (default) or `cuda13`, the MLX build to run on (Linux)",
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
