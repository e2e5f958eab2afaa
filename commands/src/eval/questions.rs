//! Tasks that are answered with text, through the scheduler.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use mlx_bun::scheduler::{Engine, EngineOptions, ModelParts, StartError};
use mlx_bun::structured::ReplyFormat;
use mlx_bun_evals::bfcl::Bfcl;
use mlx_bun_evals::gsm8k::{self, Gsm8k};
use mlx_bun_evals::hashhop::HashHop;
use mlx_bun_evals::humaneval::HumanEval;
use mlx_bun_evals::ifeval::IfEval;
use mlx_bun_evals::prompt::Prompter;
use mlx_bun_evals::runner::{self, RunSettings, Task};
use mlx_bun_evals::samples::{Header, Sample, SampleError, SampleWriter};
use mlx_bun_evals::sandbox::Sandbox;
use serde_json::Value;

use super::Job;
use super::report::{Report, TaskReport};
use super::settings::{Kind, Plan};
use crate::error::Complaint;
use crate::load::choose_numerics;
use crate::session::prefill_step_size;

/// What requests call the adapter.
const ADAPTER: &str = "adapter";

/// An error on its way through the engine's start.
#[derive(Debug, thiserror::Error)]
#[error("{0:#}")]
struct LoadFailure(anyhow::Error);

/// Runs the tasks that are answered with text; returns whether all were finished.
///
/// # Errors
/// The model, the rows, or the files of samples.
pub fn run(job: &Job, mut sandbox: Option<Sandbox>, report: &mut Report) -> anyhow::Result<bool> {
    let answered = |plan: &&Plan| !matches!(plan.kind, Kind::Mmlu | Kind::MultipleChoice | Kind::Kl);
    let plans: Vec<&Plan> = job.settings.plans.iter().filter(answered).collect();
    if plans.is_empty() {
        return Ok(true);
    }
    let (engine, parts) = start(job)?;
    let templates = Arc::clone(&parts.chat_templates);
    let prompter = Prompter::new(Arc::clone(&parts.tokenizer), templates, job.settings.thinking);
    job.interrupt.begin();
    for plan in plans {
        let task = task(job, plan, &prompter, &mut sandbox)?;
        if !one(job, plan, &*task, &engine, &prompter, report)? {
            return Ok(false);
        }
    }
    job.interrupt.rest();
    // The likelihood tasks load the model again, on this thread.
    engine.stop(Duration::ZERO);
    Ok(true)
}

fn start(job: &Job) -> anyhow::Result<(Engine, ModelParts)> {
    let (numerics, kv_cache) = (job.settings.numerics, &job.settings.kv_cache);
    let batch = job.args.batch;
    let options = EngineOptions {
        max_batch: batch,
        // One more than `in_flight` below ever has.
        queue: 2 * batch + 1,
        prompt_cache_bytes: 0,
        prefill_step_size: prefill_step_size(kv_cache, numerics.cpu_kernels),
        kv_quantization: kv_cache.quantization,
        max_kv_size: kv_cache.max_size,
        ..EngineOptions::default()
    };
    let (source, told) = (job.resolved.source.clone(), job.printer.clone());
    let load = move || {
        choose_numerics(numerics, &told).map_err(LoadFailure)?;
        crate::load::load_adapted(&source, None, &told).map_err(|error| LoadFailure(error.into()))
    };
    let (engine, parts) = Engine::start(options, load).map_err(|error| match error {
        StartError::Load(LoadFailure(error)) => error,
        error => Complaint::failure(error.to_string()).into(),
    })?;
    if let Some((path, _)) = &job.settings.adapter {
        engine.mount(ADAPTER, path)?;
    }
    Ok((engine, parts))
}

