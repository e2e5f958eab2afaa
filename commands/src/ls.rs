//! `mlx-bun ls`: the models on this machine.

use std::io::Write;

use mlx_bun::checkpoint::environment::Environment;
use mlx_bun::registry::{Filter, Model, Registry};

use crate::args::size::{parse_size, shown_size};
use crate::exit::ExitStatus;
use crate::generate::MORE;
use crate::printer::Printer;
use crate::table::write_table;

const EXAMPLES: &str = "\
Examples:
  mlx-bun ls
  mlx-bun ls gemma --max-size 10GB
  mlx-bun ls --json | jq -r .path";

/// List the models on this machine
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = MORE, after_long_help = EXAMPLES)]
pub struct LsArgs {
    /// Only models with this in their name or type
    #[arg(value_name = "QUERY")]
    query: Option<String>,

    /// Only models that see pictures
    #[arg(long)]
    vision: bool,

    /// Only models that hear
    #[arg(long)]
    audio: bool,

    /// Only models of at most this size, such as 10GB or 800MB
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    max_size: Option<u64>,

    /// Every revision instead of one a model; `*` marks the one that the name stands for
    #[arg(long)]
    all_revisions: bool,

    /// Print one JSON object a line
    #[arg(long)]
    json: bool,
}

/// Runs the verb.
///
/// # Errors
/// The registry cannot be read.
pub fn run(args: &LsArgs, printer: &Printer) -> anyhow::Result<ExitStatus> {
    let mut registry = Registry::open(&Environment::of_process())?;
    registry.scan()?;
    let filter = Filter {
        query: args.query.clone(),
        vision: args.vision,
        audio: args.audio,
        max_bytes: args.max_size,
        all_revisions: args.all_revisions,
    };
    let models = registry.models(&filter)?;
    let mut out = printer.stdout();
    if args.json {
        for model in &models {
            writeln!(out, "{}", serde_json::to_string(model)?)?;
        }
        return Ok(ExitStatus::Success);
    }
    if models.is_empty() {
        printer.note("no models; `mlx-bun get org/name` downloads one");
        return Ok(ExitStatus::Success);
    }
    let rows: Vec<_> = models.iter().map(|model| row(model, args.all_revisions)).collect();
    write_table(&mut out, ["MODEL", "TYPE", "SIZE", "PARAMS", "QUANT", "CAPABILITIES"], &[2, 3], &rows)?;
    Ok(ExitStatus::Success)
}

fn row(model: &Model, with_revision: bool) -> [String; 6] {
    let mut name = model.repo_id.clone();
    if let Some(revision) = model.revision.as_deref().filter(|_| with_revision) {
        let short: String = revision.chars().take(8).collect();
        name.push_str(&format!("@{short}{}", if model.canonical { " *" } else { "" }));
    }
    let quantization = match (model.quant_bits, model.quant_mode.as_deref()) {
        (Some(bits), Some("affine") | None) => format!("{bits}-bit"),
        (Some(bits), Some(mode)) => format!("{bits}-bit {mode}"),
        (None, _) => "-".to_owned(),
    };
    [
        name,
        model.model_type.clone(),
        shown_size(model.total_bytes()),
        model.param_count.map_or_else(|| "-".to_owned(), shown_count),
        quantization,
        capabilities(model),
    ]
}

fn capabilities(model: &Model) -> String {
    let extras = [
        (model.sees(), "vision"),
        (model.hears(), "audio"),
        (model.has_tool_template, "tools"),
        (!model.complete, "incomplete"),
    ];
    let extras = extras.into_iter().filter(|(has, _)| *has).map(|(_, name)| name);
    [model.tier.label()].into_iter().chain(extras).collect::<Vec<_>>().join(", ")
}

fn shown_count(count: u64) -> String {
    match count {
        1_000_000_000.. => format!("{:.1}B", count as f64 / 1e9),
        1_000_000.. => format!("{:.0}M", count as f64 / 1e6),
        _ => count.to_string(),
    }
}
