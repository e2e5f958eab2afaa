//! One run of one command.

use std::process::{Command, Stdio};
use std::time::Instant;

use super::arm::Arm;
use super::output::{Figure, Identity, Output};
use crate::error::Complaint;

/// What a run came to.
#[derive(Clone, Debug)]
pub struct Sample {
    /// Seconds on the clock, from start to end.
    pub wall: f64,
    /// What is compared.
    pub figure: f64,
    /// What it said.
    pub identity: Identity,
}

/// Runs of A and B, pair by pair.
pub type Pairs = Vec<(Sample, Sample)>;

/// Runs a command to its end.
///
/// # Errors
/// It cannot be started, fails, or does not print the figure.
pub fn run(arm: &Arm, figure: &Figure) -> anyhow::Result<Sample> {
    let failed = |problem: String| Complaint::failure(format!("`{}`: {problem}", arm.label));
    let mut command = Command::new(&arm.program);
    command.args(&arm.arguments).stdin(Stdio::null());
    command.envs(arm.environment.iter().map(|(name, value)| (name, value)));
    let started = Instant::now();
    let output = command.output();
    let wall = started.elapsed().as_secs_f64();
    let output =
        output.map_err(|error| failed(format!("cannot start {}: {error}", arm.program.display())))?;
    if !output.status.success() {
        let stderr = String::from_utf8_lossy(&output.stderr);
        let line = stderr.lines().find(|line| line.starts_with("error: ")).or_else(|| stderr.lines().last());
        let line = line.unwrap_or("it said nothing").trim_start_matches("error: ");
        return Err(failed(format!("{line} ({})", output.status)).into());
    }
    let said = Output::new(&output.stdout);
    let figure = figure.of(wall, &said).map_err(failed)?;
    Ok(Sample { wall, figure, identity: said.identity })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arm(program: &str, arguments: &[&str]) -> Arm {
        Arm {
            program: program.into(),
            arguments: arguments.iter().map(|word| (*word).to_owned()).collect(),
            environment: vec![("GREETING".to_owned(), "hello".to_owned())],
            label: "A".to_owned(),
        }
    }

    #[test]
    fn a_run_is_timed_and_its_output_kept() {
        let wall = Figure::named("wall");
        let sample = run(&arm("sh", &["-c", "sleep 0.1; echo $GREETING"]), &wall).unwrap();
        assert!(sample.wall >= 0.1 && sample.figure == sample.wall);
        assert_eq!(sample.identity, run(&arm("echo", &["hello"]), &wall).unwrap().identity);
    }

    #[test]
    fn a_run_that_fails_says_why() {
        let error = |program: &str, arguments: &[&str], figure: &str| {
            run(&arm(program, arguments), &Figure::named(figure)).unwrap_err().to_string()
        };
        let script = "echo 'warning: x' >&2; echo 'error: no model' >&2; echo 'hint: y' >&2; exit 3";
        assert_eq!(error("sh", &["-c", script], "wall"), "`A`: no model (exit status: 3)");
        assert!(error("/nowhere/program", &[], "wall").starts_with("`A`: cannot start /nowhere/program"));
        assert_eq!(error("echo", &["x"], "decode_tps"), "`A`: the command printed no JSON object");
    }
}
