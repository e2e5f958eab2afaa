//! Examples to batches in an order that a seed fixes (mlx-lm `tuner/trainer.py`, `iterate_batches`).

use super::dataset::Example;
use crate::mlx::{Array, Result};
use crate::perplexity::RandomState;

/// Sequences are padded to one more than a multiple of this.
const PADDING: usize = 32;

/// What the examples of a batch have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Grouping {
    /// Neighbours in the file: mlx-lm sorts by the number of a row's fields, which leaves equal rows where they are.
    File,
    /// About the same length, so that little is padded.
    Length,
}

/// How batches are made.
#[derive(Clone, Copy, Debug)]
pub struct BatchOptions {
    /// Examples of a batch.
    pub size: usize,
    /// Tokens of a sequence, at most; also what padding stops at.
    pub max_length: usize,
    /// Which examples share a batch.
    pub grouping: Grouping,
    /// Puts several examples one after the other into each row of a batch, up to `max_length` tokens.
    pub packing: bool,
    /// Computes a prompt that two answers share once; batches of one pair only.
    pub prefix_sharing: bool,
}

/// Too few examples for one batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{examples} examples are fewer than a batch of {size} takes; use a smaller --batch-size")]
pub struct TooFewExamples {
    /// Examples there are.
    pub examples: usize,
    /// Examples of a batch.
    pub size: usize,
}

/// The batches of a data set, as lists of lists of example numbers: a batch has rows, a row has examples (one, unless
/// they are packed).
#[derive(Clone, Debug)]
pub struct Batches {
    groups: Vec<Vec<Vec<usize>>>,
}

impl Batches {
    /// Groups the examples.
    ///
    /// # Errors
    /// When there are fewer than a batch takes.
    pub fn new(examples: &[Example], options: &BatchOptions) -> std::result::Result<Self, TooFewExamples> {
        let size = options.size.max(1);
        let mut order: Vec<usize> = (0..examples.len()).collect();
        match options.grouping {
            Grouping::File => order.sort_by_key(|&index| examples[index].fields),
            Grouping::Length => order.sort_by_key(|&index| examples[index].length()),
        }
        let rows: Vec<Vec<usize>> = if options.packing {
            packed(&order, examples, options.max_length)
        } else {
            order.into_iter().map(|index| vec![index]).collect()
        };
        if rows.len() < size {
            return Err(TooFewExamples { examples: rows.len(), size });
        }
        Ok(Self { groups: rows.chunks_exact(size).map(<[Vec<usize>]>::to_vec).collect() })
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.groups.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.groups.is_empty()
    }

    /// The order of an epoch.
    pub fn shuffle(&self, random: &mut RandomState) -> Vec<u32> {
        random.permutation(u32::try_from(self.groups.len()).unwrap_or(u32::MAX))
    }

    /// Builds batch `index`.
    ///
    /// # Errors
    /// When MLX fails.
    pub fn build(&self, index: u32, examples: &[Example], options: &BatchOptions) -> Result<Batch> {
        let rows = self.groups.get(index as usize).map(Vec::as_slice).unwrap_or_default();
        Batch::new(rows, examples, options)
    }
}

/// First fit over the given order, so that the same rows come out for the same data.
fn packed(order: &[usize], examples: &[Example], most: usize) -> Vec<Vec<usize>> {
    let mut rows: Vec<(usize, Vec<usize>)> = Vec::new();
    let mut open = 0;
    for &index in order {
        let length = examples[index].length();
        let place = rows[open..].iter().position(|(used, _)| used + length <= most);
        match place.and_then(|place| rows.get_mut(open + place)) {
            Some((used, row)) => {
                *used += length;
                row.push(index);
            }
            None => rows.push((length, vec![index])),
        }
        // Rows long since full need not be looked at for every example.
        open = open.max(rows.len().saturating_sub(64));
    }
    rows.into_iter().map(|(_, row)| row).collect()
}

