//! Shares bits out to modules by how much each suffers from losing them: greedy, aware of blocks.
//!
//! Every module starts at the fewest bits; a floor raises the neediest of each block; then the step that buys most
//! quality a bit is taken until the mean reaches the target; last, no long run of poor blocks is left.

use std::cmp::Ordering;
use std::collections::{BTreeMap, BinaryHeap};

use super::source::block_index;

/// How protected modules are ranked above others.
const PROTECTION: f64 = 100.0;
/// Blocks at either end whose modules can be protected.
const PROTECTED_BLOCKS: usize = 1;
/// Modules that a block with full attention gets raised at least.
const FLOOR_A_BLOCK: usize = 2;
/// Blocks in a row that may be mostly at the fewest bits.
const LONGEST_POOR_RUN: usize = 3;
/// How far above the target, as a share of it, the result may be.
const MOST_ABOVE_TARGET: f64 = 0.02;
/// Divergence taken for one that is not a number when none is finite.
const UNKNOWN_DIVERGENCE: f64 = 1e6;

const OUTPUT_NAMES: [&str; 7] = ["lm_head", "embed_tokens", "wte", "wpe", "output_proj", "embed_out", "head"];
const ATTENTION_NAMES: [&str; 13] = [
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "in_proj_qkv",
    "in_proj_a",
    "in_proj_b",
    "in_proj_z",
    "out_proj",
    "qkv_proj",
    "wqkv",
    "Wqkv",
    "attn_qkv",
];

/// What is known about a module.
#[derive(Clone, Debug, PartialEq)]
pub struct Sensitivity {
    /// Its path.
    pub module: String,
    /// KL divergence of the model when only this module has that many bits.
    pub divergences: BTreeMap<u8, f64>,
    /// Numbers in its weight.
    pub parameters: u64,
}

/// Bits for every module.
#[derive(Clone, Debug, PartialEq)]
pub struct Allocation {
    /// In the order of the input.
    pub bits: Vec<(String, u8)>,
    /// Of the whole file.
    pub bits_per_weight: f64,
}

/// What may be spent.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Budget {
    /// Bits a weight of the whole file that are to be reached: a floor.
    pub target: f64,
    /// Bits of the whole file while every module has the fewest bits.
    pub fewest: f64,
    /// Weights of the whole file.
    pub parameters: f64,
}

/// How the first and the last block are ranked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ends {
    /// By their divergences, as every other block.
    Measured,
    /// A hundredfold above other blocks.
    Protected,
}

/// Chooses bits for every module out of `candidates` so that the bits a weight of the whole file reach the budget's
/// target and stay within 2 % above it, if the modules' sizes allow.
pub fn allocate(layers: &[Sensitivity], candidates: &[u8], budget: Budget, ends: Ends) -> Allocation {
    let mut candidates = candidates.to_vec();
    candidates.sort_unstable();
    candidates.dedup();
    let Some(&lowest) = candidates.first() else {
        return Allocation { bits: Vec::new(), bits_per_weight: 0.0 };
    };
    let most = f64::from(candidates.last().copied().unwrap_or(1));
    let layers = without_nan(layers, most);
    let mut allocator = Allocator {
        bits: vec![lowest; layers.len()],
        ranked: protected(&layers, ends),
        layers: &layers,
        candidates,
        budget,
    };
    allocator.raise_floors();
    allocator.spend();
    allocator.break_poor_runs();
    allocator.result()
}

struct Allocator<'a> {
    layers: &'a [Sensitivity],
    /// Divergences as they are ranked, protection included.
    ranked: Vec<BTreeMap<u8, f64>>,
    candidates: Vec<u8>,
    bits: Vec<u8>,
    budget: Budget,
}

/// One module's next step; the best is the greatest.
#[derive(Debug)]
struct Step<'a> {
    efficiency: f64,
    module: &'a str,
    layer: usize,
    from: u8,
    to: u8,
}

impl Ord for Step<'_> {
    fn cmp(&self, other: &Self) -> Ordering {
        let by_name = other.module.cmp(self.module);
        let by_bits = other.from.cmp(&self.from).then(other.to.cmp(&self.to));
        self.efficiency.total_cmp(&other.efficiency).then(by_name).then(by_bits)
    }
}

