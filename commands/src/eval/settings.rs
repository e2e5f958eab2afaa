//! What the flags of `eval` mean.

use std::path::PathBuf;

use mlx_bun::checkpoint::environment::Environment;
use mlx_bun_evals::data::{DataError, EvalData, RowFile};
use mlx_bun_evals::subsample::subsample;
use mlx_bun_evals::{bfcl, gsm8k, hashhop, humaneval, ifeval, kl, mmlu, prompt};
use serde_json::{Map, Value, json};
use sha2::{Digest as _, Sha256};

use super::{EvalArgs, TaskArg, identity};
use crate::args::Warnings;
use crate::args::kv_cache::KvCache;
use crate::args::numerics::Numerics;
use crate::error::Complaint;
use crate::input_file;
use crate::recorder::levers;

/// Bytes of a file of rows at most, which is also what reading its rows allows.
const MOST_ROWS: u64 = 1 << 30;

/// Questions of gsm8k in a smoke test.
const SMOKE_QUESTIONS: usize = 50;

/// A task that runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Mmlu,
    Gsm8k,
    HumanEval,
    IfEval,
    Bfcl,
    HashHop,
    Kl,
    MultipleChoice,
}

impl Kind {
    const ALL: [Self; 7] =
        [Self::Mmlu, Self::Gsm8k, Self::IfEval, Self::Bfcl, Self::HumanEval, Self::HashHop, Self::Kl];

    /// Its name on the command line and in files.
    pub fn name(self) -> &'static str {
        match self {
            Self::Mmlu => "mmlu",
            Self::Gsm8k => "gsm8k",
            Self::HumanEval => "humaneval",
            Self::IfEval => "ifeval",
            Self::Bfcl => "bfcl",
            Self::HashHop => "hashhop",
            Self::Kl => "kl",
            Self::MultipleChoice => "multiple-choice",
        }
    }

    /// Whether its score is a part of the capability score.
    pub fn counts(self) -> bool {
        !matches!(self, Self::Kl | Self::MultipleChoice)
    }

    /// Most tokens of a reply; `None` where none is asked for.
    fn max_tokens(self) -> Option<usize> {
        match self {
            Self::Gsm8k => Some(gsm8k::MAX_TOKENS),
            Self::HumanEval => Some(humaneval::MAX_TOKENS),
            Self::IfEval => Some(ifeval::MAX_TOKENS),
            Self::Bfcl => Some(bfcl::MAX_TOKENS),
            Self::HashHop => Some(hashhop::MAX_TOKENS),
            Self::Mmlu | Self::Kl | Self::MultipleChoice => None,
        }
    }

    /// Rows of a run of a set that is not frozen.
    fn default_rows(self) -> usize {
        match self {
            Self::Mmlu => mmlu::DEFAULT_ROWS,
            Self::Gsm8k => gsm8k::DEFAULT_ROWS,
            Self::Bfcl => bfcl::DEFAULT_ROWS,
            Self::Kl => kl::DEFAULT_PROMPTS,
            Self::HumanEval | Self::IfEval | Self::HashHop | Self::MultipleChoice => usize::MAX,
        }
    }

    fn default_shots(self) -> usize {
        match self {
            Self::Mmlu => mmlu::DEFAULT_SHOTS,
            Self::Gsm8k => gsm8k::DEFAULT_SHOTS,
            _ => 0,
        }
    }

    /// The file with its rows; `None` for a task that makes its own.
    fn file(self, args: &EvalArgs, data: &EvalData) -> Result<Option<RowFile>, DataError> {
        let given = || args.data_path.clone().map(|path| RowFile { path, frozen: false });
        match self {
            Self::Mmlu => data.find("mmlu", mmlu::FILES).map(Some),
            Self::Gsm8k => data.find("gsm8k", gsm8k::FILES).map(Some),
            Self::HumanEval => data.find("humaneval", humaneval::FILES).map(Some),
            Self::IfEval => data.find("ifeval", ifeval::FILES).map(Some),
            Self::Bfcl => data.find("bfcl", bfcl::FILES).map(Some),
            // Made here, unless there is a set of somebody else's.
            Self::HashHop => Ok(data.find("hashhop", &["hashhop"]).ok()),
            Self::Kl => Ok(given().or_else(|| data.find("kl", kl::FILES).ok())),
            Self::MultipleChoice => Ok(given()),
        }
    }
}