/// A task with its questions.
fn task(
    job: &Job,
    plan: &Plan,
    prompter: &Prompter,
    sandbox: &mut Option<Sandbox>,
) -> anyhow::Result<Box<dyn Task>> {
    let choose = |total| plan.choose(total);
    let file = plan.rows.as_ref().map(|rows| rows.path.as_path());
    let rows = || file.context("the task has no rows");
    Ok(match plan.kind {
        Kind::Gsm8k => {
            let train = job.data.optional(gsm8k::TRAIN_FILES);
            if plan.shots > gsm8k::DEFAULT_SHOTS && train.is_none() {
                return Err(Complaint::failure(format!(
                    "there are {} solved examples, not {}",
                    gsm8k::DEFAULT_SHOTS,
                    plan.shots
                ))
                .hint("`mlx-bun eval import gsm8k_train FILE` adds more")
                .into());
            }
            Box::new(Gsm8k::load(rows()?, train.as_deref(), plan.shots, choose)?)
        }
        Kind::HumanEval => {
            let sandbox = sandbox.take().context("the task has no sandbox")?;
            Box::new(HumanEval::load(rows()?, sandbox, choose)?)
        }
        Kind::IfEval => Box::new(IfEval::load(rows()?, choose)?),
        Kind::Bfcl => {
            let native = prompter.offers_tools();
            let format = native
                .then(|| ReplyFormat::new(prompter.tokenizer(), prompter.template_source()))
                .transpose()?;
            Box::new(Bfcl::load(
                rows()?,
                format.map(|format| (format, Arc::clone(prompter.tokenizer()))),
                choose,
            )?)
        }
        Kind::HashHop => match file {
            Some(file) => Box::new(HashHop::load(file, choose)?),
            None => Box::new(HashHop::generated(job.args.seed, choose)),
        },
        Kind::Mmlu | Kind::Kl | Kind::MultipleChoice => {
            anyhow::bail!("{} asks no questions", plan.kind.name())
        }
    })
}

/// Runs one task; returns whether it was finished.
fn one(
    job: &Job,
    plan: &Plan,
    task: &dyn Task,
    engine: &Engine,
    prompter: &Prompter,
    report: &mut Report,
) -> anyhow::Result<bool> {
    let count = task.questions().len();
    let mut samples = samples(job, plan, count)?;
    let settings = RunSettings {
        max_tokens: plan.max_tokens,
        in_flight: 2 * job.args.batch,
        adapters: job.settings.adapter.iter().map(|_| ADAPTER.to_owned()).collect(),
    };
    let bar = job.printer.progress(task.name(), count as u64);
    let mut done = samples.len();
    bar.set(done as u64);
    let started = Instant::now();
    let stop = || job.interrupt.is_set();
    let finished = runner::run(engine, prompter, task, &settings, &mut samples, &stop, &mut |_: &Sample| {
        done += 1;
        bar.set(done as u64);
    })?;
    drop(bar);
    if finished {
        let mut result = TaskReport::of(plan, samples.into_samples(), started.elapsed());
        if plan.kind == Kind::Bfcl && !prompter.offers_tools() {
            result.figures.insert("prompt".to_owned(), Value::from("functions described in the question"));
        }
        report.add(result);
    }
    Ok(finished)
}

/// Where a task's samples go.
///
/// # Errors
/// The file is another run's, or there is one and nobody asked to go on.
pub fn samples(job: &Job, plan: &Plan, questions: usize) -> anyhow::Result<SampleWriter> {
    let Some(folder) = &job.args.output_dir else { return Ok(SampleWriter::in_memory()) };
    let path = folder.join(format!("{}.jsonl", plan.kind.name()));
    let header = Header::new(plan.kind.name(), questions, job.model.header(), job.settings.of_task(plan)?);
    let writer = match job.args.resume {
        true => SampleWriter::resume(&path, &header),
        false => SampleWriter::create(&path, &header),
    };
    writer.map_err(|error| {
        let hint = match &error {
            SampleError::Exists { .. } => "give --resume to go on with it, or another --output-dir",
            SampleError::Other { .. } => "give the same model and flags as before, or another --output-dir",
            SampleError::Line { .. } => "give another --output-dir, or remove the file",
            SampleError::Io { .. } => return error.into(),
        };
        Complaint::failure(error.to_string()).hint(hint).into()
    })
}
