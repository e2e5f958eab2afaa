//! A cell of the matrix: what is measured together, and what came of it.

use mlx_bun::record::{Figures, Statistics};
use serde_json::{Value, json};

use super::trial::Trial;

/// The settings of a cell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cell {
    /// Tokens of the prompt; 0 for one that is hardly there.
    pub prompt: usize,
    /// Tokens to generate; 0 for none.
    pub generation: usize,
    /// Tokens that are in the cache before the prompt.
    pub depth: usize,
    /// Sequences at once.
    pub batch: usize,
    /// Threads of our CPU kernels, where they were asked for.
    pub threads: Option<usize>,
    /// Bits of the packed key-value cache.
    pub kv_bits: Option<u8>,
}

impl Cell {
    /// Its name: rows with the same one are comparable.
    pub fn label(&self) -> String {
        let mut label = format!("{} b{} kv-{}", self.test(), self.batch, self.kv());
        if let Some(threads) = self.threads {
            label.push_str(&format!(" t{threads}"));
        }
        label
    }

    /// llama-bench's name of it: `pp512+tg128@d1024`.
    pub fn test(&self) -> String {
        let mut parts = Vec::new();
        if self.prompt > 0 {
            parts.push(format!("pp{}", self.prompt));
        }
        if self.generation > 0 {
            parts.push(format!("tg{}", self.generation));
        }
        let depth = if self.depth > 0 { format!("@d{}", self.depth) } else { String::new() };
        format!("{}{depth}", parts.join("+"))
    }

    /// How the cache is kept.
    pub fn kv(&self) -> String {
        self.kv_bits.map_or_else(|| "off".to_owned(), |bits| bits.to_string())
    }

    /// Tokens that a sequence feeds before it generates.
    pub fn fed(&self) -> usize {
        self.depth + self.prompt.max(1)
    }
}

/// What reading memory allows.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Roofline {
    /// Measured reading speed, in GB/s (10^9 bytes).
    pub bandwidth: f64,
}

/// A cell that was measured.
#[derive(Clone, Debug)]
pub struct Measured {
    /// Its settings.
    pub cell: Cell,
    /// The trials.
    pub trials: Vec<Trial>,
    /// Bytes that a decode step has to read, divided by the tokens it makes.
    pub bytes_per_token: f64,
    /// The limit, where it was asked for.
    pub roofline: Option<Roofline>,
}

impl Measured {
    fn samples(&self, of: impl Fn(&Trial) -> Option<f64>) -> Vec<f64> {
        self.trials.iter().filter_map(of).collect()
    }

    /// Prompt tokens a second of each trial.
    pub fn prompt_rates(&self) -> Vec<f64> {
        let tokens = (self.cell.prompt * self.cell.batch) as f64;
        match self.cell.prompt {
            0 => Vec::new(),
            _ => self.samples(|trial| Some(tokens / trial.prompt_seconds)),
        }
    }

    /// Generated tokens a second of each trial, over all sequences; mlx-lm's count, which includes the first token.
    pub fn generation_rates(&self) -> Vec<f64> {
        let tokens = (self.cell.generation * self.cell.batch) as f64;
        match self.cell.generation {
            0 | 1 => Vec::new(),
            _ => self.samples(|trial| Some(tokens / trial.generation_seconds)),
        }
    }

    /// Milliseconds until all sequences have their first token, of each trial.
    pub fn first_tokens(&self) -> Vec<f64> {
        match self.cell.generation {
            0 => Vec::new(),
            _ => self.samples(|trial| Some(trial.prompt_seconds * 1e3)),
        }
    }

    /// Most bytes at once; see [`Trial::peak_bytes`].
    pub fn peak_bytes(&self) -> u64 {
        self.trials.iter().map(|trial| trial.peak_bytes).max().unwrap_or(0)
    }

    /// Most bytes that MLX held.
    pub fn mlx_peak_bytes(&self) -> u64 {
        self.trials.iter().map(|trial| trial.mlx_peak_bytes).max().unwrap_or(0)
    }

    /// By which fraction mlx-lm's count makes generation look faster: it counts all tokens in the time of all but the
    /// first.
    pub fn excess(&self) -> Option<f64> {
        let steps = self.cell.generation.checked_sub(1).filter(|steps| *steps > 0)?;
        Some(1.0 / steps as f64)
    }

