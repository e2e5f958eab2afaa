//! What can be typed after `mlx-bun train`. Everything is optional: what is not typed comes from the config file, and
//! else from the defaults, which are mlx_lm.lora's.

use std::path::PathBuf;

use crate::args::model::ModelArgs;
use crate::args::numerics::NumericsArgs;
use crate::args::size::parse_size;

const EXAMPLES: &str = "\
Example:
  mlx-bun train --model ./model --data ./chats --iters 200 --mask-prompt --adapter-path ./adapters
  mlx-bun train ./model --data pairs.jsonl --method orpo --lr 1e-5 --seq 1024 --seg 2
  mlx-bun train --config lora.yaml --dry-run
  mlx-bun train --resume ./adapters --iters 400";

/// Fine-tune a model
#[derive(Clone, Debug, clap::Args)]
#[command(args_override_self = true, after_help = crate::generate::MORE, after_long_help = EXAMPLES)]
pub struct TrainArgs {
    #[command(subcommand)]
    pub action: Option<TrainAction>,

    /// The model, as for --model
    #[arg(value_name = "MODEL")]
    pub model_argument: Option<String>,

    #[command(flatten)]
    pub model: ModelArgs,

    /// Train: the default, unless --test is given without it
    #[arg(long, help_heading = "What to do")]
    pub train: bool,

    /// Measure the loss of the test rows, after training if there is any
    #[arg(long, help_heading = "What to do")]
    pub test: bool,

    /// Say what would be done, measure one step of the longest rows, and stop
    #[arg(long, help_heading = "What to do")]
    pub dry_run: bool,

    /// Go on with the run that was saved in DIR (the adapter's folder, if DIR is left out), with its settings
    ///
    /// Other flags may change how far it goes and how fast, what it reports and what memory it takes; what would give the
    /// saved state another meaning is refused: other rows, another model, rank, scale or seed.
    #[arg(long, value_name = "DIR", help_heading = "What to do")]
    pub resume: Option<Option<PathBuf>>,

    /// A YAML file with settings, under mlx_lm.lora's names; flags win over it (--lr over its lr_schedule, too)
    #[arg(short = 'c', long, value_name = "FILE", help_heading = "What to do")]
    pub config: Option<PathBuf>,

    /// A folder with train, valid and test files (.jsonl or .parquet), or one such file to learn from
    #[arg(long, value_name = "PATH", help_heading = "Data")]
    pub data: Option<String>,

    /// Learn only what comes after the prompt
    #[arg(long, help_heading = "Data")]
    pub mask_prompt: bool,

    /// Tokens of a sequence, at most [default: 2048]
    #[arg(long, visible_alias = "seq", value_name = "N", help_heading = "Data")]
    pub max_seq_length: Option<u64>,

    /// Without validation rows, keep the last N rows to learn from for that
    #[arg(long, value_name = "N", help_heading = "Data")]
    pub valid_split: Option<u64>,

    /// Validation rows, at most
    #[arg(long, value_name = "N", help_heading = "Data")]
    pub val_size: Option<u64>,

    /// Put several rows into one sequence of --max-seq-length tokens (sft)
    #[arg(long, help_heading = "Data")]
    pub packing: bool,

    /// Put rows of about the same length into a batch
    #[arg(long, help_heading = "Data")]
    pub sort_by_length: bool,

    /// What to make small: sft imitates rows; the others prefer `chosen` to `rejected` [default: sft]
    #[arg(long, value_name = "METHOD", help_heading = "Method")]
    pub method: Option<String>,

    /// What is trained: lora, dora or full (weights of the layers) [default: lora]
    #[arg(long, value_name = "TYPE", help_heading = "Method")]
    pub fine_tune_type: Option<String>,

    /// Layers to train, from the last; -1 for all, as 0 in mlx-lm [default: 16, or all there are]
    #[arg(long, value_name = "N", allow_negative_numbers = true, help_heading = "Method")]
    pub num_layers: Option<i64>,

    /// Rank of the adapters [default: 8]
    #[arg(long, value_name = "N", help_heading = "Method")]
    pub rank: Option<u64>,

    /// What adapters are multiplied by [default: 20]
    #[arg(long, value_name = "X", help_heading = "Method")]
    pub scale: Option<f64>,

    /// Of an adapter's input to be left out at random [default: 0]
    #[arg(long, value_name = "P", help_heading = "Method")]
    pub dropout: Option<f64>,

    /// How ranks differ between modules: constant, by_bits, by_kl [default: constant]
    ///
    /// by_bits takes rank times bits / 4, 16 bits for what is not quantized; by_kl goes by the model's
    /// optiq_metadata.json. The files have the largest rank everywhere, the rest zeros, so that everything loads them.
    #[arg(long, value_name = "POLICY", help_heading = "Method")]
    pub rank_policy: Option<String>,

    /// Divide the scale by the root of the rank (rsLoRA)
    #[arg(long, help_heading = "Method")]
    pub rs_lora: bool,

    /// Learning rate of the second factors, times this (LoRA+) [default: 1]
    #[arg(long, value_name = "X", help_heading = "Method")]
    pub lora_plus_ratio: Option<f64>,

    /// dpo, kto: how far the model may stray; simpo: scale of the rewards [default: 0.1; simpo: 2]
    #[arg(long, visible_alias = "dpo-beta", value_name = "X", help_heading = "Method")]
    pub beta: Option<f64>,

    /// simpo: margin that is asked for [default: 1]
    #[arg(long, value_name = "X", help_heading = "Method")]
    pub gamma: Option<f64>,