impl PartialOrd for Step<'_> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Step<'_> {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Step<'_> {}

impl<'a> Allocator<'a> {
    fn lowest(&self) -> u8 {
        self.candidates.first().copied().unwrap_or(0)
    }

    fn divergence_at_lowest(&self, layer: usize) -> f64 {
        self.layers[layer].divergences.get(&self.lowest()).copied().unwrap_or(0.0)
    }

    /// Modules by block, blocks in order.
    fn blocks(&self) -> BTreeMap<usize, Vec<usize>> {
        let mut blocks: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        for (layer, sensitivity) in self.layers.iter().enumerate() {
            if let Some(block) = block_index(&sensitivity.module) {
                blocks.entry(block).or_default().push(layer);
            }
        }
        blocks
    }

    fn raise_floors(&mut self) {
        let Some(&second) = self.candidates.get(1) else { return };
        for mut block in self.blocks().into_values() {
            block.sort_by(|a, b| self.divergence_at_lowest(*b).total_cmp(&self.divergence_at_lowest(*a)));
            let attends =
                |layer: &&usize| ATTENTION_NAMES.contains(&last_segment(&self.layers[**layer].module));
            let attention: Vec<usize> = block.iter().filter(attends).copied().collect();
            let reserve = match attention.len() {
                0 => 0,
                1..=3 => 1,
                _ => 2,
            };
            let floor = if attention.len() >= 4 { FLOOR_A_BLOCK } else { FLOOR_A_BLOCK.min(1) };
            let mut picks: Vec<usize> = attention.into_iter().take(reserve.min(FLOOR_A_BLOCK)).collect();
            for layer in block {
                if picks.len() >= floor {
                    break;
                }
                if !picks.contains(&layer) {
                    picks.push(layer);
                }
            }
            for layer in picks {
                self.raise(layer, second);
            }
        }
    }

    /// Raises a module unless that would go beyond what is above the target allowed; whether it did.
    fn raise(&mut self, layer: usize, bits: u8) -> bool {
        let before = std::mem::replace(&mut self.bits[layer], bits);
        let fits = self.bits_per_weight() <= self.budget.target * (1.0 + MOST_ABOVE_TARGET);
        if !fits {
            self.bits[layer] = before;
        }
        fits
    }

    fn next_step(&self, layer: usize) -> Option<Step<'a>> {
        let from = self.bits[layer];
        let to = self.candidates.iter().copied().find(|bits| *bits > from)?;
        let divergence = |bits: u8| self.ranked[layer].get(&bits).copied().unwrap_or(0.0);
        // Where the reference is itself quantized, moving away from its bits costs in either direction.
        let benefit = (divergence(to) - divergence(from)).abs();
        let sensitivity = &self.layers[layer];
        let price = (f64::from(to - from) * sensitivity.parameters as f64).max(1.0);
        let module = sensitivity.module.as_str();
        (benefit > 0.0).then_some(Step { efficiency: benefit / price, module, layer, from, to })
    }

    fn bits_per_weight(&self) -> f64 {
        let lowest = self.lowest();
        let raised = self.layers.iter().zip(&self.bits);
        let more: f64 = raised.map(|(layer, bits)| layer.parameters as f64 * f64::from(bits - lowest)).sum();
        (self.budget.fewest + more) / self.budget.parameters.max(1.0)
    }

    fn spend(&mut self) {
        let mut heap: BinaryHeap<Step> =
            (0..self.layers.len()).filter_map(|layer| self.next_step(layer)).collect();
        // The best of the steps that are too large; taken when no other reaches the target.
        let mut too_large: Option<(usize, u8)> = None;
        while self.bits_per_weight() < self.budget.target {
            let Some(step) = heap.pop() else {
                if let Some((layer, bits)) = too_large {
                    self.bits[layer] = bits;
                }
                return;
            };
            if self.bits[step.layer] != step.from {
                continue;
            }
            if self.raise(step.layer, step.to) {
                heap.extend(self.next_step(step.layer));
            } else {
                too_large.get_or_insert((step.layer, step.to));
            }
        }
    }