    /// The share of the measured bandwidth that decoding used; steps without the first, which the prompt pays for.
    pub fn bandwidth_share(&self) -> Option<f64> {
        let steps = self.cell.generation.checked_sub(1).filter(|steps| *steps > 0)? as f64;
        let seconds = Statistics::of(&self.samples(|trial| Some(trial.generation_seconds)))?.median;
        let bytes = self.bytes_per_token * self.cell.batch as f64 * steps;
        Some(bytes / seconds / (self.roofline?.bandwidth * 1e9))
    }

    /// For the database: the medians and their spread.
    pub fn figures(&self) -> Figures {
        let mut figures = Figures::default();
        let groups = [
            ("prompt_tps", self.prompt_rates(), "tok/s"),
            ("generation_tps", self.generation_rates(), "tok/s"),
            ("ttft_ms", self.first_tokens(), "ms"),
        ];
        for (name, samples, unit) in groups {
            let Some(statistics) = Statistics::of(&samples) else { continue };
            figures.add(name, statistics.median, unit);
            figures.add(&format!("{name}_mean"), statistics.mean, unit);
            figures.add(&format!("{name}_sd"), statistics.sd, unit);
        }
        figures.add("peak_bytes", self.peak_bytes() as f64, "bytes");
        figures.add("mlx_peak_bytes", self.mlx_peak_bytes() as f64, "bytes");
        figures.add("bytes_per_token", self.bytes_per_token, "bytes");
        figures.add("batch", self.cell.batch as f64, "");
        if let Some(roofline) = self.roofline {
            figures.add("bandwidth_gbs", roofline.bandwidth, "GB/s");
        }
        if let Some(share) = self.bandwidth_share() {
            figures.add("bandwidth_share", share * 100.0, "%");
        }
        figures
    }

    /// For the database: every trial.
    pub fn raw(&self) -> Value {
        json!({
            "prompt_tps": self.prompt_rates(),
            "generation_tps": self.generation_rates(),
            "ttft_ms": self.first_tokens(),
            "peak_bytes": self.trials.iter().map(|trial| trial.peak_bytes).collect::<Vec<_>>(),
        })
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;

    pub fn measured() -> Measured {
        let cell =
            Cell { prompt: 100, generation: 11, depth: 50, batch: 2, threads: Some(2), kv_bits: Some(8) };
        let trial = |prompt_seconds, generation_seconds| Trial {
            prompt_seconds,
            generation_seconds,
            peak_bytes: 1000,
            mlx_peak_bytes: 400,
        };
        Measured {
            cell,
            trials: vec![trial(1.0, 0.5), trial(2.0, 1.0), trial(4.0, 2.0)],
            bytes_per_token: 5e8,
            roofline: Some(Roofline { bandwidth: 20.0 }),
        }
    }

    #[test]
    fn labels_tell_cells_apart() {
        let cell = measured().cell;
        assert_eq!(cell.label(), "pp100+tg11@d50 b2 kv-8 t2");
        let other = Cell { generation: 0, depth: 0, threads: None, kv_bits: None, ..cell };
        assert_eq!(other.label(), "pp100 b2 kv-off");
        assert_eq!(Cell { prompt: 0, ..cell }.fed(), 51);
    }

    #[test]
    fn figures_follow_from_the_trials() {
        let measured = measured();
        assert_eq!(measured.prompt_rates(), [200.0, 100.0, 50.0]);
        assert_eq!(measured.generation_rates(), [44.0, 22.0, 11.0]);
        assert_eq!(measured.first_tokens(), [1000.0, 2000.0, 4000.0]);
        // 10 steps of 1 GB in a second, of 20 GB.
        assert!((measured.bandwidth_share().unwrap() - 0.5).abs() < 1e-9);
        let figures = measured.figures();
        assert_eq!(figures.get("generation_tps"), Some(22.0));
        assert_eq!((figures.get("peak_bytes"), figures.get("mlx_peak_bytes")), (Some(1000.0), Some(400.0)));
        assert_eq!(measured.excess(), Some(0.1));
        assert!((figures.get("bandwidth_share").unwrap() - 50.0).abs() < 1e-9);
        let one = Measured { cell: Cell { generation: 1, ..measured.cell }, ..measured };
        assert!(one.generation_rates().is_empty() && one.bandwidth_share().is_none());
        assert_eq!((one.first_tokens().len(), one.excess()), (3, None));
    }
}
