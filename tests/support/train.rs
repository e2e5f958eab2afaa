//! Runs over tiny checkpoints and the rows of fixtures/train.

#![allow(dead_code)] // each test program uses a part

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use mlx_bun::checkpoint::source::ModelSource;
use mlx_bun::load::{LoadedModel, load};
use mlx_bun::mlx::random::RandomState;
use mlx_bun::mlx::{self, cpu_ops};
use mlx_bun::train::batches::{BatchOptions, Grouping};
use mlx_bun::train::dataset::{self, Example, Learn, Preparation, prepare};
use mlx_bun::train::losses::Objective;
use mlx_bun::train::network::{MemoryOptions, Network};
use mlx_bun::train::optimizers::{Adam, Kind, Optimizer, Schedule};
use mlx_bun::train::output::Output;
use mlx_bun::train::parameters::{AdapterOptions, Parameters, RankPolicy, Tuning};
use mlx_bun::train::report::{Event, Outcome, TrainReport};
use mlx_bun::train::trainer::{TrainOptions, Trainer};

pub fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures")
}

/// How a run is made; the defaults are those of scripts/oracle/train.py.
#[derive(Clone, Debug)]
pub struct Run {
    pub checkpoint: String,
    pub data: PathBuf,
    pub learn: Learn,
    pub tuning: Tuning,
    pub num_layers: i64,
    pub adapter: AdapterOptions,
    pub optimizer: Kind,
    pub schedule: Schedule,
    pub objective: Objective,
    pub memory: MemoryOptions,
    pub options: TrainOptions,
}

impl Default for Run {
    fn default() -> Self {
        Self {
            checkpoint: "llama-f32".to_owned(),
            data: fixtures().join("train/pairs"),
            learn: Learn::Everything,
            tuning: Tuning::Lora,
            num_layers: -1,
            adapter: AdapterOptions {
                rank: 8,
                policy: RankPolicy::Constant,
                scale: 20.0,
                rank_stabilized: false,
                dropout: 0.0,
                keys: None,
            },
            optimizer: Kind::Adam(Adam::default()),
            schedule: Schedule::constant(2e-5),
            objective: Objective::Sft,
            memory: MemoryOptions::default(),
            options: TrainOptions {
                iterations: 20,
                batch: BatchOptions {
                    size: 2,
                    max_length: 100,
                    grouping: Grouping::File,
                    packing: false,
                    prefix_sharing: false,
                },
                validation_batches: Some(2),
                steps_per_report: 1,
                steps_per_eval: 8,
                save_every: 100,
                accumulation: 1,
                clip: None,
                cache_limit: 0,
                seed: 0,
            },
        }
    }
}

/// What a run said.
#[derive(Clone, Debug, Default)]
pub struct Said {
    pub train: Vec<TrainReport>,
    pub valid: Vec<f64>,
}

impl Said {
    pub fn losses(&self) -> Vec<f64> {
        self.train.iter().map(|report| report.loss).collect()
    }
}

impl Run {
    pub fn load(&self) -> LoadedModel {
        load(&ModelSource::Snapshot(fixtures().join("checkpoints").join(&self.checkpoint))).unwrap()
    }

    pub fn examples(&self, loaded: &LoadedModel) -> [Vec<Example>; 2] {
        let splits = dataset::read(&self.data).unwrap();
        let preparation = Preparation { learn: self.learn, max_length: self.options.batch.max_length };
        [splits.train, splits.valid].map(|rows| {
            prepare(&rows, &loaded.tokenizer, &loaded.chat_templates, preparation).unwrap().examples
        })
    }

    pub fn trainer(&self) -> Trainer {
        let loaded = self.load();
        let [train, valid] = self.examples(&loaded);
        let mut keys = RandomState::from_seed(u64::from(self.options.seed)).unwrap();
        let (network, values) = self.network(&loaded, &mut keys);
        let optimizer = Optimizer::new(self.optimizer.clone(), self.schedule, &values).unwrap();
        Trainer::new(network, values, optimizer, self.objective.clone(), self.options, train, valid, keys)
            .unwrap()
    }

    pub fn network(&self, loaded: &LoadedModel, keys: &mut RandomState) -> (Network, Vec<mlx::Array>) {
        let (pieces, adapters) = (loaded.model.pieces().unwrap(), loaded.model.adapters());
        let (parameters, values) = match self.tuning {
            Tuning::Full => Parameters::full(&pieces, adapters, self.num_layers).unwrap(),
            tuning => {
                Parameters::adapters(tuning, &pieces, adapters, self.num_layers, &self.adapter, keys).unwrap()
            }
        };
        (Network::new(pieces, parameters, self.memory), values)
    }

    pub fn run(&self, folder: &Path) -> (Trainer, Said, Outcome) {
        let mut trainer = self.trainer();
        let (said, outcome) = go_on(&mut trainer, folder, None);
        (trainer, said, outcome)
    }
}

/// Runs, and asks to stop after step `stop`.
pub fn go_on(trainer: &mut Trainer, folder: &Path, stop: Option<u64>) -> (Said, Outcome) {
    let nothing = serde_json::Map::new();
    let output = Output::create(folder, &nothing, &nothing).unwrap();
    let mut said = Said::default();
    let outcome = trainer.run(&output, &mut |event| {
        match event {
            Event::Train(report) => said.train.push(report),
            Event::Validation(report) => said.valid.push(report.loss),
            Event::Step { iteration } if Some(iteration) == stop => return ControlFlow::Break(()),
            _ => {}
        }
        ControlFlow::Continue(())
    });
    (said, outcome.unwrap())
}

/// MLX's own kernels, unfused, or ours.
pub fn choose_kernels(ours: bool) {
    mlx::set_compile(false);
    if ours {
        let precision = cpu_ops::CpuPrecision::Exact;
        cpu_ops::enable(cpu_ops::Settings { threads: Some(2), isa: None, precision }).unwrap();
    } else {
        cpu_ops::disable();
    }
}
