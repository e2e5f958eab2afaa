//! Random numbers that come again: for intervals, arrival times and made-up weights.

/// A small generator (splitmix64, Steele et al. 2014) with a seed, so that an interval can be computed again.
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// Begins at a seed.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number in [0, 1).
    pub fn unit(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// An index below `count`, which must not be 0.
    pub fn below(&mut self, count: usize) -> usize {
        // The bias of the remainder is far below anything that is measured here.
        (self.bits() % count.max(1) as u64) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_splitmix64() {
        // The reference implementation's first numbers for the seed 1234567.
        let mut rng = Rng::new(1_234_567);
        assert_eq!(rng.bits(), 6_457_827_717_110_365_317);
        assert_eq!(rng.bits(), 3_203_168_211_198_807_973);
    }

    #[test]
    fn numbers_fill_their_range() {
        let mut rng = Rng::new(1);
        let units: Vec<f64> = (0..1000).map(|_| rng.unit()).collect();
        assert!(units.iter().all(|unit| (0.0..1.0).contains(unit)));
        assert!((units.iter().sum::<f64>() / 1000.0 - 0.5).abs() < 0.05);
        assert!((0..1000).all(|_| rng.below(3) < 3) && rng.below(0) == 0);
    }
}
