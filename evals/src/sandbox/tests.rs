use super::*;

fn sandboxes() -> Vec<Sandbox> {
    let python = python(&Environment::of_process()).unwrap();
    let make = |walls: &Walls| Sandbox {
        python: python.clone(),
        walls: *walls,
        limits: Limits { time: Duration::from_secs(5), ..Limits::default() },
    };
    let sandboxes: Vec<Sandbox> =
        Walls::of_this_system().iter().map(make).filter(|sandbox| probe::holds(sandbox).is_ok()).collect();
    if sandboxes.is_empty() {
        eprintln!("no walls hold on this system: hostile programs are not tried");
    }
    sandboxes
}

/// How a program ends behind every kind of walls there is.
fn ends(program: &str) -> Vec<Outcome> {
    sandboxes().iter().map(|sandbox| sandbox.run(program).unwrap()).collect()
}

fn all_fail(program: &str, with: &str) {
    for outcome in ends(program) {
        match &outcome {
            Outcome::Failed(why) => assert!(why.contains(with), "{program}: {why}"),
            other => panic!("{program}: {other:?}"),
        }
    }
}

fn all_pass(program: &str) {
    for outcome in ends(program) {
        assert_eq!(outcome, Outcome::Passed, "{program}");
    }
}

#[test]
fn harmless_programs_run() {
    all_pass("import math, collections, typing, re\nassert math.comb(5, 2) == 10\nprint('x')");
    all_pass("import threading\nt = threading.Thread(target=lambda: None)\nt.start()\nt.join()");
    all_pass("open('x', 'w').write('1')\nassert open('x').read() == '1'");
    all_fail("assert 1 == 2, 'no'", "AssertionError: no");
    all_fail("def f(:", "SyntaxError");
    all_fail("input()", "EOFError");
}

#[test]
fn a_program_cannot_pass_by_leaving_early() {
    all_fail("import os\nos._exit(0)", "ended its process");
    all_fail("import sys\nsys.exit(0)", "SystemExit");
    all_fail("raise KeyboardInterrupt", "KeyboardInterrupt");
    let forged = "import os\nos.write(3, b'{\"nonce\": \"\", \"passed\": true}\\n')\nos._exit(0)";
    all_fail(forged, "ended its process");
}

#[test]
fn an_endless_loop_is_ended() {
    let started = Instant::now();
    let outcomes: Vec<Outcome> = sandboxes()
        .into_iter()
        .map(|sandbox| {
            let limits = Limits { time: Duration::from_secs(1), ..Limits::default() };
            sandbox.with_limits(limits).run("while True: pass").unwrap()
        })
        .collect();
    assert!(outcomes.iter().all(|outcome| *outcome == Outcome::TimedOut), "{outcomes:?}");
    assert!(started.elapsed() < Duration::from_secs(20));
}

#[test]
fn a_fork_bomb_does_not_go_off() {
    all_fail("import os\nwhile True: os.fork()", "PermissionError");
    all_fail("import subprocess\nsubprocess.run(['true'])", "PermissionError");
    all_fail("import os\nos.execv('/bin/true', ['true'])", "PermissionError");
}

#[test]
fn memory_runs_out_for_the_program_alone() {
    all_fail("x = bytearray(1 << 30)", "MemoryError");
    all_fail("x = []\nwhile True: x.append(bytearray(1 << 20))", "MemoryError");
    all_fail("with open('x', 'wb') as f:\n    while True: f.write(bytes(1 << 20))", "OSError");
}

#[test]
fn the_network_is_out_of_reach() {
    all_fail("import socket\nsocket.create_connection(('127.0.0.1', 80), 1)", "Error");
    all_fail("import socket\ns = socket.socket(socket.AF_UNIX)\ns.bind('x')", "PermissionError");
    all_fail("import urllib.request\nurllib.request.urlopen('http://example.org', timeout=2)", "URLError");
}

#[test]
fn nothing_outside_is_touched() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("kept");
    std::fs::write(&file, "kept").unwrap();
    let path = json!(file);
    for action in [
        format!("open({path})"),
        format!("os.listdir(os.path.dirname({path}))"),
        format!("open({path}, 'w')"),
        format!("open({path}, 'a').write('x')"),
        format!("os.remove({path})"),
        format!("os.rename({path}, {path} + '2')"),
        format!("os.truncate({path}, 0)"),
        format!("os.symlink('x', {path} + '3')"),
        format!("os.link({path}, 'here')"),
        format!("os.mkdir({path} + '4')"),
        format!("os.chmod({path}, 0)"),
        format!("os.utime({path})"),
    ] {
        for outcome in ends(&format!("import os\n{action}")) {
            assert!(
                matches!(&outcome, Outcome::Failed(why) if why.contains("Error")),
                "{action}: {outcome:?}"
            );
        }
    }
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "kept");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
}

#[test]
fn other_processes_are_out_of_reach() {
    let here = std::process::id();
    all_fail(&format!("import os\nos.kill({here}, 9)"), "Error");
    all_fail("import os\nos.kill(os.getppid(), 9)", "Error");
    all_fail("import os\nos.killpg(0, 9)", "Error");
    all_fail(&format!("open('/proc/{here}/mem', 'r+b')"), "Error");
    all_fail(&format!("open('/proc/{here}/environ', 'rb').read()"), "Error");
    all_fail("import os\nopen(f'/proc/{os.getppid()}/environ', 'rb').read()", "Error");
    let limit = "import os, resource\nresource.prlimit(os.getppid(), resource.RLIMIT_FSIZE, (0, 0))";
    all_fail(limit, "Error");
    all_fail("import os\nos.sched_setaffinity(os.getppid(), {0})", "Error");
    all_fail("import os\nos.setpriority(os.PRIO_PROCESS, os.getppid(), 19)", "Error");
}

#[cfg(target_os = "linux")]
#[test]
fn nothing_outlives_us() {
    let folder = tempfile::tempdir().unwrap();
    for sandbox in sandboxes() {
        // What a killed thread leaves is what a killed process leaves.
        let mut command = sandbox.command(folder.path());
        let child = std::thread::spawn(move || command.spawn().unwrap()).join();
        let mut child = child.unwrap();
        let ended = wait(&mut child, Instant::now() + Duration::from_secs(20)).unwrap();
        assert!(ended.is_some_and(|status| !status.success()), "{ended:?}");
    }
}

#[test]
fn walls_cannot_be_taken_down_again() {
    let call = |number: u32| {
        format!("import ctypes\nassert ctypes.CDLL(None).syscall({number}, 0, 0, 0, 0, 0) >= 0")
    };
    // On x86-64: unshare, mount, setns, ptrace, bpf, io_uring_setup, clone3, the x32 number of
    // fork, shmget and memfd_create.
    if std::env::consts::ARCH == "x86_64" {
        for number in [272, 165, 308, 101, 321, 425, 435, 0x4000_0000 + 57, 29, 319] {
            all_fail(&call(number), "AssertionError");
        }
    }
}

#[test]
fn errors_that_lie_do_no_harm() {
    all_fail(
        "class E(Exception):\n    def __str__(self): raise ValueError\nraise E",
        "an error that cannot be shown",
    );
    all_fail("raise Exception('x' * 10**6)", "Exception: xxx");
}
