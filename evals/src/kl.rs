//! How far a model strays from a reference, in nats a token: KL(reference || model), teacher-forced.
//!
//! Two models, or one under two arithmetics, are compared over whole prompts ([`compare`]); a packed key-value cache over
//! the last positions of each, as serving computes them ([`serving_decode`]). The mean is that of the prompts' means;
//! median and 95th percentile are over all tokens together.

use std::ops::ControlFlow;

use mlx_bun::cache::{LayerCache, make_prompt_cache, maybe_quantize};
use mlx_bun::generate::step::KvQuantization;
use mlx_bun::mlx::{self, Array, Dtype, eval};
use mlx_bun::models::Model;
use mlx_bun::perplexity::{divergence, evaluate};
use mlx_bun::tokenizer::{Tokenizer, TokenizerError};
use serde_json::Value;

use crate::fields;

/// Names of the file with other texts, `{"text": …}` a line.
pub const FILES: &[&str] = &["kl"];
/// Prompts of a run unless asked otherwise; fewer texts are taken again and again.
pub const DEFAULT_PROMPTS: usize = 64;
/// Tokens of a prompt unless asked otherwise.
pub const DEFAULT_LENGTH: usize = 256;
/// Positions that [`serving_decode`] compares.
const DECODED: usize = 32;

/// Texts of many kinds; each is one prompt.
pub const TEXTS: [&str; 16] = [
    "The harbour of the old town lies behind two breakwaters that were built after the storms of the last century. Fishing boats leave before dawn and come back with the tide, and the auction in the low brick hall is over by nine. In summer, visitors sit on the quay and watch the ferries turn.",
    "To boil an egg, bring a pot of water to a gentle simmer and lower the egg in with a spoon. Six minutes give a soft yolk, nine a firm one. Put the egg into cold water at once, otherwise it keeps cooking in its shell, and peel it under a running tap.",
    "def moving_average(values, window):\n    if window <= 0:\n        raise ValueError(\"window must be positive\")\n    total = 0.0\n    result = []\n    for index, value in enumerate(values):\n        total += value\n        if index >= window:\n            total -= values[index - window]\n        result.append(total / min(index + 1, window))\n    return result\n",
    "Photosynthesis turns light, water and carbon dioxide into sugar and oxygen. The light reactions take place in the membranes of the thylakoids, where pigments catch photons and pass electrons along a chain; the Calvin cycle then fixes carbon in the stroma, using the energy that was stored.",
    "Dear Ms Okafor,\n\nthank you for your order of 14 March. Two of the five items left our warehouse yesterday; the other three are expected next week. You will get a message with a tracking number for each parcel. Should you rather wait for one delivery, please answer this message.\n\nKind regards,\nThe dispatch team",
    "Question: A shop sells pencils in boxes of 12 and pens in boxes of 8. Maria buys 3 boxes of pencils and 5 boxes of pens. How many writing tools does she have?\nAnswer: 3 boxes of 12 are 36 pencils. 5 boxes of 8 are 40 pens. Together that makes 36 + 40 = 76.",
    "Die Brücke wurde im Jahr 1905 eröffnet und verbindet die beiden Ufer des Flusses seither ohne Unterbrechung. Nach einem Brand musste der mittlere Bogen erneuert werden. Heute fahren dort nur noch Straßenbahnen und Fahrräder; Autos benutzen den Tunnel weiter südlich.",
    "SELECT customers.name, COUNT(orders.id) AS orders, SUM(orders.total) AS revenue\nFROM customers\nLEFT JOIN orders ON orders.customer_id = customers.id\nWHERE orders.created_at >= '2024-01-01'\nGROUP BY customers.name\nHAVING SUM(orders.total) > 1000\nORDER BY revenue DESC;",
    "In chess, a fork is a move that attacks two pieces at once. Knights are good at it, because they attack squares that no other piece can reach from the same place. A beginner learns to look for forks first and for pins second, and only then for quiet moves that prepare both.",
    "{\"name\": \"weather station\", \"location\": {\"latitude\": 47.37, \"longitude\": 8.54}, \"readings\": [{\"time\": \"06:00\", \"temperature\": 4.5, \"wind\": 12}, {\"time\": \"12:00\", \"temperature\": 11.0, \"wind\": 20}, {\"time\": \"18:00\", \"temperature\": 8.2, \"wind\": 9}], \"status\": \"ok\"}",
    "Le marché se tient chaque samedi sur la place de l'église. On y trouve des fromages de chèvre, du miel, des pommes anciennes et, en automne, des champignons que les habitants ramassent dans la forêt voisine. Vers midi, les marchands rangent leurs étals et le café se remplit.",
    "The court held that the contract was void because one party had been misled about a material fact. A statement of opinion would not have sufficed, but the seller had given figures that he knew to be wrong. The buyer was entitled to her deposit and to the costs of the survey.",
    "\"You could have told me,\" she said, and set the lamp on the table. He looked at the window. It had begun to rain again, the thin rain of the hills that never seems to fall but is simply there. \"I thought you knew,\" he said. \"Everybody else did.\"",
    "A binary search needs a sorted list. Compare the wanted value with the middle element: if they are equal, the search is over; if the value is smaller, go on with the left half, otherwise with the right one. Each step halves the list, so a million elements take about twenty comparisons.",
    "Patients were assigned at random to one of two groups. After twelve weeks, systolic pressure had fallen by 9.1 mmHg in the treatment group and by 3.4 mmHg in the control group (difference 5.7, 95 % confidence interval 3.2 to 8.2). Adverse events were mild and equally frequent in both.",
    "El tren salió de la estación con media hora de retraso. Los pasajeros, resignados, sacaron libros, bocadillos y teléfonos; un niño contaba los postes de la luz en voz alta. Al llegar a la costa, el mar apareció de pronto entre dos colinas, tan azul que todos callaron.",
];