    fn break_poor_runs(&mut self) {
        let Some(&second) = self.candidates.get(1) else { return };
        let blocks: Vec<Vec<usize>> = self.blocks().into_values().collect();
        let at_lowest = |bits: &[u8], block: &[usize]| -> Vec<usize> {
            block.iter().copied().filter(|layer| bits[*layer] == self.candidates[0]).collect()
        };
        let poor: Vec<bool> =
            blocks.iter().map(|block| at_lowest(&self.bits, block).len() * 2 > block.len()).collect();
        let mut raised = Vec::new();
        let mut start = 0;
        while start < poor.len() {
            let run = poor[start..].iter().take_while(|poor| **poor).count();
            if run > LONGEST_POOR_RUN {
                for block in blocks[start..start + run].iter().step_by(LONGEST_POOR_RUN) {
                    let worst = |a: &usize, b: &usize| {
                        // The first among equals.
                        self.divergence_at_lowest(*a).total_cmp(&self.divergence_at_lowest(*b)).then(b.cmp(a))
                    };
                    raised.extend(at_lowest(&self.bits, block).into_iter().max_by(worst));
                }
            }
            start += run.max(1);
        }
        for layer in raised {
            self.raise(layer, second);
        }
    }

    fn result(&self) -> Allocation {
        let bits = self.layers.iter().zip(&self.bits).map(|(layer, bits)| (layer.module.clone(), *bits));
        Allocation { bits: bits.collect(), bits_per_weight: self.bits_per_weight() }
    }
}

fn last_segment(module: &str) -> &str {
    module.rsplit('.').next().unwrap_or(module)
}

/// A divergence that is no number is taken for ten times the worst there is, the more so at fewer than `most` bits.
fn without_nan(layers: &[Sensitivity], most: f64) -> Vec<Sensitivity> {
    let finite = layers.iter().flat_map(|layer| layer.divergences.values()).filter(|value| value.is_finite());
    let largest = finite.copied().reduce(f64::max).unwrap_or(UNKNOWN_DIVERGENCE);
    let fixed = |layer: &Sensitivity| {
        let divergences = layer.divergences.iter().map(|(bits, value)| {
            let replaced = largest * 10.0 * (most / f64::from((*bits).max(1)));
            (*bits, if value.is_nan() { replaced } else { *value })
        });
        Sensitivity { divergences: divergences.collect(), ..layer.clone() }
    };
    layers.iter().map(fixed).collect()
}

/// Divergences as they are ranked: those of heads and routers, and of protected ends, count more.
fn protected(layers: &[Sensitivity], ends: Ends) -> Vec<BTreeMap<u8, f64>> {
    let mut blocks: Vec<usize> = layers.iter().filter_map(|layer| block_index(&layer.module)).collect();
    blocks.sort_unstable();
    blocks.dedup();
    let a_side = if ends == Ends::Protected { PROTECTED_BLOCKS } else { 0 };
    let outer: Vec<usize> =
        blocks.iter().take(a_side).chain(blocks.iter().rev().take(a_side)).copied().collect();
    let ranked = |layer: &Sensitivity| {
        let at_an_end = block_index(&layer.module).is_some_and(|block| outer.contains(&block));
        let factor = if at_an_end || is_critical(&layer.module) { PROTECTION } else { 1.0 };
        layer.divergences.iter().map(|(bits, value)| (*bits, value * factor)).collect()
    };
    layers.iter().map(ranked).collect()
}

