//! What came of a run: a table, a JSON object, rows of the database.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::path::Path;
use std::time::Duration;

use mlx_bun::checkpoint::atomic_file::write_bytes_atomically;
use mlx_bun::checkpoint::source::ResolvedModel;
use mlx_bun::record::{Figures, QualityRun};
use mlx_bun_evals::kl::Divergence;
use mlx_bun_evals::runner::by_group;
use mlx_bun_evals::samples::Sample;
use mlx_bun_evals::score::{Score, capability};
use serde_json::{Map, Value, json};

use super::EvalArgs;
use super::identity::Identity;
use super::likelihood::figures;
use super::settings::{Kind, Plan, Settings};
use crate::output::SCHEMA_VERSION;
use crate::output_file;
use crate::printer::Printer;
use crate::recorder::{Recorder, recorded_path};
use crate::table::write_table;

/// What a JSON result calls itself.
const RESULT: &str = "mlx-bun-eval";

/// Verdicts beside the headline's, and what they are called.
const MORE_VERDICTS: [(&str, &str); 3] =
    [("correct_norm", "acc_norm"), ("correct_loose", "loose"), ("correct_lenient", "lenient")];

/// One task's result.
pub struct TaskReport {
    kind: Kind,
    score: Score,
    /// Other scores of the same samples.
    scores: Vec<(&'static str, Score)>,
    groups: BTreeMap<String, Score>,
    refused: usize,
    cut: usize,
    /// Counts by the task's own words.
    results: BTreeMap<String, usize>,
    divergence: Option<(Divergence, String)>,
    /// What else is to be told.
    pub figures: Map<String, Value>,
    seconds: f64,
}

impl TaskReport {
    /// Of a task's samples.
    pub fn of(plan: &Plan, samples: Vec<Sample>, took: Duration) -> Self {
        let flag = |name: &str| {
            let verdicts: Vec<bool> =
                samples.iter().filter_map(|sample| sample.detail.get(name)?.as_bool()).collect();
            (verdicts.len() == samples.len() && !samples.is_empty()).then(|| Score::of(verdicts))
        };
        let mut results = BTreeMap::new();
        if plan.kind == Kind::Bfcl {
            for result in samples.iter().filter_map(|sample| sample.detail.get("result")?.as_str()) {
                *results.entry(result.to_owned()).or_insert(0) += 1;
            }
        }
        let of_group = |samples: &[&Sample]| Score::of(samples.iter().map(|sample| sample.correct));
        let groups = by_group(&samples);
        let finished = |how: &str| samples.iter().filter(|sample| sample.finish == how).count();
        Self {
            kind: plan.kind,
            score: Score::of(samples.iter().map(|sample| sample.correct)),
            scores: MORE_VERDICTS.iter().filter_map(|(field, name)| Some((*name, flag(field)?))).collect(),
            groups: groups.iter().map(|(group, samples)| ((*group).to_owned(), of_group(samples))).collect(),
            refused: finished("refused"),
            cut: finished("length"),
            results,
            divergence: None,
            figures: Map::new(),
            seconds: took.as_secs_f64(),
        }
    }

    /// Of a divergence.
    pub fn of_divergence(plan: &Plan, found: Divergence, reference: String, took: Duration) -> Self {
        Self { divergence: Some((found, reference)), ..Self::of(plan, Vec::new(), took) }
    }

