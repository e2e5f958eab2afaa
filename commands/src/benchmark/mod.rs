//! `mlx-bun benchmark`: how fast a model reads prompts and generates, over a matrix of settings.

mod cell;
mod list;
mod report;
mod trial;

use std::path::Path;
use std::time::{Duration, Instant};

use mlx_bun::generate::limits::Limits;
use mlx_bun::load::LoadedModel;
use mlx_bun::lora::Adapter;
use mlx_bun::mlx::cpu_ops;
use mlx_bun::record::{Run, Statistics};
use mlx_bun::registry::fit::{KvLayout, KvScheme, config_of};
use mlx_bun::registry::machine::measured_bandwidth;
use serde_json::{Map, Value, json};

use crate::args::adapter::AdapterArgs;
use crate::args::kv_cache::KvCache;
use crate::args::model::ModelArgs;
use crate::args::numerics::{LeverArgs, Numerics};
use crate::args::range;
use crate::convert::source_model;
use crate::env;
use crate::error::Complaint;
use crate::exit::ExitStatus;
use crate::generate::MORE;
use crate::interrupt::Interrupt;
use crate::load::choose_numerics;
use crate::printer::Printer;
use crate::recorder::{Recorder, recorded_path};
use crate::session::prefill_step_size;
use cell::{Cell, Measured, Roofline};
use list::{KvList, List};
pub use report::quoted;
use report::{Format, NOTICEABLE, Report};
use trial::{KV_GROUP, Random};

const MOST_TOKENS: u64 = 1_000_000;
/// More cells are a slip of the hand.
const MOST_CELLS: usize = 10_000;
/// What a warm-up generates and reads at most: kernels are compiled and weights read after that.
const WARM_UP: (usize, usize) = (512, 8);

const EXAMPLES: &str = "\
Lists:
  128,512-4096*2                     # 128, 512, 1024, 2048, 4096
  1-8+1                              # 1 to 8

Examples:
  mlx-bun benchmark                  # the starter: a prompt of 512 tokens, then 128 generated
  mlx-bun benchmark -m ./model -p 128,512-4096*2 -g 128 -b 1,4,8 -t 1,2 --kv-quant off,8
  mlx-bun benchmark -m ./model -p 0 -g 64 -d 0,4096 --roofline -o csv";

/// Measure how fast a model reads prompts and generates
///
/// Every combination of the lists is a cell. In a trial all sequences of a batch read random tokens and then take the
/// decode step of `serve` together; nothing ends them early. Each cell is recorded, see `mlx-bun evals`.
#[derive(Clone, Debug, clap::Args)]
#[command(args_override_self = true, after_help = MORE, after_long_help = EXAMPLES)]
pub struct BenchmarkArgs {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    adapter: AdapterArgs,

    /// Tokens of the prompt; 0 to measure generation alone [default: 512]
    #[arg(short, long, value_name = "LIST", value_parser = list::parser(0, MOST_TOKENS), help_heading = "Matrix")]
    prompt_tokens: Option<List>,

    /// Tokens to generate; 0 to measure prompts alone [default: 128]
    #[arg(short, long, visible_alias = "tokens", value_name = "LIST", value_parser = list::parser(0, MOST_TOKENS), help_heading = "Matrix")]
    generation_tokens: Option<List>,

    /// Sequences at once
    #[arg(short, long, value_name = "LIST", default_value = "1", value_parser = list::parser(1, 256), help_heading = "Matrix")]
    batch_size: List,

    /// Tokens that are in the cache before the prompt, not measured
    #[arg(short, long, value_name = "LIST", default_value = "0", value_parser = list::parser(0, MOST_TOKENS), help_heading = "Matrix")]
    depth: List,

    /// Packing of the key-value cache: off, 4, 8
    #[arg(long, value_name = "LIST", default_value = "off", value_parser = list::parse_kv, help_heading = "Matrix")]
    kv_quant: KvList,

