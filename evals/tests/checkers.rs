//! Our checkers against the recorded verdicts of if-verifiable and bfcl-eval (`scripts/oracle/checkers.py record`).

#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;

use mlx_bun_evals::{bfcl, ifeval};
use serde_json::Value;

/// Where the others are wrong; docs/eval.md has the reasons.
fn differs(case: &Value) -> bool {
    let ids: Vec<&str> = case["row"]["instruction_id_list"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(Value::as_str)
        .collect();
    let reply = case["reply"].as_str().unwrap();
    let has = |id: &str| ids.contains(&id);
    // Python reads NaN as JSON; `e.g.` ends no sentence; capitals tell langdetect nothing.
    has("detectable_format:json_format") && reply.contains("NaN")
        || has("length_constraints:number_sentences") && reply.contains("e.g.")
        || has("change_case:english_capital") && reply == reply.to_uppercase()
}

#[test]
fn verdicts_are_those_of_independent_checkers() {
    let text = include_str!("../../fixtures/evals/checkers.jsonl");
    let mut agreeing: BTreeMap<String, (usize, usize)> = BTreeMap::new();
    let mut wrong = Vec::new();
    for line in text.lines() {
        let case: Value = serde_json::from_str(line).unwrap();
        if differs(&case) {
            continue;
        }
        let reply = case["reply"].as_str().unwrap();
        let all = |followed: &[bool]| followed.iter().all(|followed| *followed);
        let (ours, theirs) = match case["task"].as_str().unwrap() {
            "ifeval" => {
                let followed = ifeval::row(0, &case["row"]).unwrap().judge(reply);
                let theirs = (case["expected"].as_bool().unwrap(), case["loose"].as_bool().unwrap());
                ((all(&followed.strict), all(&followed.loose)), theirs)
            }
            _ => {
                let right =
                    bfcl::row(0, &case["row"]).unwrap().judge(&bfcl::calls(reply)) == bfcl::Strict::Right;
                let theirs = case["expected"].as_bool().unwrap();
                ((right, right), (theirs, theirs))
            }
        };
        let count = agreeing.entry(case["task"].as_str().unwrap().to_owned()).or_default();
        *count = (count.0 + 1, count.1 + usize::from(ours == theirs));
        if ours != theirs {
            wrong.push(format!("{ours:?} {theirs:?} {line}"));
        }
    }
    assert!(wrong.is_empty(), "{agreeing:?}\n{}", wrong.join("\n"));
    assert!(agreeing.values().all(|(count, _)| *count >= 80), "{agreeing:?}");
}
