//! What a run printed: whether two runs said the same, and the figures it gave of itself.

use serde::Serialize;
use serde_json::Value;
use sha2::{Digest, Sha256};

/// Figures of `generate --json` by the names people use, and where they stand.
const NAMES: [(&str, &str, bool); 5] = [
    ("decode_tps", "stats.generation_tps", true),
    ("prefill_tps", "stats.prompt_tps", true),
    ("ttft", "stats.time_to_first_token", false),
    ("peak_memory", "stats.peak_memory_gb", false),
    ("wall", "", false),
];

/// What is compared.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Figure {
    /// As it was asked for.
    pub name: String,
    /// Where it stands in the command's JSON; `None` for the time on the clock.
    path: Option<String>,
    /// Whether more of it is better.
    pub higher_is_better: bool,
}

impl Figure {
    /// A name of ours, or a path of fields joined by dots. A path with `tps` or `per_second` in it is better when it is
    /// higher.
    pub fn named(name: &str) -> Self {
        match NAMES.iter().find(|(known, ..)| *known == name) {
            Some((_, path, higher)) => Self {
                name: name.to_owned(),
                path: (!path.is_empty()).then(|| (*path).to_owned()),
                higher_is_better: *higher,
            },
            None => Self {
                name: name.to_owned(),
                path: Some(name.to_owned()),
                higher_is_better: name.contains("tps") || name.contains("per_second"),
            },
        }
    }

    /// Whether the command must print JSON.
    pub fn needs_json(&self) -> bool {
        self.path.is_some()
    }

    /// The figure of a run that took so many seconds; the mean where the command printed several objects.
    ///
    /// # Errors
    /// The output has no such number, or one that cannot be compared as a ratio.
    pub fn of(&self, wall: f64, output: &Output) -> Result<f64, String> {
        let Some(path) = &self.path else { return Ok(wall) };
        if let Some(length) = output.unread {
            return Err(format!(
                "the command printed {} MiB, and figures are looked for in less",
                length >> 20
            ));
        }
        if output.objects.is_empty() {
            return Err("the command printed no JSON object".to_owned());
        }
        let numbers: Result<Vec<f64>, String> =
            output.objects.iter().map(|json| number(json, path)).collect();
        let numbers = numbers?;
        Ok(numbers.iter().sum::<f64>() / numbers.len() as f64)
    }
}

/// The positive number at a path.
fn number(json: &Value, path: &str) -> Result<f64, String> {
    let found = path.split('.').try_fold(json, |value, name| match value {
        Value::Array(items) => name.parse::<usize>().ok().and_then(|index| items.get(index)),
        value => value.get(name),
    });
    match found.and_then(Value::as_f64) {
        Some(number) if number > 0.0 && number.is_finite() => Ok(number),
        Some(number) => Err(format!("`{path}` is {number}, and only positive numbers have ratios")),
        None => Err(format!("the command's JSON has no number at `{path}`")),
    }
}

/// What identifies an output.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Identity {
    /// SHA-256 of the text and the tokens of a reply, else of all that was printed.
    pub sha256: String,
    /// Tokens, where the command says.
    pub tokens: Option<usize>,
    /// Why the reply ended, where the command says.
    pub finish_reason: Option<String>,
}

/// What a run printed.
#[derive(Clone, Debug)]
pub struct Output {
    /// The objects, if it printed nothing else: one, or one a line.
    objects: Vec<Value>,
    /// Its length, when it was too much to look into.
    unread: Option<u64>,
    /// What it said, without figures that differ from run to run.
    pub identity: Identity,
}