    /// Threads of our CPU kernels, 1 to 64; the model is loaded anew for each [default: the physical cores]
    #[arg(short, long, value_name = "LIST", value_parser = list::parser(1, 64), env = env::MLX_BUN_THREADS, hide_env = true, help_heading = "Matrix")]
    threads: Option<List>,

    /// Trials of a cell [default: 5]
    #[arg(short, long, visible_alias = "runs", alias = "repetitions", short_alias = 'r', value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000), help_heading = "Trials")]
    num_trials: Option<u32>,

    /// Seconds to wait before each trial
    #[arg(long, value_name = "SECONDS", default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=3600), help_heading = "Trials")]
    delay: u32,

    /// Measure from the first trial on
    #[arg(long, help_heading = "Trials")]
    no_warmup: bool,

    /// Small defaults: 2 trials of 64 prompt tokens and 32 generated
    #[arg(long, help_heading = "Trials")]
    quick: bool,

    #[arg(long, value_name = "N", help = range::PREFILL_STEP_SIZE.help("Prompt tokens to process at a time [default: 2048; 256 with our CPU kernels]"), value_parser = range::PREFILL_STEP_SIZE.parser(), hide_short_help = true, help_heading = "Trials")]
    prefill_step_size: Option<usize>,

    /// How to print the cells
    #[arg(short, long, value_name = "FORMAT", value_enum, default_value_t, help_heading = "Output")]
    output: Format,

    /// The same as `--output json`
    #[arg(long, conflicts_with = "output", help_heading = "Output")]
    json: bool,

    /// Measure how fast memory is read, and tell what share of that decoding reaches
    #[arg(long, help_heading = "Output")]
    roofline: bool,

    /// Do not record the cells
    #[arg(long, help_heading = "Output")]
    no_record: bool,

    #[command(flatten)]
    levers: LeverArgs,
}

impl BenchmarkArgs {
    /// Cells with so many threads, those that differ least next to each other.
    fn cells(&self, threads: Option<usize>) -> Result<Vec<Cell>, Complaint> {
        let (prompt, generation) = if self.quick { (64, 32) } else { (512, 128) };
        let sizes = |list: &[u64]| -> Vec<usize> {
            list.iter().map(|value| usize::try_from(*value).unwrap_or(usize::MAX)).collect()
        };
        let or = |list: &Option<List>, usual| list.as_ref().map_or(vec![usual], |list| sizes(&list.0));
        let (prompts, generations) =
            (or(&self.prompt_tokens, prompt), or(&self.generation_tokens, generation));
        let mut cells = Vec::new();
        for &kv_bits in &self.kv_quant.0 {
            for batch in sizes(&self.batch_size.0) {
                for depth in sizes(&self.depth.0) {
                    for &prompt in &prompts {
                        for &generation in &generations {
                            cells.push(Cell { prompt, generation, depth, batch, threads, kv_bits });
                        }
                    }
                }
            }
            if cells.len() > MOST_CELLS {
                return Err(Complaint::usage(format!("the lists make more than {MOST_CELLS} cells")));
            }
        }
        // Both nothing to read and nothing to generate: a corner of the matrix, or all there is.
        cells.retain(|cell| cell.prompt + cell.generation > 0);
        match cells.is_empty() {
            true => Err(Complaint::usage("there is nothing to measure: both `-p` and `-g` are 0")),
            false => Ok(cells),
        }
    }

    fn flags(&self, prefill: usize) -> Map<String, Value> {
        let flags = json!({
            "adapter": self.adapter.adapter_path,
            "prefill_step_size": prefill,
            "warmup": !self.no_warmup,
        });
        match flags {
            Value::Object(flags) => flags,
            _ => Map::new(),
        }
    }
}