/// Sequences of one kind: all samples of a batch, or all preferred answers.
#[derive(Clone, Debug)]
pub struct Stream {
    /// `[B, L]` int32, all tokens but the last.
    pub inputs: Array,
    /// `[B, L]` int32, all but the first: what each input is followed by.
    pub targets: Array,
    /// `[B, L]` float32, 1 where a target is learned.
    pub mask: Array,
    /// `[B, L]` float32, 1 where a target is part of a prompt.
    pub prompt: Array,
    /// Places in `B * L` that a loss may look at: learned or part of a prompt.
    places: Vec<u32>,
    /// The part of `places` that is learned.
    learned: Vec<u32>,
}

impl Stream {
    /// The places whose loss counts.
    pub(super) fn looked_at(&self, prompts: bool) -> &[u32] {
        if prompts { &self.places } else { &self.learned }
    }
}

/// What a step takes.
#[derive(Clone, Debug)]
pub struct Batch {
    /// One for samples; two for pairs, preferred answers first.
    pub streams: Vec<Stream>,
    /// Targets that are learned, of all streams.
    pub tokens: usize,
    /// Inputs at the start that both sequences of a pair share and that are computed once.
    pub shared_prefix: Option<i32>,
    /// For packed rows, the number of the example that each input belongs to, `[B, L]` int32.
    pub segments: Option<Array>,
}

impl Batch {
    fn new(rows: &[Vec<usize>], examples: &[Example], options: &BatchOptions) -> Result<Self> {
        let of = |index: &usize| examples.get(*index);
        let streams = rows.iter().flatten().find_map(of).map_or(0, |example| example.sequences.len());
        if options.packing {
            return Self::packed(rows, examples, options);
        }
        let members: Vec<&Example> = rows.iter().flatten().filter_map(of).collect();
        let mut built = Vec::with_capacity(streams);
        let mut tokens = 0;
        for side in 0..streams {
            let pair = streams > 1;
            let sequences: Vec<_> =
                members.iter().filter_map(|example| example.sequences.get(side)).collect();
            let longest = sequences.iter().map(|sequence| sequence.tokens.len()).max().unwrap_or(0);
            let padded = 1 + longest.div_ceil(PADDING) * PADDING;
            // A lone pair needs no padding, and sharing its prompt allows none.
            let width = if pair && sequences.len() == 1 { longest } else { padded.min(options.max_length) };
            let mut rows = Rows::new(sequences.len(), width);
            for (row, sequence) in sequences.iter().enumerate() {
                let length = sequence.tokens.len().min(width);
                rows.write(row, 0, &sequence.tokens[..length]);
                // mlx-lm counts the position after the end, too: a padded row learns one padding token.
                let end = if pair { length } else { (length + 1).min(width) };
                rows.learn(row, sequence.prompt.max(1)..end);
                rows.read(row, 1..sequence.prompt.min(length));
            }
            tokens += rows.mask.iter().filter(|learned| **learned > 0.0).count();
            built.push(rows.stream()?);
        }
        let shared_prefix = match (options.prefix_sharing, &members[..]) {
            (true, [pair]) => shared(pair),
            _ => None,
        };
        Ok(Self { streams: built, tokens, shared_prefix, segments: None })
    }

    fn packed(rows: &[Vec<usize>], examples: &[Example], options: &BatchOptions) -> Result<Self> {
        let sequences = |row: &[usize]| -> Vec<_> {
            row.iter().filter_map(|index| examples.get(*index)?.sequences.first()).collect()
        };
        let length = |row: &Vec<usize>| sequences(row).iter().map(|s| s.tokens.len()).sum::<usize>();
        let longest = rows.iter().map(length).max().unwrap_or(0);
        let width = (1 + longest.div_ceil(PADDING) * PADDING).min(options.max_length.max(longest));
        let mut built = Rows::new(rows.len(), width);
        let mut segments = vec![-1i32; rows.len() * width];
        for (row, members) in rows.iter().enumerate() {
            let mut start = 0;
            for (number, sequence) in (0i32..).zip(sequences(members)) {
                let end = start + sequence.tokens.len();
                built.write(row, start, &sequence.tokens);
                // The first token of an example follows another example's last.
                built.learn(row, start + sequence.prompt.max(1)..end);
                built.read(row, start + 1..(start + sequence.prompt).min(end));
                segments[row * width + start..row * width + end].fill(number);
                start = end;
            }
        }
        let tokens = built.mask.iter().filter(|learned| **learned > 0.0).count();
        let segments = Array::from_slice(&segments, &[rows.len() as i32, width as i32])?;
        let segments = segments.slice(1, 0, width as i32 - 1)?;
        Ok(Self { streams: vec![built.stream()?], tokens, shared_prefix: None, segments: Some(segments) })
    }
}