    fn json(&self) -> Value {
        let score = |score: Score| {
            let (low, high) = score.wilson();
            json!({"percent": score.percent(), "interval": [low, high], "correct": score.correct, "total": score.total})
        };
        let mut object = Map::from_iter([("task".to_owned(), json!(self.kind.name()))]);
        if let Some((found, reference)) = &self.divergence {
            object.insert("reference".to_owned(), json!(reference));
            object.extend(figures(found).map(|(name, value)| (name.to_owned(), json!(value))));
            object.insert("top1_agreement".to_owned(), json!(found.agreement));
            object.insert("prompts".to_owned(), json!(found.prompts.len()));
            object.insert("tokens".to_owned(), json!(found.tokens));
        } else if let Value::Object(headline) = score(self.score) {
            object.extend(headline);
            object.extend(self.scores.iter().map(|(name, other)| ((*name).to_owned(), score(*other))));
            object.insert("refused".to_owned(), json!(self.refused));
            object.insert("cut_off".to_owned(), json!(self.cut));
            if !self.groups.is_empty() {
                let groups =
                    self.groups.iter().map(|(group, other)| (group.clone(), score(*other))).collect();
                object.insert("groups".to_owned(), Value::Object(groups));
            }
            if !self.results.is_empty() {
                object.insert("results".to_owned(), json!(self.results));
            }
        }
        object.extend(self.figures.clone());
        object.insert("seconds".to_owned(), json!(self.seconds));
        Value::Object(object)
    }

    /// Its line of the table.
    fn row(&self) -> [String; 4] {
        let name = self.kind.name().to_owned();
        match &self.divergence {
            Some((found, reference)) => [
                name,
                format!("{:.6} nats", found.mean),
                format!("median {:.6}, p95 {:.6}", found.median, found.p95),
                format!("{} tokens, from {reference}", found.tokens),
            ],
            None => {
                let (low, high) = self.score.wilson();
                [
                    name,
                    format!("{:.1} %", self.score.percent()),
                    format!("{low:.1} to {high:.1} %"),
                    format!("{} of {}", self.score.correct, self.score.total),
                ]
            }
        }
    }
}

/// All of them.
pub struct Report {
    model: String,
    fingerprint: String,
    disk_gb: f64,
    tasks: Vec<TaskReport>,
}

impl Report {
    /// Nothing yet, for a model.
    pub fn new(model: &Identity) -> Self {
        Self {
            model: model.name.clone(),
            fingerprint: model.fingerprint.clone(),
            disk_gb: model.weight_bytes as f64 / (1u64 << 30) as f64,
            tasks: Vec::new(),
        }
    }

    /// A task is done.
    pub fn add(&mut self, task: TaskReport) {
        self.tasks.push(task);
    }

    /// In the order in which the tasks were named.
    pub fn sort(&mut self, plans: &[Plan]) {
        let place = |task: &TaskReport| plans.iter().position(|plan| plan.kind == task.kind);
        self.tasks.sort_by_key(place);
    }

    fn capability(&self) -> Option<f64> {
        capability(self.tasks.iter().filter(|task| task.kind.counts()).map(|task| task.score.percent()))
    }

    /// Writes a row a task into the database of measurements.
    pub fn record(&self, settings: &Settings, resolved: &ResolvedModel, recorder: &mut Recorder) {
        for task in &self.tasks {
            let Some(plan) = settings.plans.iter().find(|plan| plan.kind == task.kind) else { continue };
            let mut numbers = Figures::default();
            let kl = task.divergence.as_ref().map(|(found, _)| found);
            match kl {
                Some(found) => {
                    figures(found).into_iter().for_each(|(name, value)| numbers.add(name, value, "nats"))
                }
                None => {
                    let (low, high) = task.score.wilson();
                    numbers.add("score", task.score.percent(), "%");
                    numbers.add("score_low", low, "%");
                    numbers.add("score_high", high, "%");
                    for (name, other) in &task.scores {
                        numbers.add(name, other.percent(), "%");
                    }
                }
            }
            numbers.add("seconds", task.seconds, "s");
            let count = kl.map_or(task.score.total, |found| found.prompts.len());
            let row = QualityRun {
                model_path: recorded_path(&resolved.source),
                task: task.kind.name().to_owned(),
                config_json: settings.of_task(plan).map(Value::Object).unwrap_or_default(),
                n_samples: Some(count as u64),
                pct: kl.is_none().then(|| task.score.percent()),
                kl_mean: kl.map(|found| found.mean),
                kl_median: kl.map(|found| found.median),
                kl_p95: kl.map(|found| found.p95),
                kl_ref: task.divergence.as_ref().map(|(_, reference)| reference.clone()),
                capability_score: self.capability(),
                disk_gb: Some(self.disk_gb),
            };
            let entry = recorder.entry(&format!("{} {count}", task.kind.name()), numbers, json!({}));
            recorder.record(&entry, &row);
        }
    }

