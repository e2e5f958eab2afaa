//! Whether walls hold on this machine.

use serde_json::json;

use super::{Outcome, Sandbox, Walls};

/// Pushes against each wall; what gives way is an error. `OUTSIDE` is a file in a folder of its caller.
const PROGRAM: &str = r#"
import os, socket

def must_fail(what, action):
    try:
        action()
    except OSError:
        return
    raise AssertionError(what)

def send():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as it:
        it.connect(("127.0.0.1", 9))
        it.send(b"x")

def fork():
    if os.fork() == 0:
        os._exit(0)

must_fail("the network can be reached", send)
must_fail("processes can be made", fork)
must_fail("files can be written outside", lambda: open(OUTSIDE, "w"))
must_fail("files can be removed outside", lambda: os.remove(PRESENT))
if READS_ARE_WALLED:
    must_fail("files can be read outside", lambda: open(PRESENT))
with open("inside", "w") as file:
    file.write("x")
"#;

/// Runs the probe.
///
/// # Errors
/// What gave way, or why nothing ran.
pub(super) fn holds(sandbox: &Sandbox) -> Result<(), String> {
    let outside = tempfile::tempdir().map_err(|error| error.to_string())?;
    let present = outside.path().join("present");
    std::fs::write(&present, "x").map_err(|error| error.to_string())?;
    let (absent, present) = (json!(outside.path().join("absent")), json!(present));
    let walled = if matches!(sandbox.walls, Walls::Namespaces | Walls::Kernel) { "True" } else { "False" };
    let program = format!("OUTSIDE = {absent}\nPRESENT = {present}\nREADS_ARE_WALLED = {walled}\n{PROGRAM}");
    match sandbox.run(&program) {
        Ok(Outcome::Passed) => Ok(()),
        Ok(Outcome::Failed(why)) => Err(why),
        Ok(Outcome::TimedOut) => Err("it takes too long".to_owned()),
        Err(error) => Err(error.to_string()),
    }
}
