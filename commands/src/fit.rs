//! `mlx-bun fit`: whether a model fits into memory, and how fast it would be.

use std::io::Write;

use anyhow::Context as _;
use mlx_bun::checkpoint::environment::Environment;
use mlx_bun::record::{Database, Filter, MachineIdentity, Recorded, Run};
use mlx_bun::registry::fit::{Fit, FitOptions, Footprint, KvScheme, fit};
use mlx_bun::registry::machine::Machine;
use mlx_bun::registry::select::select_entry;
use mlx_bun::registry::{self, Model, Registry};
use serde_json::Value;

use crate::args::model::ModelArgs;
use crate::args::size::{parse_gigabytes, shown_size};
use crate::error::Complaint;
use crate::exit::ExitStatus;
use crate::generate::MORE;
use crate::printer::Printer;
use crate::recorder::is_slowed;
use crate::table::write_table;

const EXAMPLES: &str = "\
Examples:
  mlx-bun fit                        # every model that is here
  mlx-bun fit e4b --ctx 32768
  mlx-bun fit --model ./my-model --skus";

/// Tell whether a model fits into memory, and how fast it would be
///
/// An estimate from the headers of the weights and the speed of the memory: nothing is loaded, and no command refuses
/// a model because of it.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = MORE, after_long_help = EXAMPLES)]
pub struct FitArgs {
    /// Part of the model's name; left out, all models are listed
    #[arg(value_name = "QUERY")]
    name: Option<String>,

    #[command(flatten)]
    model: ModelArgs,

    /// Tokens of context
    #[arg(
        long,
        visible_alias = "context",
        value_name = "N",
        default_value_t = 8192,
        help_heading = "Estimate"
    )]
    ctx: u32,

    /// Bits of a packed key-value cache, in groups of 64
    #[arg(long, value_name = "BITS", value_parser = clap::value_parser!(u64).range(2..=8), help_heading = "Estimate")]
    kv_bits: Option<u64>,

    /// Memory to use at most, in GB (10^9 bytes), instead of three quarters of what there is
    #[arg(long, value_name = "GB", value_parser = parse_gigabytes, help_heading = "Estimate")]
    memory_budget: Option<u64>,

    /// On every Apple machine
    #[arg(long, help_heading = "Estimate")]
    skus: bool,

    /// Print one JSON object a line
    #[arg(long, help_heading = "Estimate")]
    json: bool,
}

/// Runs the verb.
///
/// # Errors
/// There is no such model, or its config cannot be read.
pub fn run(args: &FitArgs, printer: &Printer) -> anyhow::Result<ExitStatus> {
    let options = FitOptions {
        context: u64::from(args.ctx),
        budget: args.memory_budget,
        kv: args.kv_bits.map_or(KvScheme::Dense, |bits| KvScheme::Affine { bits, group: 64 }),
        measured_rate: None,
    };
    let machines = if args.skus { Machine::apple().collect() } else { vec![Machine::this()] };
    let named = args.model.resolve(args.name.clone(), false)?;
    // What was measured is of this machine, and of a cache that is not packed.
    let rates = if args.skus || args.kv_bits.is_some() { None } else { Rates::here() };
    let mut fits = Vec::new();
    for model in chosen(named.as_deref(), args.skus)? {
        let footprint = Footprint::of(&model).with_context(|| model.repo_id.clone());
        let footprint = match footprint {
            Ok(footprint) => footprint,
            // One bad model does not hide the others.
            Err(error) if named.is_none() => {
                printer.warning(&format!("{error:#}"));
                continue;
            }
            Err(error) => return Err(error),
        };
        if let (Some(most), true) = (footprint.max_positions, named.is_some())
            && options.context > most
        {
            printer.warning(&format!(
                "{} was made for {most} tokens of context, not {}",
                model.repo_id, options.context
            ));
        }
        let measured_rate = rates.as_ref().and_then(|rates| rates.of(&model));
        let options = FitOptions { measured_rate, ..options };
        fits.extend(machines.iter().map(|machine| (model.clone(), fit(&footprint, machine, &options))));
    }
    let mut out = printer.stdout();
    if args.json {
        for (model, fit) in &fits {
            let mut line = serde_json::to_value(fit)?;
            line["model"] = serde_json::json!(model.repo_id);
            line["path"] = serde_json::json!(model.path);
            writeln!(out, "{line}")?;
        }
        return Ok(ExitStatus::Success);
    }
    match (fits.as_slice(), named, args.skus) {
        ([], ..) => printer.note("no models; `mlx-bun get org/name` downloads one"),
        ([(model, fit)], Some(_), false) => one(&mut out, model, fit, &machines[0])?,
        (_, _, true) => table(&mut out, "MACHINE", &fits, |_, fit| fit.machine.clone())?,
        _ => table(&mut out, "MODEL", &fits, |model, _| model.repo_id.clone())?,
    }
    Ok(ExitStatus::Success)
}