/// Runs the verb.
///
/// # Errors
/// Lists without a cell, or a model that cannot be used.
pub fn run(args: &BenchmarkArgs, printer: &Printer) -> anyhow::Result<ExitStatus> {
    let interrupt = Interrupt::install(printer)?;
    let name = args.model.resolve(None, true)?;
    let mut warnings = Vec::new();
    let threads = thread_counts(args, &mut warnings);
    warnings.iter().for_each(|warning| printer.warning(warning));
    let matrix: Vec<(Option<usize>, Vec<Cell>)> = threads
        .into_iter()
        .map(|threads| Ok((threads, args.cells(threads)?)))
        .collect::<Result<_, Complaint>>()?;
    let trials = args.num_trials.unwrap_or(if args.quick { 2 } else { 5 });
    let total: usize = matrix.iter().map(|(_, cells)| cells.len()).sum();
    let format = if args.json { Format::Json } else { args.output };
    let mut report = Report::new(printer.stdout(), format, args.roofline);
    let bar = printer.progress("Measuring", total as u64 * u64::from(trials));
    let (mut told, mut short) = (false, false);
    for (threads, cells) in matrix {
        let numerics = args.levers.resolve(threads, &mut Vec::new());
        let bench = Bench::load(args, name.as_deref(), numerics, printer)?;
        bench.check(&cells)?;
        let mut recorder = Recorder::begin("benchmark", &numerics, args.flags(bench.prefill), printer);
        if args.no_record {
            recorder.forget();
        }
        if !std::mem::replace(&mut told, true) {
            for problem in recorder.problems() {
                printer.warning(&format!("the numbers are not quotable: {problem}"));
            }
        }
        let roofline = match args.roofline {
            true => {
                let threads = cpu_ops::kernels().map(|kernels| kernels.pool().threads());
                Some(Roofline { bandwidth: measured_bandwidth(threads)? })
            }
            false => None,
        };
        interrupt.begin();
        for cell in cells {
            let measured =
                bench.measure(cell, trials, args, roofline, &interrupt, &mut || bar.advance(1, true))?;
            let (measured, whole) = measured;
            if !measured.trials.is_empty() {
                let entry = recorder.entry(&cell.label(), measured.figures(), measured.raw());
                recorder.record(&entry, &bench.row(&measured));
                report.add(&bench.path, &measured, &entry)?;
                short |= measured.excess().is_some_and(|excess| excess > NOTICEABLE);
            }
            if !whole {
                report.finish()?;
                return Ok(ExitStatus::Interrupted);
            }
        }
        interrupt.rest();
    }
    drop(bar);
    report.finish()?;
    if short {
        printer.note("(+N %): mlx-lm counts all tokens in the time of all but the first, which shows where -g is small");
    }
    Ok(ExitStatus::Success)
}

/// The thread counts of the matrix. Where our kernels do not run there is one, which nobody sets.
fn thread_counts(args: &BenchmarkArgs, warnings: &mut Vec<String>) -> Vec<Option<usize>> {
    let Some(list) = &args.threads else {
        args.levers.resolve(None, warnings);
        return vec![None];
    };
    let counts: Vec<Option<usize>> =
        list.0.iter().map(|count| Some(usize::try_from(*count).unwrap_or(1))).collect();
    let numerics = args.levers.resolve(counts.first().copied().flatten(), warnings);
    if numerics.cpu_kernels { counts } else { vec![None] }
}

/// A loaded model and what its cells need.
struct Bench {
    loaded: LoadedModel,
    path: String,
    kv: KvLayout,
    prefill: usize,
}

impl Bench {
    fn load(
        args: &BenchmarkArgs,
        name: Option<&str>,
        numerics: Numerics,
        printer: &Printer,
    ) -> anyhow::Result<Self> {
        choose_numerics(numerics, printer)?;
        let resolved = source_model(name)?;
        printer.detail(&format!("model: {}", resolved.source.path().display()));
        let adapter = args.adapter.adapter_path.as_deref().map(Adapter::open).transpose()?;
        let loaded = crate::load::load_adapted(&resolved.source, adapter, printer)?;
        let kv_cache = KvCache {
            max_size: None,
            quantization: None,
            unpacked: false,
            prefill_step_size: args.prefill_step_size,
        };
        Ok(Self {
            loaded,
            path: recorded_path(&resolved.source),
            kv: KvLayout::of(&config_of(Path::new(resolved.source.path()))?),
            prefill: prefill_step_size(&kv_cache, cpu_ops::enabled()),
        })
    }

