//! Our checkers as a filter, for the comparison with independent ones (`scripts/oracle/checkers.py`): a line of
//! `{"task", "row", "reply"}` in, a line of `{"correct", …}` out.

#![allow(clippy::print_stdout)] // a filter prints

use std::io::{BufRead as _, stdin};

use mlx_bun::checkpoint::environment::Environment;
use mlx_bun_evals::sandbox::{Outcome, Sandbox, SandboxError};
use mlx_bun_evals::{bfcl, humaneval, ifeval};
use serde_json::{Value, json};

fn judge(case: &Value, sandbox: &mut Option<Sandbox>) -> Result<Value, String> {
    let reply = case["reply"].as_str().ok_or("no reply")?;
    Ok(match case["task"].as_str() {
        Some("ifeval") => {
            let followed = ifeval::row(0, &case["row"])?.judge(reply);
            let all = |followed: Vec<bool>| followed.into_iter().all(|followed| followed);
            json!({"correct": all(followed.strict), "loose": all(followed.loose)})
        }
        Some("bfcl") => {
            let verdict = bfcl::row(0, &case["row"])?.judge(&bfcl::calls(reply));
            json!({"correct": verdict == bfcl::Strict::Right, "result": verdict.name()})
        }
        Some("humaneval") => {
            let row = humaneval::row(0, &case["row"])?;
            let outcome = in_sandbox(sandbox)
                .and_then(|sandbox| sandbox.run(&row.program(reply)))
                .map_err(|error| error.to_string())?;
            json!({"correct": outcome == Outcome::Passed, "result": format!("{outcome:?}")})
        }
        _ => return Err("no such task".to_owned()),
    })
}

fn in_sandbox(kept: &mut Option<Sandbox>) -> Result<&Sandbox, SandboxError> {
    if kept.is_none() {
        *kept = Some(Sandbox::find(&Environment::of_process())?);
    }
    kept.as_ref().ok_or_else(|| SandboxError::Broken("none".to_owned()))
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut sandbox = None;
    for line in stdin().lock().lines() {
        let case: Value = serde_json::from_str(&line?)?;
        println!("{}", judge(&case, &mut sandbox).unwrap_or_else(|error| json!({"error": error})));
    }
    Ok(())
}
