//! tokenizer.json's decoder as a streaming pipeline.
//!
//! The `tokenizers` crate decodes a whole list of ids at once. Generation needs the text token by token, and
//! decoding a window again at every step (as most detokenizers do) is both slow and wrong at its edges.
//! Here each decoder of the file becomes a [`Stage`] that keeps what it cannot yet decide: bytes of an
//! unfinished character, a run of byte-fallback tokens, a space that may be stripped. What the stages let
//! out, joined, is what `tokenizers` decodes from the whole list, whatever the ids, and the work is linear.
//!
//! Between stages travel either whole tokens or, after a decoder that fuses them, pieces of one long token.
//! A decoder that cannot work on pieces of a fused token ([`Stage::Whole`]) waits for its end.

use std::sync::Arc;

use tokenizers::decoders::{DecoderWrapper, wordpiece};
use tokenizers::pre_tokenizers::metaspace::PrependScheme;
use tokenizers::tokenizer::Decoder as _;

/// What transformers' `clean_up_tokenization` replaces, in its order (transformers tokenization_utils_base.py).
const CLEAN_UP: [(&str, &str); 10] = [
    (" .", "."),
    (" ?", "?"),
    (" !", "!"),
    (" ,", ","),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" 's", "'s"),
    (" 've", "'ve"),
    (" 're", "'re"),
];

/// A chain of decoding stages with the state of one sequence. Cloning an unused one starts another sequence.
#[derive(Clone)]
pub(super) struct Pipeline {
    stages: Vec<Stage>,
}

impl Pipeline {
    /// The stages of `decoder`; without one, tokens are joined by spaces as `tokenizers` does. `clean_up`
    /// appends transformers' removal of spaces before punctuation.
    pub(super) fn new(decoder: Option<&DecoderWrapper>, clean_up: bool) -> Self {
        let mut stages = Vec::new();
        match decoder {
            Some(decoder) => {
                append(decoder, false, &mut stages);
            }
            None => stages.push(Stage::JoinWithSpaces { first: true }),
        }
        if clean_up {
            stages.extend(CLEAN_UP.iter().map(|(pattern, content)| Stage::replace_pieces(pattern, content)));
        }
        Self { stages }
    }

    /// Feeds one token and appends the text that became certain to `out`.
    pub(super) fn push(&mut self, token: String, out: &mut String) {
        push_through(&mut self.stages, token, out);
    }

    /// The bytes that one token stands for in the middle of a sequence; part of a character for some.
    pub(super) fn bytes_of(&self, token: String) -> Vec<u8> {
        match self.stages.first() {
            Some(Stage::ByteLevel { .. }) => {
                let mut bytes = Vec::new();
                push_byte_level(&token, &mut bytes);
                return bytes;
            }
            _ if self.stages.iter().any(|stage| matches!(stage, Stage::ByteFallback { .. })) => {
                if let Some(byte) = fallback_byte(&token) {
                    return vec![byte];
                }
            }
            _ => {}
        }
        let mut inside = self.clone();
        inside.stages.iter_mut().for_each(Stage::skip_start);
        let mut text = String::new();
        inside.push(token, &mut text);
        inside.finish(&mut text);
        text.into_bytes()
    }

    /// Ends the sequence and appends everything still held back.
    pub(super) fn finish(&mut self, out: &mut String) {
        for index in 0..self.stages.len() {
            let mut rest = Vec::new();
            let (done, later) = self.stages.split_at_mut(index + 1);
            if let Some(stage) = done.last_mut() {
                stage.finish(&mut rest);
            }
            for text in rest {
                push_through(later, text, out);
            }
        }
    }
}

fn push_through(stages: &mut [Stage], text: String, out: &mut String) {
    let Some((stage, later)) = stages.split_first_mut() else {
        out.push_str(&text);
        return;
    };
    let mut produced = Vec::new();
    stage.push(text, &mut produced);
    for text in produced {
        push_through(later, text, out);
    }
}