/// What `benchmark` measured on this machine.
struct Rates {
    database: Database,
    machine: String,
}

impl Rates {
    /// `None` when nothing was measured; an estimate does without.
    fn here() -> Option<Self> {
        let path = Database::place(&Environment::of_process());
        let database = if path.exists() { Database::open(&path).ok()? } else { return None };
        Some(Self { database, machine: MachineIdentity::this().key })
    }

    /// The newest rate of one sequence, in tokens a second.
    fn of(&self, model: &Model) -> Option<f64> {
        let path = model.path.canonicalize().unwrap_or_else(|_| model.path.clone());
        let filter = Filter {
            verb: Some("benchmark".to_owned()),
            model_path: Some(path.to_string_lossy().into_owned()),
            stack: Some("mlx-bun".to_owned()),
            ..Filter::default()
        };
        let rows = self.database.select::<Run>(&filter).ok()?;
        let usual = |row: &&Recorded<Run>| {
            let entry = &row.entry;
            entry.machine_key == self.machine
                && entry.build != "debug"
                && entry.figures.get("batch") == Some(1.0)
                && entry.label.contains("kv-off")
                && entry.flags.get("adapter").is_none_or(Value::is_null)
                && !is_slowed(&entry.flags)
        };
        rows.iter().filter(usual).find_map(|row| row.row.decode_tps)
    }
}

fn chosen(named: Option<&str>, must_be_one: bool) -> anyhow::Result<Vec<Model>> {
    let environment = Environment::of_process();
    if let Some(named) = named {
        return Ok(vec![select_entry(named, &environment)?]);
    }
    if must_be_one {
        return Err(Complaint::usage("`--skus` is about one model")
            .hint("name it: mlx-bun fit QUERY --skus")
            .into());
    }
    let mut registry = Registry::open(&environment)?;
    registry.scan()?;
    Ok(registry.models(&registry::Filter::default())?)
}

fn one(out: &mut impl Write, model: &Model, fit: &Fit, machine: &Machine) -> std::io::Result<()> {
    let verdict = if fit.fits { "fits" } else { "does not fit" };
    writeln!(out, "{} {verdict} on {} at {} tokens", model.repo_id, fit.machine, fit.context)?;
    let lines = [
        ("weights", shown_size(fit.weights)),
        ("key-value cache", shown_size(fit.kv)),
        ("prefill", shown_size(fit.transient)),
        ("total", format!("{} of {} usable", shown_size(fit.total), shown_size(fit.usable))),
        ("longest context", longest(fit)),
        ("decoding", rate(fit)),
        ("memory", format!("{}, read at {:.0} GB/s", shown_size(machine.memory), machine.bandwidth)),
    ];
    lines.iter().try_for_each(|(name, value)| writeln!(out, "  {name:<16} {value}"))
}

fn longest(fit: &Fit) -> String {
    fit.max_context.map_or_else(|| "any".to_owned(), |context| format!("{context} tokens"))
}

fn rate(fit: &Fit) -> String {
    let how = if fit.rate_measured { "measured" } else { "predicted" };
    format!("{:.1} tok/s ({how})", fit.decode_rate)
}

fn table(
    out: &mut impl Write,
    heading: &str,
    fits: &[(Model, Fit)],
    name: impl Fn(&Model, &Fit) -> String,
) -> std::io::Result<()> {
    let row = |(model, fit): &(Model, Fit)| {
        [
            name(model, fit),
            shown_size(fit.total),
            shown_size(fit.usable),
            if fit.fits { "yes" } else { "no" }.to_owned(),
            fit.max_context.map_or_else(|| "any".to_owned(), |context| context.to_string()),
            format!("{:.1}", fit.decode_rate),
        ]
    };
    let rows: Vec<_> = fits.iter().map(row).collect();
    write_table(out, [heading, "NEEDS", "USABLE", "FITS", "MAX CONTEXT", "TOK/S"], &[1, 2, 4, 5], &rows)
}
