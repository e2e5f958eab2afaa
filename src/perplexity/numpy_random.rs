//! NumPy's legacy generator: the permutations that `np.random.seed` fixes.

const STATE: usize = 624;
const MIDDLE: usize = 397;

/// `numpy.random.RandomState` over MT19937.
#[derive(Debug, Clone)]
pub struct RandomState {
    state: [u32; STATE],
    next: usize,
}

impl RandomState {
    /// As after `np.random.seed(seed)`.
    pub fn from_seed(seed: u32) -> Self {
        let mut state = [seed; STATE];
        for index in 1..STATE {
            let previous = state[index - 1];
            state[index] =
                1_812_433_253u32.wrapping_mul(previous ^ (previous >> 30)).wrapping_add(index as u32);
        }
        Self { state, next: STATE }
    }

    /// What [`from_words`](Self::from_words) takes to go on from here.
    pub fn to_words(&self) -> Vec<u32> {
        self.state.iter().copied().chain([self.next as u32]).collect()
    }

    /// The state that [`to_words`](Self::to_words) gave; `None` for anything else.
    pub fn from_words(words: &[u32]) -> Option<Self> {
        let (next, state) = words.split_last()?;
        let next = usize::try_from(*next).ok().filter(|next| *next <= STATE)?;
        Some(Self { state: state.try_into().ok()?, next })
    }

    fn refill(&mut self) {
        for index in 0..STATE {
            let joined = (self.state[index] & 0x8000_0000) | (self.state[(index + 1) % STATE] & 0x7fff_ffff);
            let twisted = (joined >> 1) ^ if joined & 1 == 1 { 0x9908_b0df } else { 0 };
            self.state[index] = self.state[(index + MIDDLE) % STATE] ^ twisted;
        }
        self.next = 0;
    }

    fn next_u32(&mut self) -> u32 {
        if self.next == STATE {
            self.refill();
        }
        let mut y = self.state[self.next];
        self.next += 1;
        y ^= y >> 11;
        y ^= (y << 7) & 0x9d2c_5680;
        y ^= (y << 15) & 0xefc6_0000;
        y ^ (y >> 18)
    }

    /// A number in `0..=most`.
    fn interval(&mut self, most: u32) -> u32 {
        let mask = u32::MAX.checked_shr(most.leading_zeros()).unwrap_or(0);
        loop {
            let value = self.next_u32() & mask;
            if value <= most {
                return value;
            }
        }
    }

    /// `np.random.permutation(count)`.
    pub fn permutation(&mut self, count: u32) -> Vec<u32> {
        let mut numbers: Vec<u32> = (0..count).collect();
        for index in (1..count).rev() {
            numbers.swap(index as usize, self.interval(index) as usize);
        }
        numbers
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn permutations_are_numpys() {
        assert_eq!(RandomState::from_seed(123).permutation(10), [4, 0, 7, 5, 8, 3, 1, 6, 9, 2]);
        assert_eq!(RandomState::from_seed(0).permutation(5), [2, 0, 1, 3, 4]);
        let many = RandomState::from_seed(7).permutation(1000);
        assert_eq!(many[..4], [778, 334, 271, 802]);
        assert!(RandomState::from_seed(1).permutation(0).is_empty());
    }

    #[test]
    fn a_state_goes_on_where_it_was() {
        let mut random = RandomState::from_seed(5);
        random.permutation(700);
        let mut again = RandomState::from_words(&random.to_words()).unwrap();
        assert_eq!(again.permutation(50), random.permutation(50));
        assert!(RandomState::from_words(&[]).is_none() && RandomState::from_words(&[999; 625]).is_none());
    }
}