/// Appends the stages of `decoder` and says whether tokens are fused after it. `fused` says whether they
/// were before.
fn append(decoder: &DecoderWrapper, fused: bool, stages: &mut Vec<Stage>) -> bool {
    use DecoderWrapper as D;
    let stage = match (decoder, fused) {
        (D::Sequence(sequence), _) => {
            return sequence
                .get_decoders()
                .iter()
                .fold(fused, |fused, decoder| append(decoder, fused, stages));
        }
        (D::Fuse(_), _) => return true,
        (D::ByteLevel(_), false) => Stage::ByteLevel { pending: Vec::new() },
        (D::ByteFallback(_), false) => Stage::ByteFallback { run: Vec::new() },
        (D::Metaspace(metaspace), _) => Stage::Metaspace {
            replacement: metaspace.get_replacement(),
            drop_first: metaspace.get_prepend_scheme() != PrependScheme::Never,
            first: true,
            fused,
        },
        (D::Strip(strip), fused) => {
            let edges = Edges { content: strip.content, start: strip.start, stop: strip.stop };
            if fused {
                Stage::StripPieces { edges, start_left: strip.start, held: String::new() }
            } else {
                Stage::StripTokens(edges)
            }
        }
        (D::WordPiece(wordpiece), false) => Stage::WordPiece {
            prefix: wordpiece.prefix.as_str().into(),
            cleanup: wordpiece.cleanup,
            first: true,
        },
        (D::CTC(ctc), false) => Stage::Ctc {
            pad: ctc.pad_token.as_str().into(),
            delimiter: ctc.word_delimiter_token.as_str().into(),
            cleanup: ctc.cleanup,
            last: None,
        },
        (D::BPE(bpe), false) => Stage::WordSuffix { suffix: bpe.suffix.as_str().into(), held: None },
        (D::Replace(replace), fused) => match literal_pattern(decoder) {
            Some(pattern) if fused => Stage::replace_pieces(&pattern, &replace.content),
            Some(pattern) => Stage::ReplaceTokens {
                pattern: pattern.as_str().into(),
                content: replace.content.as_str().into(),
            },
            None if fused => Stage::whole(decoder),
            None => Stage::EachToken(Arc::new(decoder.clone())),
        },
        (D::ByteLevel(_) | D::ByteFallback(_) | D::WordPiece(_) | D::CTC(_) | D::BPE(_), true) => {
            Stage::whole(decoder)
        }
    };
    let fused = fused || matches!(stage, Stage::ByteLevel { .. });
    stages.push(stage);
    fused
}

/// The non-empty string that a `Replace` decoder looks for, or None for a regular expression.
fn literal_pattern(decoder: &DecoderWrapper) -> Option<String> {
    let json = serde_json::to_value(decoder).ok()?;
    json.get("pattern")?.get("String")?.as_str().filter(|pattern| !pattern.is_empty()).map(str::to_owned)
}

#[derive(Clone, Copy)]
struct Edges {
    content: char,
    start: usize,
    stop: usize,
}

/// One decoder with its state. `Arc`s hold what all sequences share.
#[derive(Clone)]
enum Stage {
    /// No decoder in the file.
    JoinWithSpaces {
        first: bool,
    },
    /// Bytes written as printable characters, a token of other characters as itself. Fuses.
    ByteLevel {
        pending: Vec<u8>,
    },
    /// `<0xE2>` tokens. A run that is not UTF-8 as a whole becomes one U+FFFD a byte, so only the token
    /// after the run settles it.
    ByteFallback {
        run: Vec<u8>,
    },
    /// `▁` becomes a space, and nothing in the first token.
    Metaspace {
        replacement: char,
        drop_first: bool,
        first: bool,
        fused: bool,
    },
    /// `##` continues a word, anything else starts one.
    WordPiece {
        prefix: Arc<str>,
        cleanup: bool,
        first: bool,
    },
    /// Repeated tokens count once.
    Ctc {
        pad: Arc<str>,
        delimiter: Arc<str>,
        cleanup: bool,
        last: Option<String>,
    },
    /// `</w>` is a space except in the last token.
    WordSuffix {
        suffix: Arc<str>,
        held: Option<String>,
    },
    StripTokens(Edges),
    StripPieces {
        edges: Edges,
        start_left: usize,
        held: String,
    },
    ReplaceTokens {
        pattern: Arc<str>,
        content: Arc<str>,
    },
    ReplacePieces {
        pattern: Arc<str>,
        content: Arc<str>,
        held: String,
    },
    /// A decoder that treats each token for itself.
    EachToken(Arc<DecoderWrapper>),
    /// A decoder that needs the whole fused token.
    Whole {
        decoder: Arc<DecoderWrapper>,
        text: String,
    },
}

