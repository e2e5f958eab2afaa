//! Which rows a run takes: the same ones everywhere for the same seed.

/// The generator mulberry32: small, and the same in every language that has 32-bit integers.
#[derive(Clone, Debug)]
pub struct Mulberry32(u32);

impl Mulberry32 {
    /// From a seed.
    pub fn new(seed: u32) -> Self {
        Self(seed)
    }

    /// The next number in `[0, 1)`.
    pub fn next_f64(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x6d2b_79f5);
        let mut t = (self.0 ^ (self.0 >> 15)).wrapping_mul(1 | self.0);
        t = t.wrapping_add((t ^ (t >> 7)).wrapping_mul(61 | t)) ^ t;
        f64::from(t ^ (t >> 14)) / 4_294_967_296.0
    }

    /// The next number in `0..bound`; 0 for a bound of 0.
    pub fn below(&mut self, bound: usize) -> usize {
        ((self.next_f64() * bound as f64) as usize).min(bound.saturating_sub(1))
    }

    /// Fisher and Yates.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for index in (1..items.len()).rev() {
            let other = self.below(index + 1);
            items.swap(index, other);
        }
    }
}

/// `count` of the indices `0..total`, drawn by `seed`, ascending; all of them if there are no more.
pub fn subsample(total: usize, count: usize, seed: u32) -> Vec<usize> {
    let mut indices: Vec<usize> = (0..total).collect();
    if count < total {
        Mulberry32::new(seed).shuffle(&mut indices);
        indices.truncate(count);
        indices.sort_unstable();
    }
    indices
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn numbers_are_those_of_the_javascript_original() {
        // mulberry32(42) in Node.
        let mut random = Mulberry32::new(42);
        let numbers: Vec<f64> = (0..3).map(|_| random.next_f64()).collect();
        assert_eq!(numbers, [0.601_103_751_920_163_6, 0.448_290_558_997_541_67, 0.852_465_793_490_409_9]);
    }

    proptest! {
        #[test]
        fn a_subsample_is_ascending_distinct_and_repeatable(total in 0usize..300, count in 0usize..300, seed: u32) {
            let indices = subsample(total, count, seed);
            prop_assert_eq!(indices.len(), count.min(total));
            prop_assert!(indices.windows(2).all(|pair| pair[0] < pair[1]));
            prop_assert!(indices.last().is_none_or(|last| *last < total));
            prop_assert_eq!(indices, subsample(total, count, seed));
        }
    }
}
