//! Ranks and scales of adapters.

use std::collections::BTreeMap;

/// How the rank of a module comes about.
#[derive(Clone, Debug, PartialEq)]
pub enum RankPolicy {
    /// The same everywhere.
    Constant,
    /// `ceil(rank * bits / 4)`, at least 2: finer weights learn more.
    ByBits,
    /// `ceil(rank * clamp(kl / median, 0.5, 2))`, by what quantizing a module did to the model; modules without a
    /// figure go by their bits.
    ByKl(BTreeMap<String, f64>),
}

/// How adapters are shaped.
#[derive(Clone, Debug)]
pub struct AdapterOptions {
    /// Rank.
    pub rank: u32,
    /// How it differs between modules.
    pub policy: RankPolicy,
    /// What products are multiplied by.
    pub scale: f64,
    /// Divides the scale by the root of the rank.
    pub rank_stabilized: bool,
    /// Of each input to be zeroed.
    pub dropout: f64,
    /// Paths below a layer, or of the whole model; `None` for all linear modules of the layers.
    pub keys: Option<Vec<String>>,
}

impl AdapterOptions {
    pub(super) fn scale_at(&self, rank: f64) -> f64 {
        if self.rank_stabilized { self.scale / rank.sqrt() } else { self.scale }
    }
}

impl RankPolicy {
    pub(super) fn rank(&self, rank: u32, path: &str, bits: Option<u8>) -> i32 {
        let rank = f64::from(rank);
        let by_bits = || (rank * f64::from(bits.unwrap_or(16)) / 4.0).ceil().max(2.0);
        let rank = match self {
            Self::Constant => rank,
            Self::ByBits => by_bits(),
            Self::ByKl(figures) => match (figures.get(path), median(figures.values().copied().collect())) {
                (Some(kl), Some(median)) if median > 0.0 => (rank * (kl / median).clamp(0.5, 2.0)).ceil(),
                _ => by_bits(),
            },
        };
        rank.clamp(1.0, 65536.0) as i32
    }
}

fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() % 2 {
        1 => values.get(middle).copied(),
        _ => Some((values.get(middle.checked_sub(1)?)? + values.get(middle)?) / 2.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_follow_bits_and_divergence() {
        let rank = |policy: &RankPolicy, path: &str, bits| policy.rank(8, path, bits);
        assert_eq!(rank(&RankPolicy::Constant, "a", Some(4)), 8);
        assert_eq!(rank(&RankPolicy::ByBits, "a", Some(8)), 16);
        assert_eq!(rank(&RankPolicy::ByBits, "a", Some(3)), 6);
        assert_eq!(RankPolicy::ByBits.rank(1, "a", Some(4)), 2);
        let figures = [("a", 1.0), ("b", 2.0), ("c", 100.0)].map(|(path, kl)| (path.to_owned(), kl));
        let by_kl = RankPolicy::ByKl(figures.into());
        assert_eq!([rank(&by_kl, "a", None), rank(&by_kl, "b", None), rank(&by_kl, "c", None)], [4, 8, 16]);
        assert_eq!(rank(&by_kl, "d", Some(4)), 8);
    }
}