/// Inputs that the two sequences share, where both have some beyond.
fn shared(pair: &Example) -> Option<i32> {
    let [chosen, rejected] = &pair.sequences[..] else { return None };
    let prompt = chosen.prompt.min(rejected.prompt);
    let same = chosen.tokens.get(..prompt)? == rejected.tokens.get(..prompt)?;
    let beyond = chosen.tokens.len() > prompt + 1 && rejected.tokens.len() > prompt + 1;
    i32::try_from(prompt).ok().filter(|prompt| *prompt > 0 && same && beyond)
}

/// Padded rows while they are filled; positions are those of whole rows, the first of which is no target.
struct Rows {
    count: usize,
    width: usize,
    ids: Vec<i32>,
    mask: Vec<f32>,
    prompt: Vec<f32>,
}

impl Rows {
    fn new(count: usize, width: usize) -> Self {
        let size = count * width;
        Self { count, width, ids: vec![0; size], mask: vec![0.0; size], prompt: vec![0.0; size] }
    }

    fn write(&mut self, row: usize, start: usize, tokens: &[u32]) {
        let start = row * self.width + start;
        for (place, token) in self.ids[start..].iter_mut().zip(tokens) {
            *place = *token as i32;
        }
    }

    fn learn(&mut self, row: usize, positions: std::ops::Range<usize>) {
        let start = row * self.width;
        positions.for_each(|position| self.mask[start + position] = 1.0);
    }

    fn read(&mut self, row: usize, positions: std::ops::Range<usize>) {
        let start = row * self.width;
        positions.for_each(|position| self.prompt[start + position] = 1.0);
    }