impl Stage {
    fn replace_pieces(pattern: &str, content: &str) -> Self {
        Stage::ReplacePieces { pattern: pattern.into(), content: content.into(), held: String::new() }
    }

    fn whole(decoder: &DecoderWrapper) -> Self {
        Stage::Whole { decoder: Arc::new(decoder.clone()), text: String::new() }
    }

    /// Goes on as if a token had come before.
    fn skip_start(&mut self) {
        match self {
            Stage::JoinWithSpaces { first }
            | Stage::Metaspace { first, .. }
            | Stage::WordPiece { first, .. } => {
                *first = false;
            }
            Stage::StripPieces { start_left, .. } => *start_left = 0,
            _ => {}
        }
    }

    fn push(&mut self, token: String, out: &mut Vec<String>) {
        match self {
            Stage::JoinWithSpaces { first } => {
                let token = if *first { token } else { format!(" {token}") };
                *first = false;
                out.push(token);
            }
            Stage::ByteLevel { pending } => {
                push_byte_level(&token, pending);
                let text = take_complete_utf8(pending);
                if !text.is_empty() {
                    out.push(text);
                }
            }
            Stage::ByteFallback { run } => match fallback_byte(&token) {
                Some(byte) => run.push(byte),
                None => {
                    end_run(run, out);
                    out.push(token);
                }
            },
            Stage::Metaspace { replacement, drop_first, first, fused } => {
                let text = if *first && *drop_first {
                    token.chars().filter(|c| c != replacement).collect()
                } else {
                    token.chars().map(|c| if c == *replacement { ' ' } else { c }).collect()
                };
                *first &= *fused;
                out.push(text);
            }
            Stage::WordPiece { prefix, cleanup, first } => {
                let text = match token.strip_prefix(&**prefix) {
                    _ if *first => token,
                    Some(rest) => rest.to_owned(),
                    None => format!(" {token}"),
                };
                *first = false;
                out.push(if *cleanup { wordpiece::cleanup(&text) } else { text });
            }
            Stage::Ctc { pad, delimiter, cleanup, last } => {
                if last.as_deref() == Some(&token) {
                    return;
                }
                let mut text = token.replace(&**pad, "");
                if *cleanup {
                    text = wordpiece::cleanup(&text).replace(&**delimiter, " ");
                }
                *last = Some(token);
                if !text.is_empty() {
                    out.push(text);
                }
            }
            Stage::WordSuffix { suffix, held } => {
                if let Some(previous) = held.replace(token) {
                    out.push(previous.replace(&**suffix, " "));
                }
            }
            Stage::StripTokens(edges) => out.push(strip(&token, *edges).to_owned()),
            Stage::StripPieces { edges, start_left, held } => {
                held.push_str(&token);
                strip_piece(*edges, start_left, held, out);
            }
            Stage::ReplaceTokens { pattern, content } => out.push(token.replace(&**pattern, content)),
            Stage::ReplacePieces { pattern, content, held } => {
                held.push_str(&token);
                replace_piece(pattern, content, held, out);
            }
            Stage::EachToken(decoder) => decode_with(decoder, token, out),
            Stage::Whole { text, .. } => text.push_str(&token),
        }
    }

    fn finish(&mut self, out: &mut Vec<String>) {
        match self {
            Stage::ByteLevel { pending } if !pending.is_empty() => {
                out.push(String::from_utf8_lossy(pending).into_owned());
                pending.clear();
            }
            Stage::ByteFallback { run } => end_run(run, out),
            Stage::WordSuffix { suffix, held } => {
                out.extend(held.take().map(|last| last.replace(&**suffix, "")));
            }
            Stage::StripPieces { edges, start_left, held } => {
                let rest = Edges { start: *start_left, ..*edges };
                out.push(strip(held, rest).to_owned());
                held.clear();
            }
            Stage::ReplacePieces { held, .. } => out.push(std::mem::take(held)),
            Stage::Whole { decoder, text } => decode_with(decoder, std::mem::take(text), out),
            _ => {}
        }
    }
}

fn decode_with(decoder: &DecoderWrapper, token: String, out: &mut Vec<String>) {
    // A `Replace` never fails to decode; the signature is the trait's.
    if let Ok(texts) = decoder.decode_chain(vec![token]) {
        out.extend(texts);
    }
}

