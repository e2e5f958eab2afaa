//! The flags of `serve`.

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use mlx_bun::registry::fit::KvScheme;
use mlx_bun::scheduler::EngineOptions;

use super::defaults::Defaults;
use super::guard::Guard;
use super::log::LogFormat;
use crate::args::adapter::AdapterArgs;
use crate::args::kv_cache::KvCache;
use crate::args::load::ComputeArgs;
use crate::args::model::ModelArgs;
use crate::args::numerics::Numerics;
use crate::args::sampling::HlgArgs;
use crate::args::size::{parse_gibibytes, parse_gigabytes};
use crate::args::template::{Template, TemplateArgs};
use crate::args::{Warnings, range};
use crate::env;
use crate::error::Complaint;
use crate::generate::MORE;
use crate::session::prefill_step_size;

const EXAMPLES: &str = "\
Examples:
  mlx-bun serve
  mlx-bun serve ./my-model --port 9000
  mlx-bun serve --host 0.0.0.0 --api-key-file keys.txt
  curl http://127.0.0.1:8080/v1/chat/completions -d '{\"messages\": [{\"role\": \"user\", \"content\": \"Hello\"}]}'

OpenAI's clients take http://127.0.0.1:8080/v1 as their base URL, Anthropic's http://127.0.0.1:8080; without a key
configured, any key will do. The address goes to standard output once requests are answered, and a line for each request
to standard error; -q leaves those out.

To answer as mlx_lm.server does: --temp 0 --top-p 0 --top-k 0 --max-tokens 512 --batch 1 --l1";

/// Answer requests over HTTP, as OpenAI and Anthropic do
#[derive(Clone, Debug, clap::Args)]
#[command(args_override_self = true, after_help = MORE, after_long_help = EXAMPLES)]
pub struct ServeArgs {
    /// The model, as --model
    #[arg(value_name = "MODEL")]
    name: Option<String>,

    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    adapter: AdapterArgs,

    /// The folder that clients may mount adapters from, with POST /v1/adapters
    #[arg(long, value_name = "DIR", help_heading = "Model", hide_short_help = true)]
    adapter_root: Option<PathBuf>,

    #[command(flatten)]
    network: NetworkArgs,
    #[command(flatten)]
    scheduling: SchedulingArgs,
    #[command(flatten)]
    defaults: DefaultArgs,
    #[command(flatten)]
    template: TemplateArgs,

    /// What becomes of a structure that cannot be enforced: an error, or words in the prompt
    #[arg(long, value_name = "error|prompt", value_enum, default_value_t = GrammarFallback::Error, help_heading = "Structure", hide_short_help = true)]
    grammar_fallback: GrammarFallback,

    #[command(flatten)]
    compute: ComputeArgs,
}

/// `--grammar-fallback`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum GrammarFallback {
    /// The request fails
    Error,
    /// The model is asked for it
    Prompt,
}

/// Who reaches the server.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Network")]
struct NetworkArgs {
    /// The address to listen on; 0.0.0.0 is every one of this machine, and needs an API key
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1")]
    host: String,

    /// The port; 0 takes one that is free
    #[arg(long, value_name = "N", default_value_t = 8080)]
    port: u16,

    /// A key that clients must send; other programs see it in the list of processes, so rather use a file or MLX_BUN_API_KEY
    #[arg(long, value_name = "KEY", hide_short_help = true)]
    api_key: Vec<String>,

    /// A file of keys that clients must send one of, one a line; lines that begin with # are remarks
    #[arg(long, value_name = "FILE")]
    api_key_file: Option<PathBuf>,

    /// Listen beyond this machine without a key: whoever reaches the port may use the model
    #[arg(long, hide_short_help = true)]
    without_api_key: bool,

    /// Web pages that may use the server, by origin, such as https://chat.example; `*` for all
    #[arg(
        long,
        visible_alias = "allowed-origins",
        value_name = "ORIGIN",
        value_delimiter = ',',
        hide_short_help = true
    )]
    cors_origin: Vec<String>,

    /// Names that the server is reached by, where it has no key
    #[arg(long, value_name = "NAME", value_delimiter = ',', hide_short_help = true)]
    allowed_hosts: Vec<String>,

    #[arg(long, value_name = "SECONDS", default_value_t = 30, help = range::SHUTDOWN_TIMEOUT.help("How long running requests may go on after Ctrl-C or SIGTERM"), value_parser = range::SHUTDOWN_TIMEOUT.parser(), hide_short_help = true)]
    shutdown_timeout: u64,

    /// Lines on standard error: words, or JSON objects
    #[arg(long, value_name = "text|json", value_enum, default_value_t = LogFormat::Text, hide_short_help = true)]
    log_format: LogFormat,
}