    /// orpo: weight of the odds [default: 0.1]
    #[arg(long, visible_alias = "orpo-lambda", value_name = "X", help_heading = "Method")]
    pub lambda: Option<f64>,

    /// orpo: the likelihood part sees prompt and answer (full) or the answer (response) [default: full]
    #[arg(long, value_name = "SCOPE", help_heading = "Method")]
    pub sft_scope: Option<String>,

    /// adam, adamw, muon, sgd or adafactor [default: adam]
    #[arg(long, value_name = "NAME", help_heading = "Steps")]
    pub optimizer: Option<String>,

    /// Steps, each of one batch [default: 1000]
    #[arg(long, value_name = "N", help_heading = "Steps")]
    pub iters: Option<u64>,

    /// Rows of a batch [default: 4]
    #[arg(long, visible_alias = "batch", value_name = "N", help_heading = "Steps")]
    pub batch_size: Option<u64>,

    /// Batches of an update [default: 1]
    #[arg(long, visible_alias = "grad-accum", value_name = "N", help_heading = "Steps")]
    pub grad_accumulation_steps: Option<u64>,

    /// Learning rate [default: 1e-5]
    #[arg(long, visible_alias = "lr", value_name = "X", help_heading = "Steps")]
    pub learning_rate: Option<f64>,

    /// Steps in which the learning rate rises from 0 [default: 0]
    #[arg(long, value_name = "N", help_heading = "Steps")]
    pub warmup: Option<u64>,

    /// How it falls afterwards over all steps: constant, cosine (to a tenth) or linear (to 0) [default: constant]
    #[arg(long, value_name = "NAME", help_heading = "Steps")]
    pub schedule: Option<String>,

    /// Weight decay of the optimizer [default: the optimizer's]
    #[arg(long, value_name = "X", help_heading = "Steps")]
    pub weight_decay: Option<f64>,

    /// Norm of a gradient, at most; 0 for no limit [default: 0]
    #[arg(long, visible_alias = "grad-clip-norm", value_name = "X", help_heading = "Steps")]
    pub grad_clip: Option<f64>,

    /// Fixes the first values, the order of the rows and dropout [default: 0]
    #[arg(long, value_name = "N", help_heading = "Steps")]
    pub seed: Option<u64>,

    /// Batches of a validation; -1 for all rows [default: 25]
    #[arg(long, value_name = "N", allow_negative_numbers = true, help_heading = "Steps")]
    pub val_batches: Option<i64>,

    /// Batches of the test; -1 for all rows [default: 500]
    #[arg(long, value_name = "N", allow_negative_numbers = true, help_heading = "Steps")]
    pub test_batches: Option<i64>,

    /// Steps between reports [default: 10]
    #[arg(long, value_name = "N", help_heading = "Steps")]
    pub steps_per_report: Option<u64>,

    /// Steps between validations [default: 200]
    #[arg(long, value_name = "N", help_heading = "Steps")]
    pub steps_per_eval: Option<u64>,

    /// Steps between saves: what a crash can cost [default: 100]
    #[arg(long, value_name = "N", help_heading = "Steps")]
    pub save_every: Option<u64>,

    /// Keep what goes into each layer only, and compute layers once more on the way back: --seg 1
    #[arg(long, help_heading = "Memory")]
    pub grad_checkpoint: bool,

    /// The same for N layers at a time; 0 keeps everything [default: 4; with --l1: 0]
    #[arg(long, visible_alias = "segment-size", value_name = "N", help_heading = "Memory")]
    pub seg: Option<u64>,

    /// Keep everything: --seg 0
    #[arg(long, help_heading = "Memory")]
    pub no_segment: bool,

    /// Positions of which logits exist at a time; 0 for all [default: 512; with --l1: 0]
    #[arg(long, visible_alias = "orpo-chunk-size", value_name = "N", help_heading = "Memory")]
    pub head_chunk: Option<u64>,

    /// All logits of a batch at once: --head-chunk 0
    #[arg(long, help_heading = "Memory")]
    pub no_flash: bool,

    /// Compute the prompt of a pair for either answer instead of once
    #[arg(long, help_heading = "Memory")]
    pub no_prefix: bool,

    /// Bytes that the allocator may keep between steps [default: 0]
    #[arg(long, value_name = "SIZE", value_parser = parse_size, help_heading = "Memory")]
    pub clear_cache_threshold: Option<u64>,

    /// The folder that the adapter is saved in [default: adapters]
    #[arg(long, visible_alias = "adapter", value_name = "DIR", help_heading = "Output")]
    pub adapter_path: Option<String>,

    /// Begin with the values of this adapter file
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    pub resume_adapter_file: Option<String>,

    /// Also write the adapter as PEFT keeps them, into DIR, another folder than the adapter's
    #[arg(long, value_name = "DIR", help_heading = "Output")]
    pub export_peft: Option<PathBuf>,

    /// Refused: figures go to metrics.jsonl in the adapter's folder
    #[arg(long, value_name = "SERVICE", hide_short_help = true, help_heading = "Output")]
    pub report_to: Option<String>,

    /// Refused, as --report-to
    #[arg(long, value_name = "NAME", hide_short_help = true, help_heading = "Output")]
    pub project_name: Option<String>,

    #[command(flatten)]
    pub numerics: NumericsArgs,
}

/// What else there is to do with runs.
#[derive(Clone, Debug, clap::Subcommand)]
pub enum TrainAction {
    Plot(super::plot::PlotArgs),
}
