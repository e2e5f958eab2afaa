//! Recording anew: runs the Python oracle programs of scripts/oracle.

use std::ffi::OsStr;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail};

use crate::error::Complaint;

/// The family whose checkpoint is the starter model instead of a tiny one.
const STARTER: &str = "starter";

/// Records the goldens of one family, or of all.
///
/// # Errors
/// When Python is missing or a program fails; it has said why on standard error.
pub fn regen(root: &Path, family: Option<&str>) -> Result<()> {
    if let Some(family) = family.filter(|family| *family != STARTER) {
        check_family(&root.join("fixtures").join("checkpoints"), family)?;
    }
    let scripts = root.join("scripts");
    let oracle = scripts.join("oracle");
    let python = output("python3", [oracle.join("setup.py")])?;
    if family != Some(STARTER) {
        let mut arguments = vec![oracle.join("run.py").into_os_string()];
        if let Some(family) = family {
            arguments.extend(["--family".into(), family.into()]);
        }
        run(&python, arguments)?;
    }
    if family.is_none_or(|family| family == STARTER) {
        run("python3", [scripts.join("setup.py").as_os_str(), OsStr::new("starter")])?;
        run(&python, [oracle.join("starter.py").as_os_str(), OsStr::new("record")])?;
    }
    Ok(())
}

/// Checks that there are checkpoints of a family, before an oracle is set up for nothing.
fn check_family(checkpoints: &Path, family: &str) -> Result<()> {
    let entries =
        fs::read_dir(checkpoints).with_context(|| format!("cannot read {}", checkpoints.display()))?;
    let names = entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned());
    let mut families: Vec<String> =
        names.filter_map(|name| name.rsplit_once('-').map(|(family, _)| family.to_owned())).collect();
    if families.iter().any(|known| known == family) {
        return Ok(());
    }
    families.push(STARTER.to_owned());
    families.sort();
    families.dedup();
    let known = families.join(", ");
    Err(Complaint::usage(format!("no checkpoint of the family `{family}`; there are {known}")).into())
}

fn run<A: AsRef<OsStr>>(program: &str, arguments: impl IntoIterator<Item = A>) -> Result<()> {
    let mut command = Command::new(program);
    command.args(arguments);
    let status = command.status().with_context(|| format!("cannot run `{program}`"))?;
    if status.success() { Ok(()) } else { bail!("an oracle program failed ({status})") }
}

/// The last line of what a program prints.
fn output<A: AsRef<OsStr>>(program: &str, arguments: impl IntoIterator<Item = A>) -> Result<String> {
    let mut command = Command::new(program);
    command.args(arguments).stderr(Stdio::inherit());
    let output = command.output().with_context(|| format!("cannot run `{program}`"))?;
    if !output.status.success() {
        bail!("the oracle's set-up failed ({})", output.status);
    }
    let text = String::from_utf8(output.stdout).context("the oracle's set-up printed no text")?;
    text.lines().last().map(str::to_owned).context("the oracle's set-up printed no path")
}