/// How requests share the engine.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Scheduling")]
struct SchedulingArgs {
    #[arg(long, visible_alias = "decode-concurrency", value_name = "N", default_value_t = 8, help = range::BATCH.help("Requests computed together; 1 computes one after the other"), value_parser = range::BATCH.parser())]
    batch: usize,

    /// Memory for prompts that may come again, in GiB; 0 keeps none
    #[arg(long, value_name = "GIB", default_value = "8", value_parser = parse_gibibytes)]
    prompt_cache: u64,

    /// Memory that the key-value caches of running requests may grow to, in GB (10^9 bytes); who does not fit waits
    #[arg(long, value_name = "GB", value_parser = some_gigabytes, hide_short_help = true)]
    kv_budget: Option<u64>,

    /// Memory for weights and caches, in GB (10^9 bytes): longer requests are shortened, or refused
    #[arg(long, value_name = "GB", value_parser = some_gigabytes, hide_short_help = true)]
    memory_budget: Option<u64>,
}

/// A budget of nothing refuses everything.
fn some_gigabytes(text: &str) -> Result<u64, String> {
    match parse_gigabytes(text)? {
        0 => Err("must be more than 0; leave it out for no limit".to_owned()),
        bytes => Ok(bytes),
    }
}

/// What requests leave open.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Defaults of requests")]
struct DefaultArgs {
    #[arg(long = "temp", visible_alias = "temperature", value_name = "T", help = range::TEMPERATURE.help("Temperature [default: the model's, else 0.7]"), value_parser = range::TEMPERATURE.parser())]
    temperature: Option<f64>,

    #[arg(long, value_name = "P", help = range::TOP_P.help("Share of the probability that is kept; 0 and 1 keep all [default: the model's, else 0]"), value_parser = range::TOP_P.parser())]
    top_p: Option<f64>,

    #[arg(long, value_name = "K", help = range::TOP_K.help("Likeliest tokens that are kept; 0 keeps all [default: the model's, else 0]"), value_parser = range::TOP_K.parser())]
    top_k: Option<i32>,

    #[arg(long, value_name = "P", help = range::MIN_P.help("Least share of the likeliest token's probability [default: 0]"), value_parser = range::MIN_P.parser(), hide_short_help = true)]
    min_p: Option<f64>,

    #[arg(short, long, value_name = "N", help = range::MAX_TOKENS.help("Most tokens of a reply [default: as many as the context holds]"), value_parser = range::MAX_TOKENS.parser())]
    max_tokens: Option<usize>,

    #[command(flatten)]
    hlg: HlgArgs,
}

/// What the flags mean.
pub struct Plan {
    /// The model that is named, if any.
    pub model: Option<String>,
    /// An adapter to begin with.
    pub adapter: Option<PathBuf>,
    /// Where adapters may be mounted from.
    pub adapter_root: Option<PathBuf>,
    /// Where to listen.
    pub host: String,
    /// On which port.
    pub port: u16,
    /// Who may come in.
    pub guard: Guard,
    /// How long running requests may go on at the end.
    pub grace: Duration,
    /// How lines look.
    pub log_format: LogFormat,
    /// The engine.
    pub engine: EngineOptions,
    /// What requests leave open; the model's own are added later.
    pub defaults: Defaults,
    /// Whether models think first.
    pub thinking: Option<bool>,
    /// What conversations without a system message begin with.
    pub system_prompt: Option<String>,
    /// The chat template.
    pub template: Template,
    /// Whether a structure that cannot be enforced becomes words.
    pub grammar_fallback: bool,
    /// Whose arithmetic.
    pub numerics: Numerics,
    /// The caches.
    pub kv_cache: KvCache,
}

impl Plan {
    /// Packing of the caches, for estimates.
    pub fn kv_scheme(&self) -> KvScheme {
        match self.kv_cache.quantization {
            Some(packed) => {
                KvScheme::Affine { bits: u64::from(packed.bits), group: u64::from(packed.group_size) }
            }
            None => KvScheme::Dense,
        }
    }
}