/// Outputs, embeddings and routers.
fn is_critical(module: &str) -> bool {
    let segments: Vec<&str> = module.split('.').collect();
    let last = last_segment(module).to_lowercase();
    let tail = &segments[segments.len().saturating_sub(2)..];
    OUTPUT_NAMES.iter().any(|name| last.contains(name) || tail.contains(name))
        || !segments.contains(&"layers")
        || tail == ["mlp", "gate"]
        || last == "router"
        || module.ends_with("router.proj")
        || module.contains(".shared_experts.")
        || module.contains(".shared_expert.")
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAMES: [&str; 7] = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"];

    fn layers(blocks: usize, divergence: impl Fn(usize, usize) -> f64) -> Vec<Sensitivity> {
        let mut layers = Vec::new();
        for block in 0..blocks {
            for (index, name) in NAMES.iter().enumerate() {
                let low = divergence(block, index);
                layers.push(Sensitivity {
                    module: format!("model.layers.{block}.x.{name}"),
                    divergences: BTreeMap::from([(4, low), (8, low / 100.0)]),
                    parameters: 1000,
                });
            }
        }
        layers
    }

    /// Modules alone, whose scales cost nothing.
    fn shared(layers: &[Sensitivity], target: f64, ends: Ends) -> Allocation {
        let parameters: f64 = layers.iter().map(|layer| layer.parameters as f64).sum();
        allocate(layers, &[8, 4], Budget { target, fewest: parameters * 4.0, parameters }, ends)
    }

    fn within(layers: &[Sensitivity], target: f64) -> Allocation {
        shared(layers, target, Ends::Measured)
    }

    fn raised(allocation: &Allocation) -> Vec<&str> {
        allocation.bits.iter().filter(|(_, bits)| *bits == 8).map(|(module, _)| module.as_str()).collect()
    }

    #[test]
    fn the_floor_takes_two_attention_modules_of_each_block() {
        let allocation = within(&layers(3, |_, index| index as f64 + 1.0), 5.1);
        assert_eq!(raised(&allocation).len(), 6);
        assert!(raised(&allocation).iter().all(|name| name.ends_with("v_proj") || name.ends_with("o_proj")));
        assert!((allocation.bits_per_weight - (4.0 + 4.0 * 2.0 / 7.0)).abs() < 1e-9);
    }

    #[test]
    fn the_target_is_a_floor_and_ends_first() {
        let layers = layers(5, |block, _| if block == 2 { 50.0 } else { 1.0 });
        let protected = shared(&layers, 5.5, Ends::Protected);
        let measured = within(&layers, 5.5);
        for allocation in [&protected, &measured] {
            // The run of poor blocks may cost more modules.
            let excess = allocation.bits_per_weight / 5.5 - 1.0;
            assert!((0.0..0.02).contains(&excess), "{excess}");
        }
        let middle = |allocation: &Allocation| {
            raised(allocation).iter().filter(|name| name.contains("layers.2.")).count()
        };
        // Protection outweighs even the bad middle, which else gets all that floors leave.
        assert_eq!((middle(&protected), middle(&measured)), (2, 6));
        assert_eq!(within(&layers, 99.0).bits_per_weight, 8.0);
    }

    #[test]
    fn long_runs_of_poor_blocks_are_broken() {
        let mut layers = layers(9, |_, _| 0.0);
        for layer in &mut layers {
            layer.divergences.insert(4, 0.0);
        }
        let with_floor = 9 * 2;
        assert_eq!(raised(&within(&layers, 5.3)).len(), with_floor + 3);
        // Never beyond what is left above the target.
        assert!(within(&layers, 4.5).bits_per_weight <= 4.5 * 1.02);
    }

    #[test]
    fn a_step_that_is_too_large_waits_for_smaller_ones() {
        let mut layers = layers(1, |_, index| 7.0 - index as f64);
        layers[2].parameters = 100_000;
        let allocation = within(&layers, 4.1);
        assert_eq!(allocation.bits[2].1, 4, "{allocation:?}");
        assert!(allocation.bits_per_weight >= 4.1 && allocation.bits_per_weight <= 4.1 * 1.02);
        // Nothing else reaches this one.
        assert_eq!(within(&layers, 4.5).bits[2].1, 8);
    }

    #[test]
    fn a_divergence_that_is_no_number_counts_as_the_worst() {
        let mut layers = layers(3, |_, _| 1.0);
        layers[10].divergences.insert(4, f64::NAN);
        let allocation = within(&layers, 5.1);
        assert_eq!(allocation.bits[10].1, 8);
        assert!(within(&[], 4.0).bits.is_empty());
    }
}