/// What was found.
#[derive(Clone, Debug, PartialEq)]
pub struct Divergence {
    /// Mean of the prompts' means.
    pub mean: f64,
    /// Over all tokens.
    pub median: f64,
    /// Over all tokens.
    pub p95: f64,
    /// Share of the positions where both find the same token likeliest; `None` where it is not measured.
    pub agreement: Option<f64>,
    /// The mean of each prompt.
    pub prompts: Vec<f64>,
    /// Positions.
    pub tokens: usize,
}

impl Divergence {
    fn of(prompts: &[Vec<f32>], agreements: Option<f64>) -> Self {
        let mean = |values: &[f32]| {
            values.iter().map(|value| f64::from(*value)).sum::<f64>() / values.len().max(1) as f64
        };
        let means: Vec<f64> = prompts.iter().map(|values| mean(values)).collect();
        let mut all: Vec<f32> = prompts.concat();
        all.sort_by(f32::total_cmp);
        // The value at floor(share * n), as it is: nothing between values is made up.
        let at = |share: f64| {
            let index = (share * all.len() as f64) as usize;
            all.get(index.min(all.len().saturating_sub(1))).copied().map_or(0.0, f64::from)
        };
        Self {
            mean: means.iter().sum::<f64>() / means.len().max(1) as f64,
            median: at(0.5),
            p95: at(0.95),
            agreement: agreements,
            tokens: all.len(),
            prompts: means,
        }
    }
}

/// Reads a row with other text.
///
/// # Errors
/// What is wrong with it.
pub fn row(_: usize, value: &Value) -> Result<String, String> {
    let text = value.as_object().and_then(|row| fields::text(row, "text").ok());
    text.map(str::to_owned).ok_or_else(|| "expected a {\"text\": \"...\"} row".to_owned())
}

/// The tokens of `count` prompts, cut to `length`; texts of less than two tokens are left out. Texts that are fewer than
/// `count` count as often as they fit in it, and once more for what is left.
///
/// # Errors
/// The tokenizer's.
pub fn prompts(
    texts: &[String],
    tokenizer: &Tokenizer,
    count: usize,
    length: usize,
) -> Result<Vec<Vec<u32>>, TokenizerError> {
    let mut prompts = Vec::new();
    for text in texts.iter().cycle().take(if texts.is_empty() { 0 } else { count }) {
        let mut tokens = tokenizer.encode_prompt(text)?;
        tokens.truncate(length.max(2));
        if tokens.len() > 1 {
            prompts.push(tokens);
        }
    }
    Ok(prompts)
}

/// Each prompt once, with its places.
fn distinct(prompts: &[Vec<u32>]) -> Vec<(&Vec<u32>, Vec<usize>)> {
    let mut distinct: Vec<(&Vec<u32>, Vec<usize>)> = Vec::new();
    for (index, prompt) in prompts.iter().enumerate() {
        match distinct.iter_mut().find(|(known, _)| *known == prompt) {
            Some((_, places)) => places.push(index),
            None => distinct.push((prompt, vec![index])),
        }
    }
    distinct
}