/// A task with its questions' file and numbers.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The task.
    pub kind: Kind,
    /// Its rows; `None` for those it makes.
    pub rows: Option<RowFile>,
    /// Questions to draw.
    pub count: usize,
    /// Solved examples before each.
    pub shots: usize,
    /// Most tokens of a reply.
    pub max_tokens: usize,
    seed: u32,
}

impl Plan {
    /// The rows that are taken of `total`.
    pub fn choose(&self, total: usize) -> Vec<usize> {
        subsample(total, self.count, self.seed)
    }
}

/// What the flags mean.
pub struct Settings {
    /// The tasks, each once, in the order they were named.
    pub plans: Vec<Plan>,
    /// The model's name.
    pub model: Option<String>,
    /// Whether models think before they answer.
    pub thinking: bool,
    /// Whether scored sequences begin with the tokenizer's first token.
    pub bos: Option<bool>,
    /// The key-value cache.
    pub kv_cache: KvCache,
    /// Whose arithmetic.
    pub numerics: Numerics,
    /// The adapter's folder and fingerprint.
    pub adapter: Option<(PathBuf, String)>,
    /// What was asked for.
    limit: Option<usize>,
    seed: u32,
}

impl Settings {
    /// What rows of the database have of these.
    pub fn flags(&self) -> Map<String, Value> {
        let packed = self.kv_cache.quantization;
        Map::from_iter([
            ("kv_bits".to_owned(), json!(packed.map(|packed| packed.bits))),
            ("adapter".to_owned(), json!(self.adapter.as_ref().map(|(path, _)| path))),
            ("thinking".to_owned(), json!(self.thinking)),
        ])
    }

    /// Everything that decides a task's questions and replies: a run with other settings is another run.
    ///
    /// # Errors
    /// The file of rows cannot be read.
    pub fn of_task(&self, plan: &Plan) -> Result<Map<String, Value>, Complaint> {
        let data = match &plan.rows {
            Some(rows) => {
                let bytes = input_file::read(&rows.path, MOST_ROWS)?;
                let digest: String = Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect();
                json!({"file": rows.path.file_name().map(|name| name.to_string_lossy()), "sha256": digest})
            }
            None => Value::Null,
        };
        let packed = self.kv_cache.quantization;
        let mut settings = Map::from_iter([
            ("data".to_owned(), data),
            ("limit".to_owned(), json!(self.limit)),
            ("seed".to_owned(), json!(self.seed)),
            ("num_shots".to_owned(), json!(plan.shots)),
            ("max_tokens".to_owned(), json!(plan.max_tokens)),
            ("thinking".to_owned(), json!(self.thinking)),
            ("add_bos".to_owned(), json!(self.bos)),
            ("max_kv_size".to_owned(), json!(self.kv_cache.max_size)),
            (
                "kv_quantization".to_owned(),
                json!(packed.map(|packed| json!({"bits": packed.bits, "group_size": packed.group_size, "start": packed.start}))),
            ),
            ("adapter".to_owned(), json!(self.adapter.as_ref().map(|(_, fingerprint)| fingerprint))),
        ]);
        settings.extend(levers(&self.numerics));
        Ok(settings)
    }
}

