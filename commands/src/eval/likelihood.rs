//! Tasks that compare how likely texts are: the model is loaded on this thread.

use std::ops::ControlFlow;
use std::time::Instant;

use anyhow::Context as _;
use mlx_bun::load::LoadedModel;
use mlx_bun::lora::Adapter;
use mlx_bun::models::Model;
use mlx_bun::registry::select::select_model;
use mlx_bun_evals::kl::{self, Divergence};
use mlx_bun_evals::likelihood::{self, Choices};
use mlx_bun_evals::{data, mmlu, multiple_choice};

use super::Job;
use super::questions::samples;
use super::report::{Report, TaskReport};
use super::settings::{Kind, Plan};
use crate::args::numerics::Numerics;
use crate::error::Complaint;
use crate::load::choose_numerics;

/// Runs these tasks; returns whether all were finished.
///
/// # Errors
/// The model, the rows, or the files of samples.
pub fn run(job: &Job, report: &mut Report) -> anyhow::Result<bool> {
    let plans = job.settings.plans.iter();
    let plans: Vec<&Plan> =
        plans.filter(|plan| matches!(plan.kind, Kind::Mmlu | Kind::MultipleChoice | Kind::Kl)).collect();
    if plans.is_empty() {
        return Ok(true);
    }
    choose_numerics(job.settings.numerics, job.printer)?;
    let loaded = load(job)?;
    for plan in plans {
        let finished = match plan.kind {
            Kind::Kl => divergence(job, plan, &loaded, report)?,
            _ => choices(job, plan, &loaded, report)?,
        };
        if !finished {
            return Ok(false);
        }
    }
    Ok(true)
}

fn load(job: &Job) -> anyhow::Result<LoadedModel> {
    let adapter = job.settings.adapter.as_ref().map(|(path, _)| Adapter::open(path)).transpose()?;
    Ok(crate::load::load_adapted(&job.resolved.source, adapter, job.printer)?)
}

fn questions(job: &Job, plan: &Plan, loaded: &LoadedModel) -> anyhow::Result<Vec<Choices>> {
    let file = &plan.rows.as_ref().context("the task has no rows")?.path;
    let (tokenizer, bos) = (&loaded.tokenizer, job.settings.bos);
    if plan.kind == Kind::MultipleChoice {
        return Ok(multiple_choice::load(file, bos, tokenizer, |total| plan.choose(total))??);
    }
    let dev = job.data.optional(mmlu::DEV_FILES);
    if dev.is_none() && plan.shots > 0 {
        job.printer.warning(&format!(
            "there are no solved questions ({}.jsonl) for mmlu: it is asked without",
            mmlu::DEV_FILES.join(".jsonl or ")
        ));
    }
    let frozen = plan.rows.as_ref().is_some_and(|rows| rows.frozen);
    let choose = |rows: &[mmlu::Row]| match frozen {
        true => plan.choose(rows.len()),
        false => mmlu::by_subject(rows, plan.count, job.args.seed),
    };
    Ok(mmlu::load(file, dev.as_deref(), plan.shots, bos == Some(true), tokenizer, choose)??)
}

fn choices(job: &Job, plan: &Plan, loaded: &LoadedModel, report: &mut Report) -> anyhow::Result<bool> {
    let questions = questions(job, plan, loaded)?;
    let mut samples = samples(job, plan, questions.len())?;
    let bar = job.printer.progress(plan.kind.name(), questions.len() as u64);
    let mut done = samples.len();
    bar.set(done as u64);
    job.interrupt.begin();
    let started = Instant::now();
    let finished = likelihood::run(&*loaded.model, &questions, job.args.batch, &mut samples, &mut |_| {
        done += 1;
        bar.set(done as u64);
        go_on(job)
    })?;
    drop(bar);
    // The last answer may come with the wish to stop.
    let finished = finished || done == questions.len();
    if finished {
        report.add(TaskReport::of(plan, samples.into_samples(), started.elapsed()));
    }
    Ok(finished)
}