impl ServeArgs {
    /// What the flags say together. `on_cpu` tells whether the default device is a CPU.
    ///
    /// # Errors
    /// Flags that contradict each other, or a file that cannot be read.
    pub fn resolve(&self, on_cpu: bool, warnings: &mut Warnings) -> anyhow::Result<Plan> {
        let kv_cache = self.compute.kv_cache.resolve(warnings)?;
        let numerics = self.compute.numerics.resolve(warnings);
        let keys = self.network.keys()?;
        self.network.check_exposure(&keys)?;
        if let Some(root) = self.adapter_root.as_deref().filter(|root| !root.is_dir()) {
            return Err(
                Complaint::failure(format!("`--adapter-root {}` is no folder", root.display())).into()
            );
        }
        let bytes = |bytes: u64| usize::try_from(bytes).unwrap_or(usize::MAX);
        let engine = EngineOptions {
            max_batch: self.scheduling.batch,
            prompt_cache_bytes: bytes(self.scheduling.prompt_cache),
            prefill_step_size: prefill_step_size(&kv_cache, numerics.cpu_kernels && on_cpu),
            kv_quantization: kv_cache.quantization,
            max_kv_size: kv_cache.max_size,
            kv_budget: self.scheduling.kv_budget.map(bytes),
            memory_budget: self.scheduling.memory_budget.map(bytes),
            ..EngineOptions::default()
        };
        // `--thinking` is a default that requests may overrule, not a variable of the template.
        let template = TemplateArgs { thinking: None, ..self.template.clone() }.resolve()?;
        Ok(Plan {
            model: self.model()?,
            adapter: self.adapter.adapter_path.clone(),
            adapter_root: self.adapter_root.clone(),
            host: self.network.host.clone(),
            port: self.network.port,
            guard: Guard::new(&keys, &self.network.cors_origin, &self.network.allowed_hosts)?,
            grace: Duration::from_secs(self.network.shutdown_timeout),
            log_format: self.network.log_format,
            engine,
            defaults: Defaults {
                temperature: self.defaults.temperature,
                top_p: self.defaults.top_p,
                top_k: self.defaults.top_k,
                min_p: self.defaults.min_p,
                max_tokens: self.defaults.max_tokens,
                hlg: self.defaults.hlg.resolve(),
                ..Defaults::default()
            },
            thinking: self.template.thinking.map(|truth| truth.is_true()),
            system_prompt: self.template.system_prompt.clone(),
            template,
            grammar_fallback: self.grammar_fallback == GrammarFallback::Prompt,
            numerics,
            kv_cache,
        })
    }

    /// `--model` wins over the argument, as every explicit flag does.
    fn model(&self) -> Result<Option<String>, Complaint> {
        self.model.resolve(self.name.clone(), true)
    }
}

impl NetworkArgs {
    /// The keys of the flags, the file and the variable.
    fn keys(&self) -> Result<Vec<String>, Complaint> {
        let mut keys = self.api_key.clone();
        if let Some(path) = &self.api_key_file {
            let text = std::fs::read_to_string(path)
                .map_err(|error| Complaint::failure(format!("cannot read `{}`: {error}", path.display())))?;
            let is_key = |line: &&str| !line.is_empty() && !line.starts_with('#');
            let lines: Vec<_> = text.lines().map(str::trim).filter(is_key).collect();
            if lines.is_empty() {
                return Err(Complaint::usage(format!("`{}` holds no key", path.display())));
            }
            keys.extend(lines.into_iter().map(str::to_owned));
        }
        if keys.is_empty() {
            keys.extend(env::get(env::MLX_BUN_API_KEY));
        }
        match keys.iter().any(|key| key.trim().is_empty()) {
            true => Err(Complaint::usage("`--api-key` is empty")),
            false => Ok(keys),
        }
    }