    /// Refuses cells that the model cannot run, before any is measured.
    fn check(&self, cells: &[Cell]) -> Result<(), Complaint> {
        let limits = Limits::of(&*self.loaded.model);
        for cell in cells {
            let tokens = cell.fed() + cell.generation;
            if let Some(context) = limits.context.filter(|context| tokens > *context) {
                return Err(Complaint::usage(format!(
                    "`{}` takes {tokens} tokens, and the model's context is {context}",
                    cell.test()
                ))
                .hint("lower `-p`, `-g` or `-d`"));
            }
            let uneven = u32::try_from(limits.head_dim).is_ok_and(|size| size % KV_GROUP != 0);
            if cell.kv_bits.is_some() && uneven {
                return Err(Complaint::usage(format!(
                    "`--kv-quant {}` packs {KV_GROUP} values together, which do not fit this model's heads of {}",
                    cell.kv(),
                    limits.head_dim
                ))
                .hint("measure it with `--kv-quant off`"));
            }
        }
        Ok(())
    }

    /// All trials of a cell; with the second part false, those before the user asked to stop.
    fn measure(
        &self,
        cell: Cell,
        trials: u32,
        args: &BenchmarkArgs,
        roofline: Option<Roofline>,
        interrupt: &Interrupt,
        on_trial: &mut dyn FnMut(),
    ) -> anyhow::Result<(Measured, bool)> {
        let mut measured =
            Measured { cell, trials: Vec::new(), bytes_per_token: self.bytes_per_token(&cell), roofline };
        let mut random = Random::new(0);
        let run = |cell: &Cell, random: &mut Random| {
            trial::run(&*self.loaded.model, cell, self.prefill, random, interrupt)
        };
        if !args.no_warmup {
            let (prompt, generation) = (cell.prompt.min(WARM_UP.0), cell.generation.min(WARM_UP.1));
            let short = Cell { prompt, generation, depth: 0, ..cell };
            if run(&short, &mut random)?.is_none() {
                return Ok((measured, false));
            }
        }
        for _ in 0..trials {
            if !wait(Duration::from_secs(args.delay.into()), interrupt) {
                return Ok((measured, false));
            }
            match run(&cell, &mut random)? {
                Some(trial) => measured.trials.push(trial),
                None => return Ok((measured, false)),
            }
            on_trial();
        }
        Ok((measured, true))
    }

    /// A step reads all weights once, and the cache of every sequence, which grows while it generates.
    fn bytes_per_token(&self, cell: &Cell) -> f64 {
        let scheme = match cell.kv_bits {
            Some(bits) => KvScheme::Affine { bits: bits.into(), group: KV_GROUP.into() },
            None => KvScheme::Dense,
        };
        let context = cell.fed() + cell.generation / 2;
        let cache = self.kv.bytes(context as u64, scheme) as f64;
        self.loaded.weight_bytes as f64 / cell.batch as f64 + cache
    }

    fn row(&self, measured: &Measured) -> Run {
        let median = |samples: &[f64]| Statistics::of(samples).map(|statistics| statistics.median);
        let cell = &measured.cell;
        Run {
            model_path: self.path.clone(),
            prompt_tokens: Some((cell.fed() * cell.batch) as u64),
            cached_tokens: Some((cell.depth * cell.batch) as u64),
            generated_tokens: Some((cell.generation * cell.batch) as u64),
            prefill_tps: median(&measured.prompt_rates()),
            decode_tps: median(&measured.generation_rates()),
            peak_bytes: Some(measured.peak_bytes()),
            ..Run::default()
        }
    }
}

/// Waits; false when the user asked to stop meanwhile.
fn wait(time: Duration, interrupt: &Interrupt) -> bool {
    let start = Instant::now();
    while start.elapsed() < time {
        if interrupt.is_set() {
            return false;
        }
        std::thread::sleep(Duration::from_millis(50).min(time.saturating_sub(start.elapsed())));
    }
    !interrupt.is_set()
}