fn go_on(job: &Job) -> ControlFlow<()> {
    if job.interrupt.is_set() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
}

fn divergence(job: &Job, plan: &Plan, loaded: &LoadedModel, report: &mut Report) -> anyhow::Result<bool> {
    let texts: Vec<String> = match &plan.rows {
        Some(rows) => data::read_rows(&rows.path, kl::row)?,
        None => kl::TEXTS.iter().map(|text| (*text).to_owned()).collect(),
    };
    let prompts = kl::prompts(&texts, &loaded.tokenizer, plan.count, kl::DEFAULT_LENGTH)?;
    let vocabulary = u32::try_from(loaded.model.vocab_size()).unwrap_or(0);
    if let Some(id) = prompts.iter().flatten().find(|id| **id >= vocabulary) {
        return Err(Complaint::failure(format!(
            "the tokenizer gives token {id}, but the model's embedding has {vocabulary} rows; they do not belong together"
        ))
        .into());
    }
    let bar = job.printer.progress("kl", prompts.len() as u64);
    job.interrupt.begin();
    let started = Instant::now();
    let mut on_done = |done: usize| {
        bar.set(done as u64);
        go_on(job)
    };
    let model = &*loaded.model;
    let (found, reference) = match (job.settings.kv_cache.quantization, &job.args.baseline) {
        (Some(packing), _) => {
            check_packing(model, packing.group_size)?;
            (kl::serving_decode(model, packing, &prompts, &mut on_done)?, "the unpacked cache".to_owned())
        }
        (None, Some(name)) => {
            let resolved =
                select_model(Some(name), &mlx_bun::checkpoint::environment::Environment::of_process())?;
            let reference = mlx_bun::load::load(&resolved.source)?;
            same_vocabulary(model, &*reference.model)?;
            (kl::compare(&*reference.model, model, &prompts, &mut on_done)?, name.clone())
        }
        (None, None) => {
            // Layers keep the kernels that were chosen when they were loaded.
            choose_numerics(stock(job.settings.numerics), job.printer)?;
            let reference = load(job)?;
            choose_numerics(job.settings.numerics, job.printer)?;
            (kl::compare(&*reference.model, model, &prompts, &mut on_done)?, "MLX's own kernels".to_owned())
        }
    };
    drop(bar);
    let Some(found) = found else { return Ok(false) };
    report.add(TaskReport::of_divergence(plan, found, reference, started.elapsed()));
    Ok(true)
}

/// The same with MLX's kernels only.
fn stock(numerics: Numerics) -> Numerics {
    Numerics { cpu_kernels: false, ..numerics }
}

fn same_vocabulary(model: &dyn Model, reference: &dyn Model) -> Result<(), Complaint> {
    let (ours, theirs) = (model.vocab_size(), reference.vocab_size());
    if ours == theirs {
        return Ok(());
    }
    Err(Complaint::failure(format!("the baseline has a vocabulary of {theirs} tokens, the model of {ours}"))
        .hint("compare models with the same tokenizer"))
}

fn check_packing(model: &dyn Model, group: u32) -> Result<(), Complaint> {
    let full = model.layer_kinds().iter().all(|kind| matches!(kind, mlx_bun::cache::LayerKind::Full));
    if !full {
        return Err(Complaint::failure(
            "the model has layers with a sliding window, whose cache cannot be packed",
        ));
    }
    if u32::try_from(model.head_dim()).is_ok_and(|head| group > 0 && head % group == 0) {
        return Ok(());
    }
    Err(Complaint::usage(format!(
        "the cache's groups of {group} do not divide the model's heads of {}",
        model.head_dim()
    ))
    .hint("give another `--kv-group-size`"))
}

/// Figures of a divergence for the report, in nats.
pub fn figures(found: &Divergence) -> [(&'static str, f64); 3] {
    [("kl_mean", found.mean), ("kl_median", found.median), ("kl_p95", found.p95)]
}
