//! Flags that several matrices share.

use std::path::PathBuf;
use std::time::Duration;

use mlx_bun::checkpoint::environment::Environment;
use mlx_bun::checkpoint::source::ModelSource;
use mlx_bun::registry::select::select_model;

use super::baseline::{parse_baseline, parse_percent};
use super::client::{ClientError, Endpoint};
use crate::args::model::ModelArgs;
use crate::env;
use crate::error::Complaint;
use crate::printer::Printer;
use crate::recorder::recorded_path;

/// What is measured.
#[derive(Clone, Debug, clap::Args)]
pub struct TargetArgs {
    #[command(flatten)]
    model: ModelArgs,

    /// Measure the server at this address instead of starting one; it must speak OpenAI's chat protocol
    ///
    /// The key in MLX_BUN_API_KEY, else in OPENAI_API_KEY, is sent. Cells that need other flags than the server was
    /// started with do not appear.
    #[arg(long, value_name = "URL", requires = "stack", help_heading = "Server")]
    url: Option<String>,

    /// What that server is, for the records: mlx_lm.server, llama-server
    #[arg(long, value_name = "NAME", requires = "url", help_heading = "Server")]
    stack: Option<String>,

    /// What requests to that server call the model [default: the first it lists]
    #[arg(long, value_name = "ID", requires = "url", help_heading = "Server")]
    model_id: Option<String>,

    /// How long a request may take
    #[arg(long, value_name = "SECONDS", default_value_t = 600, value_parser = clap::value_parser!(u64).range(1..=86_400), help_heading = "Server")]
    timeout: u64,

    /// More flags for the server that is started, behind `--`
    #[arg(last = true, value_name = "SERVE FLAGS", conflicts_with = "url")]
    serve_flags: Vec<String>,
}

/// What is measured, found.
pub enum Target {
    /// Our own server, started with these flags beside those of a cell.
    Own {
        /// The model.
        source: ModelSource,
        /// Flags of the user.
        flags: Vec<String>,
        /// For a request.
        timeout: Duration,
    },
    /// A server that is there.
    Foreign {
        /// Which.
        endpoint: Endpoint,
        /// What it is.
        stack: String,
    },
}

impl TargetArgs {
    /// Finds the model, or the server.
    ///
    /// # Errors
    /// There is none.
    pub fn resolve(&self, printer: &Printer) -> anyhow::Result<Target> {
        let timeout = Duration::from_secs(self.timeout);
        let (Some(url), Some(stack)) = (&self.url, &self.stack) else {
            let name = self.model.resolve(None, true)?;
            let source = select_model(name.as_deref(), &Environment::of_process())?.source;
            return Ok(Target::Own { source, flags: self.serve_flags.clone(), timeout });
        };
        if !url.starts_with("http://") && !url.starts_with("https://") {
            return Err(Complaint::usage(format!("`--url {url}` is no web address"))
                .hint("write it as http://127.0.0.1:8080")
                .into());
        }
        let key = env::get(env::MLX_BUN_API_KEY).or_else(|| env::get(env::OPENAI_API_KEY));
        let mut endpoint = Endpoint::new(url, key, self.model_id.clone(), timeout);
        let others = endpoint.find_model().map_err(|error| {
            let complaint = Complaint::failure(format!("{url}: {error}"));
            match error {
                ClientError::Status { .. } | ClientError::NoJson { .. } => complaint
                    .hint("say what requests call the model: `--model-id default_model` for mlx_lm.server"),
                _ => complaint,
            }
        })?;
        if let (true, Some(model)) = (others > 0, endpoint.model()) {
            printer.note(&format!(
                "{url} has {} models: `{model}` is measured; --model-id names another one",
                others + 1
            ));
        }
        Ok(Target::Foreign { endpoint, stack: stack.clone() })
    }
}

impl Target {
    /// The model's folder, file or name.
    pub fn model(&self) -> String {
        match self {
            Self::Own { source, .. } => recorded_path(source),
            Self::Foreign { endpoint, .. } => endpoint.model().unwrap_or("unknown").to_owned(),
        }
    }
}

/// What becomes of the numbers.
#[derive(Clone, Debug, clap::Args)]
pub struct ReportArgs {
    /// Only these cells, by their names in the table
    #[arg(long, value_name = "NAME,NAME", value_delimiter = ',', help_heading = "Cells")]
    pub cells: Vec<String>,

    /// Fewer and shorter requests: under two minutes for a small model
    #[arg(long, help_heading = "Cells")]
    pub quick: bool,

    /// Measure every cell anew; otherwise one that this build measured on this machine in the last 36 hours is taken
    #[arg(long, help_heading = "Cells")]
    pub redo: bool,

    /// Measure although the machine is busy; the rows say so
    #[arg(long, help_heading = "Cells")]
    pub force: bool,

    /// Compare with a document that --out wrote, or with what a commit measured on this machine
    #[arg(long, value_name = "FILE|COMMIT", value_parser = parse_baseline, help_heading = "Output")]
    pub baseline: Option<String>,

    /// Fail when a cell loses more than this of the baseline's rate, or takes so much longer [default: 5%]
    #[arg(long, value_name = "PERCENT", requires = "baseline", value_parser = parse_percent, help_heading = "Output")]
    pub max_regression: Option<f64>,

    /// Print JSON (docs/schema/bench-matrix.schema.json) instead of a table
    #[arg(long, help_heading = "Output")]
    pub json: bool,

    /// Also write the document to a file: JSON when it ends in .json, else the table
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    pub out: Option<PathBuf>,
}

/// How requests to a server look.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Requests")]
pub struct RequestArgs {
    /// Tokens of a reply at most [default: 128; 24 with --quick]
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub max_tokens: Option<u32>,

    /// Rounds of a cell; the table has their median [default: 3; 2 with --quick]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub repeats: Option<u32>,

    /// Requests of each client in a round [default: 2; 1 with --quick]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub per_client: Option<u32>,
}

/// The requests of a cell.
#[derive(Clone, Copy, Debug, serde::Serialize)]
pub struct Requests {
    /// Tokens of a reply at most.
    pub max_tokens: usize,
    /// Rounds.
    pub repeats: usize,
    /// Requests of each client in a round.
    pub per_client: usize,
}

impl RequestArgs {
    /// With the defaults filled in.
    pub fn resolve(&self, quick: bool) -> Requests {
        let of = |given: Option<u32>, short: usize, long: usize| {
            given.map_or(if quick { short } else { long }, |given| given as usize)
        };
        Requests {
            max_tokens: of(self.max_tokens, 24, 128),
            repeats: of(self.repeats, 2, 3),
            per_client: of(self.per_client, 1, 2),
        }
    }
}
