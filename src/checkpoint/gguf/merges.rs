//! Merges of a BPE vocabulary: as the file lists them, or recovered from SentencePiece scores.

use std::cmp::Ordering;

use super::error::Fault;
use super::value::Array;
use super::vocabulary::{TokenKind, Vocabulary};

/// Longest SentencePiece token, in bytes. Trained ones have at most sixteen characters; the limit bounds the
/// merges that a hostile vocabulary can ask for.
const MAX_PIECE_BYTES: usize = 256;

/// Pairs of tokens to join, first rule first.
pub type Merges<'v> = Vec<(&'v str, &'v str)>;

/// The merges of `tokenizer.ggml.merges`: two texts with a space between.
///
/// # Errors
/// If one is not two tokens that join to a third.
pub fn listed<'v>(array: Array<'v>, vocabulary: &Vocabulary<'_>) -> Result<Merges<'v>, Fault> {
    const KEY: &str = "tokenizer.ggml.merges";
    let strings = array.strings().ok_or_else(|| Fault::key(KEY, "does not hold strings"))?;
    let mut merges = Vec::with_capacity(array.len());
    let mut joined = String::new();
    for (index, bytes) in strings.enumerate() {
        let refuse = |problem: &str| Fault::Tokenizer(format!("merge {index} {problem}"));
        let text = std::str::from_utf8(bytes).map_err(|_| refuse("is not UTF-8"))?;
        // The space between comes after the first character: that one may be a space itself.
        let first = text.chars().next().map_or(0, char::len_utf8);
        let space = text[first..].find(' ').ok_or_else(|| refuse(&format!("({text:?}) is not a pair")))?;
        let (left, right) = (&text[..first + space], &text[first + space + 1..]);
        joined.clear();
        joined.extend([left, right]);
        if [left, right, &joined].into_iter().any(|token| vocabulary.id(token).is_none()) {
            return Err(refuse(&format!("({text:?}) involves a text that is not a token")));
        }
        merges.push((left, right));
    }
    Ok(merges)
}

/// The merges that make SentencePiece's choices: it always joins the neighbours whose union has the best
/// score, so each token stands for every split of it into two others, ranked by its score.
///
/// Within one score the order is that of transformers' `generate_merges`. If all scores are equal (files made
/// from a tokenizer.json without scores) tokens rank by id. Control, unknown and byte tokens are not
/// spelled by text, and user-defined ones are matched before any merge.
///
/// # Errors
/// If the vocabulary has no scores or an absurdly long token.
pub fn from_scores<'v>(vocabulary: &'v Vocabulary<'_>) -> Result<Merges<'v>, Fault> {
    let scores =
        vocabulary.scores.as_ref().ok_or_else(|| Fault::MissingKey("tokenizer.ggml.scores".to_owned()))?;
    let spelled = |id: u32| matches!(vocabulary.kind(id), Some(TokenKind::Normal | TokenKind::Unused));
    let ranked = scores.windows(2).any(|pair| pair[0] != pair[1]);

    let mut merges = Vec::new();
    for ((id, text), &score) in (0_u32..).zip(&vocabulary.tokens).zip(scores) {
        if !spelled(id) {
            continue;
        }
        if text.len() > MAX_PIECE_BYTES {
            let length = text.len();
            return Err(Fault::Tokenizer(format!(
                "token {id} has {length} bytes, more than {MAX_PIECE_BYTES}"
            )));
        }
        let characters = text.chars().count();
        for (left_characters, (at, _)) in text.char_indices().enumerate().skip(1) {
            let (left, right) = text.split_at(at);
            if let Some(left_id) = vocabulary.id(left).filter(|&id| spelled(id))
                && let Some(right_id) = vocabulary.id(right).filter(|&id| spelled(id))
            {
                let score = if ranked { score } else { 0.0 };
                let lengths = if ranked { (left_characters, characters - left_characters) } else { (0, 0) };
                merges.push(Split { score, lengths, id, parts: (left_id, right_id), texts: (left, right) });
            }
        }
    }
    merges.sort_by(Split::order);
    Ok(merges.into_iter().map(|split| split.texts).collect())
}

/// One way to make a token of two others.
struct Split<'v> {
    score: f32,
    lengths: (usize, usize),
    id: u32,
    parts: (u32, u32),
    texts: (&'v str, &'v str),
}

impl Split<'_> {
    /// Best score first, then the longer left part, then by id.
    fn order(&self, other: &Self) -> Ordering {
        (other.score.total_cmp(&self.score))
            .then_with(|| other.lengths.cmp(&self.lengths))
            .then_with(|| (self.id, self.parts).cmp(&(other.id, other.parts)))
    }
}