/// The bytes of a byte-level token; a token with a character outside GPT-2's table (an added token) stands
/// for its own UTF-8.
fn push_byte_level(token: &str, bytes: &mut Vec<u8>) {
    let start = bytes.len();
    for c in token.chars() {
        match byte_of(c) {
            Some(byte) => bytes.push(byte),
            None => {
                bytes.truncate(start);
                bytes.extend_from_slice(token.as_bytes());
                return;
            }
        }
    }
}

/// GPT-2's table from printable characters to bytes (openai/gpt-2 src/encoder.py, `bytes_to_unicode`):
/// printable Latin-1 stands for itself, the other 68 bytes were moved to U+0100 and up in order.
pub(super) fn byte_of(c: char) -> Option<u8> {
    match u32::from(c) {
        code @ (0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff) => u8::try_from(code).ok(),
        code @ 0x100..=0x120 => u8::try_from(code - 0x100).ok(),
        code @ 0x121..=0x142 => u8::try_from(code - 0x121 + 0x7f).ok(),
        0x143 => Some(0xad),
        _ => None,
    }
}

/// Takes the decided part of `bytes`: complete characters, and U+FFFD for what can never become one, split
/// as `String::from_utf8_lossy` splits it. An unfinished character at the end stays.
fn take_complete_utf8(bytes: &mut Vec<u8>) -> String {
    let mut text = String::new();
    let mut done = 0;
    while let Some(rest) = bytes.get(done..) {
        match std::str::from_utf8(rest) {
            Ok(valid) => {
                text.push_str(valid);
                done = bytes.len();
                break;
            }
            Err(error) => {
                let valid = error.valid_up_to();
                text.push_str(&String::from_utf8_lossy(&rest[..valid]));
                done += valid;
                match error.error_len() {
                    Some(length) => {
                        text.push(char::REPLACEMENT_CHARACTER);
                        done += length;
                    }
                    None => break,
                }
            }
        }
    }
    bytes.drain(..done);
    text
}

/// The byte of a token such as `<0x0A>`, as `tokenizers`' ByteFallback reads it.
pub(super) fn fallback_byte(token: &str) -> Option<u8> {
    if token.len() != 6 {
        return None;
    }
    let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
    u8::from_str_radix(digits, 16).ok()
}

fn end_run(run: &mut Vec<u8>, out: &mut Vec<String>) {
    if run.is_empty() {
        return;
    }
    let length = run.len();
    match String::from_utf8(std::mem::take(run)) {
        Ok(text) => out.push(text),
        Err(_) => out.push(char::REPLACEMENT_CHARACTER.to_string().repeat(length)),
    }
}

fn strip(text: &str, edges: Edges) -> &str {
    let mut text = text;
    for _ in 0..edges.start {
        match text.strip_prefix(edges.content) {
            Some(rest) => text = rest,
            None => break,
        }
    }
    for _ in 0..edges.stop {
        match text.strip_suffix(edges.content) {
            Some(rest) => text = rest,
            None => break,
        }
    }
    text
}

/// Emits what no later piece can strip: all but the last `stop` characters of a trailing run.
fn strip_piece(edges: Edges, start_left: &mut usize, held: &mut String, out: &mut Vec<String>) {
    while *start_left > 0 && !held.is_empty() {
        if !held.starts_with(edges.content) {
            *start_left = 0;
            break;
        }
        held.remove(0);
        *start_left -= 1;
    }
    let width = edges.content.len_utf8();
    let trailing = held.chars().rev().take(edges.stop).take_while(|&c| c == edges.content).count();
    let keep = held.len() - trailing * width;
    if keep > 0 {
        let rest = held.split_off(keep);
        out.push(std::mem::replace(held, rest));
    }
}

/// Replaces as `str::replace` would on the joined pieces; keeps the longest end that may begin `pattern`.
fn replace_piece(pattern: &str, content: &str, held: &mut String, out: &mut Vec<String>) {
    let mut text = String::new();
    let mut rest = held.as_str();
    while let Some((before, after)) = rest.split_once(pattern) {
        text.push_str(before);
        text.push_str(content);
        rest = after;
    }
    let keep = pattern
        .char_indices()
        .rev()
        .map(|(end, _)| end)
        .find(|&end| rest.ends_with(&pattern[..end]))
        .unwrap_or_default();
    text.push_str(&rest[..rest.len() - keep]);
    *held = rest[rest.len() - keep..].to_owned();
    if !text.is_empty() {
        out.push(text);
    }
}

#[cfg(test)]
#[path = "decoder_tests.rs"]
mod tests;