    /// Beyond this machine anybody may knock.
    fn check_exposure(&self, keys: &[String]) -> Result<(), Complaint> {
        let bare = self.host.trim_start_matches('[').trim_end_matches(']');
        let local = bare == "localhost" || bare.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback());
        if local || !keys.is_empty() || self.without_api_key {
            return Ok(());
        }
        Err(Complaint::usage(format!("`--host {}` opens the server to others, and there is no API key", self.host)).hint(
            "give --api-key-file FILE or set MLX_BUN_API_KEY; --without-api-key lets everybody in who reaches the port",
        ))
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(clap::Parser)]
    struct Probe {
        #[command(flatten)]
        args: ServeArgs,
    }

    fn plan(flags: &str) -> anyhow::Result<Plan> {
        let probe = Probe::try_parse_from(std::iter::once("x").chain(flags.split_whitespace()))?;
        probe.args.resolve(true, &mut Vec::new())
    }

    #[test]
    fn defaults_are_those_of_the_reference() {
        let plan = plan("").unwrap();
        assert_eq!((plan.host.as_str(), plan.port), ("127.0.0.1", 8080));
        assert_eq!((plan.engine.max_batch, plan.engine.prompt_cache_bytes), (8, 8 << 30));
        assert_eq!((plan.engine.kv_budget, plan.engine.memory_budget), (None, None));
        assert_eq!(plan.defaults, Defaults::default());
        assert_eq!(plan.thinking, None);
    }

    #[test]
    fn s3_every_flag_counts() {
        let plan = plan(
            "m --port 0 --decode-concurrency 4 --prompt-cache 0 --kv-budget 2 --memory-budget 1.5 --temperature 0.5 \
             --top-p 0.9 --top-k 5 --min-p 0.1 --max-tokens 7 --thinking off --kv-quant 8 --adapter a \
             --grammar-fallback prompt --hlg-sampling on --system-prompt s --shutdown-timeout 1 --log-format json",
        )
        .unwrap();
        assert_eq!(plan.model.as_deref(), Some("m"));
        assert_eq!((plan.engine.max_batch, plan.engine.prompt_cache_bytes), (4, 0));
        assert_eq!(
            (plan.engine.kv_budget, plan.engine.memory_budget),
            (Some(2_000_000_000), Some(1_500_000_000))
        );
        assert_eq!(plan.defaults.temperature, Some(0.5));
        assert_eq!((plan.defaults.top_k, plan.defaults.max_tokens), (Some(5), Some(7)));
        assert_eq!((plan.thinking, plan.grammar_fallback), (Some(false), true));
        assert!(plan.engine.kv_quantization.is_some() && plan.defaults.hlg.is_some());
        assert!(plan.template.variables.is_empty());
        assert_eq!(plan.grace, Duration::from_secs(1));
    }

    #[test]
    fn x9_a_server_for_others_needs_a_key() {
        let error = plan("--host 0.0.0.0").err().unwrap().to_string();
        assert_eq!(error, "`--host 0.0.0.0` opens the server to others, and there is no API key");
        for flags in
            ["--host 0.0.0.0 --api-key k", "--host :: --without-api-key", "--host ::1", "--host localhost"]
        {
            assert!(plan(flags).is_ok(), "{flags}");
        }
        let file = tempfile::NamedTempFile::new().unwrap();
        let flags = format!("--host 0.0.0.0 --api-key-file {}", file.path().display());
        assert!(plan(&flags).err().unwrap().to_string().ends_with("holds no key"));
        std::fs::write(file.path(), "# remark\n").unwrap();
        assert!(plan(&flags).err().unwrap().to_string().ends_with("holds no key"));
        std::fs::write(file.path(), "\n # remark\n secret \n").unwrap();
        assert!(plan(&flags).is_ok());
        let keys = Probe::try_parse_from(std::iter::once("x").chain(flags.split_whitespace())).unwrap();
        assert_eq!(keys.args.network.keys().unwrap(), ["secret"]);
    }

    #[test]
    fn flags_that_could_never_work_are_refused_at_the_start() {
        for (flags, words) in [
            ("--kv-budget 0", "must be more than 0"),
            ("--memory-budget 0GB", "must be more than 0"),
            ("--cors-origin evil", "`--cors-origin evil` is no origin"),
            ("--allowed-hosts http://x", "`--allowed-hosts http://x` is no name of a host"),
            ("--adapter-root no/such/folder", "`--adapter-root no/such/folder` is no folder"),
        ] {
            let error = plan(flags).err().unwrap().to_string();
            assert!(error.contains(words), "{flags}: {error}");
        }
        assert!(
            plan("--cors-origin *,https://a.example --allowed-hosts Box.lan:80,b --kv-budget 1kB").is_ok()
        );
    }
}