    fn stream(&self) -> Result<Stream> {
        let (count, width) = (self.count as i32, self.width as i32);
        let ids = Array::from_slice(&self.ids, &[count, width])?;
        let targets_of = |values: &[f32]| Array::from_slice(values, &[count, width])?.slice(1, 1, width);
        let chosen = |wanted: &dyn Fn(usize) -> bool| -> Vec<u32> {
            let short = self.width - 1;
            let places = (0..self.count * short)
                .filter(|place| wanted(place / short * self.width + place % short + 1));
            places.map(|place| place as u32).collect()
        };
        Ok(Stream {
            inputs: ids.slice(1, 0, width - 1)?,
            targets: ids.slice(1, 1, width)?,
            mask: targets_of(&self.mask)?,
            prompt: targets_of(&self.prompt)?,
            places: chosen(&|place| self.mask[place] > 0.0 || self.prompt[place] > 0.0),
            learned: chosen(&|place| self.mask[place] > 0.0),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::dataset::Sequence;
    use super::*;

    const OPTIONS: BatchOptions = BatchOptions {
        size: 2,
        max_length: 64,
        grouping: Grouping::File,
        packing: false,
        prefix_sharing: false,
    };

    fn sample(length: usize, prompt: usize) -> Example {
        let tokens = (1..=length as u32).collect();
        Example { sequences: vec![Sequence { tokens, prompt }], fields: 1 }
    }

    fn build(examples: &[Example], options: &BatchOptions) -> Batch {
        Batches::new(examples, options).unwrap().build(0, examples, options).unwrap()
    }

    /// mlx-lm's padding and mask around a multiple of 32 (unsloth-zoo #672): the position after the end counts.
    #[test]
    fn lengths_around_a_multiple_of_the_padding_learn_as_many_tokens_as_in_mlx_lm() {
        let learned = |length: usize, most: usize| {
            let options = BatchOptions { size: 1, max_length: most, ..OPTIONS };
            let batch = build(&[sample(length, 0)], &options);
            (batch.streams[0].inputs.dim(1), batch.tokens)
        };
        assert_eq!(learned(31, 100), (32, 31));
        assert_eq!(learned(32, 100), (32, 32));
        assert_eq!(learned(33, 100), (64, 33));
        // Cut to 33: nothing is padded, and nothing comes after the end.
        assert_eq!(learned(33, 33), (32, 32));
    }

    #[test]
    fn prompts_are_read_and_answers_learned() {
        let batch = build(&[sample(5, 3), sample(8, 2)], &OPTIONS);
        let stream = &batch.streams[0];
        let mask = stream.mask.to_f32_vec().unwrap();
        assert_eq!(mask[..6], [0.0, 0.0, 1.0, 1.0, 1.0, 0.0]);
        assert_eq!(stream.prompt.to_f32_vec().unwrap()[..4], [1.0, 1.0, 0.0, 0.0]);
        assert_eq!(stream.learned[..4], [2, 3, 4, 33]);
        assert_eq!(stream.places[..3], [0, 1, 2]);
    }

    #[test]
    fn a_pair_may_share_its_prompt() {
        let side = |tokens: &[u32], prompt| Sequence { tokens: tokens.to_vec(), prompt };
        let pair = |rejected| Example { sequences: vec![side(&[1, 2, 3, 9, 8], 3), rejected], fields: 3 };
        let options = BatchOptions { size: 1, prefix_sharing: true, ..OPTIONS };
        let shared = |rejected| build(&[pair(rejected)], &options).shared_prefix;
        assert_eq!(shared(side(&[1, 2, 3, 7, 7, 7], 3)), Some(3));
        assert_eq!(shared(side(&[1, 2, 4, 7, 7], 3)), None);
        assert_eq!(shared(side(&[1, 2, 3, 7], 3)), None);
        let batch = build(&[pair(side(&[1, 2, 3, 7, 7, 7], 3))], &options);
        assert_eq!((batch.tokens, batch.streams[1].inputs.dim(1)), (5, 5));
    }

    #[test]
    fn packed_rows_hold_several_examples() {
        let examples = [sample(20, 0), sample(40, 0), sample(10, 4), sample(60, 0)];
        let options = BatchOptions { size: 1, packing: true, ..OPTIONS };
        let batches = Batches::new(&examples, &options).unwrap();
        assert_eq!(batches.len(), 3);
        let batch = batches.build(0, &examples, &options).unwrap();
        assert_eq!(batch.tokens, 19 + 39);
        let segments = batch.segments.unwrap().to_vec::<i32>().unwrap();
        assert_eq!((segments[19], segments[20], segments[60]), (0, 1, -1));
        // The example that fits nowhere else opens the next row.
        assert_eq!(batches.build(1, &examples, &options).unwrap().tokens, 6);
    }

    /// Fewer rows than a batch takes (mlx-lm #857): both numbers are told.
    #[test]
    fn too_few_examples_are_told_with_both_numbers() {
        let error = Batches::new(&[sample(4, 0)], &OPTIONS).unwrap_err().to_string();
        assert!(error.starts_with("1 examples are fewer than a batch of 2"), "{error}");
    }

    #[test]
    fn examples_of_a_length_share_a_batch_if_asked_for() {
        let examples = [sample(30, 0), sample(4, 0), sample(31, 0), sample(5, 0)];
        let by = |grouping| Batches::new(&examples, &BatchOptions { grouping, ..OPTIONS }).unwrap().groups;
        assert_eq!(by(Grouping::File), [[[0], [1]], [[2], [3]]]);
        assert_eq!(by(Grouping::Length), [[[1], [3]], [[0], [2]]]);
    }
}