/// Compares `model` with `reference` on every position of the prompts. `on_done` hears the prompts done and says whether
/// to go on; `None` if it does not.
///
/// # Errors
/// When MLX fails.
pub fn compare(
    reference: &dyn Model,
    model: &dyn Model,
    prompts: &[Vec<u32>],
    on_done: &mut dyn FnMut(usize) -> ControlFlow<()>,
) -> mlx::Result<Option<Divergence>> {
    let mut divergences = vec![Vec::new(); prompts.len()];
    let (mut agreeing, mut positions, mut done) = (0usize, 0usize, 0);
    for (prompt, places) in distinct(prompts) {
        let one = std::slice::from_ref(prompt);
        let evaluation = evaluate(model, Some(reference), one, 1, &mut |_| ControlFlow::Continue(()))?;
        for sequence in evaluation.into_iter().flat_map(|evaluation| evaluation.sequences) {
            agreeing += places.len() * sequence.agreements.iter().filter(|agrees| **agrees).count();
            positions += places.len() * sequence.agreements.len();
            for place in &places {
                if let Some(values) = divergences.get_mut(*place) {
                    values.clone_from(&sequence.divergences);
                }
            }
        }
        mlx::memory::clear_cache()?;
        done += places.len();
        if on_done(done).is_break() {
            return Ok(None);
        }
    }
    Ok(Some(Divergence::of(&divergences, Some(agreeing as f64 / positions.max(1) as f64))))
}

/// What a packed cache does to decoding: the prompt up to its last positions is computed once, its cache is kept as it
/// is and packed, and the last positions are fed to both, one at a time.
///
/// # Errors
/// When MLX fails, or the model has layers whose cache cannot be packed.
pub fn serving_decode(
    model: &dyn Model,
    packing: KvQuantization,
    prompts: &[Vec<u32>],
    on_done: &mut dyn FnMut(usize) -> ControlFlow<()>,
) -> mlx::Result<Option<Divergence>> {
    let mut divergences = vec![Vec::new(); prompts.len()];
    let mut done = 0;
    for (prompt, places) in distinct(prompts) {
        let values = decode_both(model, packing, prompt)?;
        for place in &places {
            if let Some(prompt) = divergences.get_mut(*place) {
                prompt.clone_from(&values);
            }
        }
        mlx::memory::clear_cache()?;
        done += places.len();
        if on_done(done).is_break() {
            return Ok(None);
        }
    }
    Ok(Some(Divergence::of(&divergences, None)))
}

fn decode_both(model: &dyn Model, packing: KvQuantization, prompt: &[u32]) -> mlx::Result<Vec<f32>> {
    let (head, tail) = prompt.split_at(prompt.len().saturating_sub(DECODED).max(1).min(prompt.len()));
    let mut plain = make_prompt_cache(model.layer_kinds(), None);
    let mut packed = make_prompt_cache(model.layer_kinds(), None);
    let ids = Array::from_slice(head, &[1, head.len() as i32])?;
    // Each fills a cache of its own: a clone could share memory that steps write.
    for caches in [&mut plain, &mut packed] {
        eval([&model.forward(&ids, Some(caches))?])?;
    }
    maybe_quantize(&mut packed, packing.bits, packing.group_size, 0)?;
    let mut values = Vec::with_capacity(tail.len());
    for token in tail {
        let id = Array::from_slice(&[*token], &[1, 1])?;
        let logits = |caches: &mut Vec<LayerCache>| model.forward(&id, Some(caches))?.astype(Dtype::Float32);
        let (reference, candidate) = (logits(&mut plain)?, logits(&mut packed)?);
        values.extend(divergence(&reference, &candidate)?.to_f32_vec()?);
        maybe_quantize(&mut packed, packing.bits, packing.group_size, 0)?;
    }
    Ok(values)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn means_are_of_prompts_and_percentiles_of_tokens() {
        let found = Divergence::of(&[vec![0.0, 1.0], vec![4.0]], None);
        assert_eq!((found.mean, found.median, found.p95, found.tokens), (2.25, 1.0, 4.0, 3));
        assert_eq!(found.prompts, [0.5, 4.0]);
        let nothing = Divergence::of(&[], None);
        assert_eq!((nothing.mean, nothing.median, nothing.tokens), (0.0, 0.0, 0));
    }

    #[test]
    fn rows_are_texts() {
        assert_eq!(row(0, &serde_json::json!({"text": "a"})), Ok("a".to_owned()));
        let expected = Err("expected a {\"text\": \"...\"} row".to_owned());
        assert_eq!(row(0, &serde_json::json!({"txt": "a"})), expected);
        assert_eq!(row(0, &serde_json::json!("a")), expected);
    }

    #[test]
    fn the_same_prompt_is_computed_once() {
        let prompts = [vec![1, 2], vec![3], vec![1, 2]];
        let places: Vec<Vec<usize>> = distinct(&prompts).into_iter().map(|(_, places)| places).collect();
        assert_eq!(places, [vec![0, 2], vec![1]]);
    }
}