impl Output {
    /// Reads what was printed.
    pub fn new(stdout: &[u8]) -> Self {
        let values: Result<Vec<Value>, _> =
            serde_json::Deserializer::from_slice(stdout).into_iter().collect();
        let objects = values.ok().filter(|values| values.iter().all(Value::is_object)).unwrap_or_default();
        let replies = !objects.is_empty() && objects.iter().all(|object| object.get("text").is_some());
        let identity = if replies {
            let said: Vec<_> = objects.iter().map(|reply| (reply.get("text"), reply.get("tokens"))).collect();
            let tokens: Option<Vec<usize>> =
                objects.iter().map(|reply| Some(reply.get("tokens")?.as_array()?.len())).collect();
            let mut reasons: Vec<_> =
                objects.iter().filter_map(|reply| reply.get("finish_reason")?.as_str()).collect();
            reasons.dedup();
            Identity {
                sha256: hash(serde_json::json!(said).to_string().as_bytes()),
                tokens: tokens.map(|counts| counts.iter().sum()),
                finish_reason: (!reasons.is_empty()).then(|| reasons.join(", ")),
            }
        } else {
            Identity { sha256: hash(stdout), tokens: None, finish_reason: None }
        };
        Self { objects, unread: None, identity }
    }

    /// So much that only its hash is known.
    pub fn long(length: u64, hash: Sha256) -> Self {
        let identity = Identity { sha256: hex(&hash.finalize()), tokens: None, finish_reason: None };
        Self { objects: Vec::new(), unread: Some(length), identity }
    }
}

fn hash(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const REPLY: &str = r#"{"schema_version":1,"text":"a","tokens":[1,2],"finish_reason":"stop","stats":{"generation_tps":12.5,"time_to_first_token":0.0}}"#;

    #[test]
    fn figures_are_found_by_name_and_by_path() {
        let output = Output::new(REPLY.as_bytes());
        assert_eq!(Figure::named("decode_tps").of(1.0, &output), Ok(12.5));
        assert_eq!(Figure::named("stats.generation_tps").of(1.0, &output), Ok(12.5));
        assert_eq!(Figure::named("tokens.1").of(1.0, &output), Ok(2.0));
        assert_eq!(Figure::named("wall").of(1.5, &Output::new(b"x")), Ok(1.5));
        assert!(Figure::named("decode_tps").higher_is_better && !Figure::named("ttft").higher_is_better);
        assert!(
            Figure::named("x.tokens_per_second").higher_is_better
                && !Figure::named("seconds").higher_is_better
        );
        let error = Figure::named("ttft").of(1.0, &output).unwrap_err();
        assert_eq!(error, "`stats.time_to_first_token` is 0, and only positive numbers have ratios");
        let error = Figure::named("nothing").of(1.0, &output).unwrap_err();
        assert_eq!(error, "the command's JSON has no number at `nothing`");
        assert!(Figure::named("ttft").of(1.0, &Output::new(b"text")).is_err());
    }

    #[test]
    fn a_file_of_prompts_has_an_object_a_line() {
        let lines = format!("{REPLY}\n{}\n", REPLY.replace("12.5", "7.5").replace("stop", "length"));
        let output = Output::new(lines.as_bytes());
        assert_eq!(Figure::named("decode_tps").of(1.0, &output), Ok(10.0));
        assert_eq!(output.identity.tokens, Some(4));
        assert_eq!(output.identity.finish_reason.as_deref(), Some("stop, length"));
        let other = Output::new(lines.replacen("[1,2]", "[1,3]", 1).as_bytes());
        assert_ne!(other.identity, output.identity);
    }

    #[test]
    fn what_was_said_counts_not_how_fast() {
        let identity = |text: &str| Output::new(text.as_bytes()).identity;
        let other_speed = REPLY.replace("12.5", "99");
        assert_eq!(identity(REPLY), identity(&other_speed));
        assert_ne!(identity(REPLY).sha256, identity(&REPLY.replace("[1,2]", "[1,3]")).sha256);
        assert_eq!(identity(REPLY).tokens, Some(2));
        assert_eq!(identity(REPLY).finish_reason.as_deref(), Some("stop"));
        assert_ne!(identity("a").sha256, identity("b").sha256);
        assert_eq!(identity("a").tokens, None);
    }
}