/// Resolves the flags, and finds the rows before anything is loaded.
///
/// # Errors
/// Flags that contradict each other, and tasks without rows.
pub fn resolve(
    args: &EvalArgs,
    environment: &Environment,
    data: &EvalData,
    warnings: &mut Warnings,
) -> anyhow::Result<Settings> {
    let limit = args.limit.map(|limit| limit as usize);
    let mut plans: Vec<Plan> = Vec::new();
    let mut add = |kind: Kind, rows: Option<RowFile>, at_most: Option<usize>| {
        if plans.iter().any(|plan| plan.kind == kind) {
            return;
        }
        let frozen = rows.as_ref().is_some_and(|rows| rows.frozen);
        let usual = if frozen { usize::MAX } else { kind.default_rows() };
        plans.push(Plan {
            kind,
            rows,
            count: limit.or(at_most).unwrap_or(usual),
            shots: args.num_shots.map_or(kind.default_shots(), |shots| shots as usize),
            max_tokens: args.max_tokens.or(kind.max_tokens()).unwrap_or(0),
            seed: args.seed,
        });
    };
    for task in args.tasks.iter().chain(&args.more_tasks) {
        let kind = match task {
            TaskArg::Mmlu => Kind::Mmlu,
            TaskArg::Gsm8k => Kind::Gsm8k,
            TaskArg::HumanEval => Kind::HumanEval,
            TaskArg::IfEval => Kind::IfEval,
            TaskArg::Bfcl => Kind::Bfcl,
            TaskArg::HashHop => Kind::HashHop,
            TaskArg::Kl => Kind::Kl,
            TaskArg::MultipleChoice => Kind::MultipleChoice,
            TaskArg::Smoketest => {
                add(Kind::Kl, rows_of(Kind::Kl, args, data)?, None);
                add(Kind::Gsm8k, rows_of(Kind::Gsm8k, args, data)?, Some(SMOKE_QUESTIONS));
                continue;
            }
            TaskArg::All => {
                for kind in Kind::ALL {
                    match kind.file(args, data) {
                        Ok(rows) => add(kind, rows, None),
                        Err(error @ DataError::Missing { .. }) => {
                            warnings.push(format!("{error}; it is left out"))
                        }
                        Err(error) => return Err(error.into()),
                    }
                }
                continue;
            }
        };
        add(kind, rows_of(kind, args, data)?, None);
    }
    let named = |kind: Kind| plans.iter().any(|plan| plan.kind == kind);
    if named(Kind::MultipleChoice) && args.data_path.is_none() {
        return Err(Complaint::usage("multiple-choice needs rows")
            .hint("give a .jsonl file with `--data-path`; `docs/eval.md` describes its rows")
            .into());
    }
    if args.data_path.is_some() && !named(Kind::MultipleChoice) && !named(Kind::Kl) {
        warnings.push("`--data-path` does nothing without multiple-choice or kl".to_owned());
    }
    if args.baseline.is_some() && !named(Kind::Kl) {
        warnings.push("`--baseline` does nothing without kl".to_owned());
    }
    let kv_cache = args.kv_cache.resolve(warnings)?;
    let changes_cache = kv_cache.quantization.is_some() || kv_cache.max_size.is_some();
    if changes_cache && (named(Kind::Mmlu) || named(Kind::MultipleChoice)) {
        warnings.push("the key-value cache does not matter to mmlu and multiple-choice, which read everything in one step".to_owned());
    }
    if kv_cache.quantization.is_some() && args.baseline.is_some() && named(Kind::Kl) {
        return Err(Complaint::usage("kl measures either from `--baseline` or what a packed cache does")
            .hint("drop `--baseline` or `--kv-quant`")
            .into());
    }
    let adapter = match &args.adapter.adapter_path {
        Some(path) => Some((path.clone(), identity::fingerprint(path)?)),
        None => None,
    };
    let thinking = match args.thinking {
        Some(thinking) => thinking.is_true(),
        None => prompt::thinking_wanted(environment),
    };
    Ok(Settings {
        plans,
        model: args.model.resolve(None, true)?,
        thinking,
        bos: args.add_bos.map(|bos| bos.is_true()),
        kv_cache,
        numerics: args.numerics.resolve(warnings),
        adapter,
        limit,
        seed: args.seed,
    })
}

/// The rows of a task that was named.
fn rows_of(kind: Kind, args: &EvalArgs, data: &EvalData) -> Result<Option<RowFile>, Complaint> {
    kind.file(args, data).map_err(|error| {
        let hint = match kind {
            Kind::HumanEval | Kind::Bfcl => format!("`mlx-bun eval fetch-data {}` gets it", kind.name()),
            _ => format!("`mlx-bun eval import {} FILE` takes it from a file, or name its folder with MLX_BUN_EVAL_DATA", kind.name()),
        };
        Complaint::failure(error.to_string()).hint(hint)
    })
}