    fn json(&self, args: &EvalArgs, settings: &Settings) -> Value {
        let task = |task: &TaskReport| {
            let mut object = task.json();
            let plan = settings.plans.iter().find(|plan| plan.kind == task.kind);
            if let (Some(plan), Value::Object(object)) = (plan, &mut object) {
                object.insert(
                    "settings".to_owned(),
                    settings.of_task(plan).map(Value::Object).unwrap_or_default(),
                );
            }
            object
        };
        json!({
            "kind": RESULT,
            "schema_version": SCHEMA_VERSION,
            "model": self.model,
            "fingerprint": self.fingerprint,
            "batch": args.batch,
            "tasks": self.tasks.iter().map(task).collect::<Vec<_>>(),
            "capability_score": self.capability(),
            "disk_gb": self.disk_gb,
        })
    }

    /// Prints it, and writes the file that was asked for.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn say(&self, args: &EvalArgs, settings: &Settings, printer: &Printer) -> anyhow::Result<()> {
        let json = self.json(args, settings);
        if let Some(file) = &args.out {
            write_bytes_atomically(file, format!("{json}\n").as_bytes())?;
        }
        for task in &self.tasks {
            let name = task.kind.name();
            if task.refused > 0 {
                let refused = task.refused;
                printer.warning(&format!(
                    "{refused} questions of {name} are longer than the model's context and count as wrong"
                ));
            }
        }
        let mut stdout = printer.stdout();
        if args.json {
            writeln!(stdout, "{json}")?;
            stdout.flush()?;
            return Ok(());
        }
        let mut rows: Vec<[String; 4]> = self.tasks.iter().map(TaskReport::row).collect();
        if let Some(score) = self.capability().filter(|_| self.tasks.len() > 1) {
            rows.push(["capability".to_owned(), format!("{score:.1} %"), String::new(), String::new()]);
        }
        write_table(&mut stdout, ["task", "score", "95 % interval", "right"], &[1], &rows)?;
        stdout.flush()?;
        for task in &self.tasks {
            self.notes(task, printer);
        }
        printer.note(&format!("Weights: {:.2} GiB", self.disk_gb));
        Ok(())
    }

    fn notes(&self, task: &TaskReport, printer: &Printer) {
        let name = task.kind.name();
        let percent = |name: &str, score: Score| format!("{name} {:.1} %", score.percent());
        let scores: Vec<String> = task.scores.iter().map(|(name, score)| percent(name, *score)).collect();
        let groups: Vec<String> = task.groups.iter().map(|(group, score)| percent(group, *score)).collect();
        let results: Vec<String> =
            task.results.iter().map(|(result, count)| format!("{result} {count}")).collect();
        for line in [scores, groups, results].into_iter().filter(|line| !line.is_empty()) {
            printer.note(&format!("{name}: {}", line.join(", ")));
        }
        if task.cut > 0 {
            printer.note(&format!("{name}: {} replies were cut off at the token limit", task.cut));
        }
        printer.note(&format!("{name}: {:.1} seconds", task.seconds));
    }
}

/// Whether a file is a result of this verb.
pub fn is_result(file: &Path) -> bool {
    // `kind` comes first.
    let start = output_file::beginning(file, 64).unwrap_or_default();
    let start: String = String::from_utf8_lossy(&start).split_whitespace().collect();
    start.starts_with(&format!("{{\"kind\":\"{RESULT}\""))
}
