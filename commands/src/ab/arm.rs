//! The two command lines that are compared.

use std::path::PathBuf;

use serde::Serialize;

use super::words::split;
use crate::error::Complaint;

/// A command to run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Arm {
    /// The program.
    pub program: PathBuf,
    /// Its arguments.
    pub arguments: Vec<String>,
    /// Variables set for it.
    pub environment: Vec<(String, String)>,
    /// What tells it from the other, as it was given.
    pub label: String,
}

/// What was given on the command line.
#[derive(Clone, Debug, Default)]
pub struct Given<'a> {
    /// `--a` and `--b`.
    pub flags: [Option<&'a str>; 2],
    /// `--binary-a` and `--binary-b`.
    pub binaries: [Option<&'a PathBuf>; 2],
    /// `--command-a` and `--command-b`.
    pub commands: [Option<&'a str>; 2],
    /// What comes behind `--`.
    pub command: &'a [String],
}

/// The two, and how they differ.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Arms {
    /// A and B.
    pub arms: [Arm; 2],
    /// Whether they are two settings of this program.
    pub levers: bool,
    /// Whether they are this program's verbs, of this or another build.
    pub ours: bool,
}

impl Given<'_> {
    /// The two commands. `this` is the running program.
    ///
    /// # Errors
    /// Something is missing, given twice over, or cannot be split into words.
    pub fn resolve(&self, this: PathBuf, needs_json: bool) -> Result<Arms, Complaint> {
        let any = |given: [bool; 2]| given[0] || given[1];
        let whole = any(self.commands.map(|command| command.is_some()));
        let binaries = any(self.binaries.map(|binary| binary.is_some()));
        let flags = any(self.flags.map(|flags| flags.is_some()));
        if whole {
            if binaries || flags || !self.command.is_empty() {
                return Err(Complaint::usage(
                    "`--command-a` and `--command-b` are whole commands: nothing else goes with them",
                ));
            }
            let arm =
                |index: usize| whole_command(self.commands[index], ["--command-a", "--command-b"][index]);
            return Ok(Arms { arms: [arm(0)?, arm(1)?], levers: false, ours: false });
        }
        if self.command.is_empty() {
            return Err(Complaint::usage("there is no command to compare")
                .hint("put it behind `--`: mlx-bun ab --a \"--l1\" --b \"\" -- generate \"Hello\""));
        }
        if !binaries && !flags {
            return Err(Complaint::usage("nothing tells A from B").hint(
                "give --a and --b (flags), --binary-a and --binary-b, or --command-a and --command-b",
            ));
        }
        let arm = |index: usize| {
            let program = self.binaries[index].cloned().unwrap_or_else(|| this.clone());
            let text = self.flags[index].unwrap_or_default();
            let words = split(text).map_err(|problem| {
                Complaint::usage(format!("`{} {text}` {problem}", ["--a", "--b"][index]))
            })?;
            let variables = words.iter().take_while(|word| variable(word).is_some()).count();
            let environment = words.iter().take(variables).filter_map(|word| variable(word)).collect();
            let label = match (self.binaries[index], text) {
                (Some(binary), "") => binary.display().to_string(),
                (Some(binary), text) => format!("{} {text}", binary.display()),
                (None, "") => "(as it is)".to_owned(),
                (None, text) => text.to_owned(),
            };
            let arguments = arguments(self.command, &words[variables..], needs_json);
            Ok::<_, Complaint>(Arm { program, arguments, environment, label })
        };
        Ok(Arms { arms: [arm(0)?, arm(1)?], levers: !binaries, ours: true })
    }
}

/// The flags right behind the verb, where no prompt can swallow them.
fn arguments(command: &[String], flags: &[String], needs_json: bool) -> Vec<String> {
    let (verb, rest) = command.split_at(1.min(command.len()));
    let mut arguments: Vec<String> = verb.to_vec();
    let generates = verb.first().is_some_and(|verb| matches!(verb.as_str(), "generate" | "gen"));
    let has_json = command.iter().chain(flags).any(|word| word == "--json");
    // A reply's JSON tells its tokens and why it ended.
    if (generates || needs_json) && !has_json {
        arguments.push("--json".to_owned());
    }
    arguments.extend(flags.iter().chain(rest).cloned());
    arguments
}

fn whole_command(text: Option<&str>, flag: &str) -> Result<Arm, Complaint> {
    let text = text.ok_or_else(|| Complaint::usage(format!("`{flag}` is missing")))?;
    let words = split(text).map_err(|problem| Complaint::usage(format!("`{flag} {text}` {problem}")))?;
    let variables = words.iter().take_while(|word| variable(word).is_some()).count();
    let environment = words.iter().take(variables).filter_map(|word| variable(word)).collect();
    let mut rest = words.into_iter().skip(variables);
    let program = rest.next().ok_or_else(|| Complaint::usage(format!("`{flag}` is empty")))?;
    Ok(Arm { program: program.into(), arguments: rest.collect(), environment, label: text.to_owned() })
}

/// `NAME=value` as shells take it in front of a command.
fn variable(word: &str) -> Option<(String, String)> {
    let (name, value) = word.split_once('=')?;
    let fits = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let is_name =
        !name.is_empty() && name.chars().all(fits) && !name.starts_with(|c: char| c.is_ascii_digit());
    is_name.then(|| (name.to_owned(), value.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<String> {
        split(text).unwrap()
    }

    fn given<'a>(a: &'a str, b: &'a str, command: &'a [String]) -> Given<'a> {
        Given { flags: [Some(a), Some(b)], command, ..Given::default() }
    }

    #[test]
    fn flags_go_behind_the_verb_and_variables_into_the_environment() {
        let command = words("generate 'Hello you' --temp 0");
        let arms = given("--l1", "MLX_BUN_CPU_ISA=avx2 --cpu-precision exact", &command)
            .resolve("me".into(), false)
            .unwrap();
        assert!(arms.levers && arms.ours);
        let [a, b] = arms.arms;
        assert_eq!(a.arguments, ["generate", "--json", "--l1", "Hello you", "--temp", "0"]);
        assert_eq!(
            b.arguments,
            ["generate", "--json", "--cpu-precision", "exact", "Hello you", "--temp", "0"]
        );
        assert_eq!(b.environment, [("MLX_BUN_CPU_ISA".to_owned(), "avx2".to_owned())]);
        assert_eq!((a.program, a.label.as_str()), ("me".into(), "--l1"));
    }

    #[test]
    fn json_is_asked_for_where_it_tells_something() {
        let json = |command: &str, needs: bool| {
            let command = words(command);
            let arms = given("", "", &command).resolve("me".into(), needs).unwrap();
            arms.arms[0].arguments.contains(&"--json".to_owned())
        };
        assert!(json("generate x", false) && json("perplexity --data-path x", true));
        assert!(!json("convert x", false));
        let command = words("generate --json x");
        assert_eq!(given("", "", &command).resolve("me".into(), true).unwrap().arms[0].arguments, command);
    }

    #[test]
    fn two_binaries_and_two_commands() {
        let command = words("generate x");
        let (one, two) = (PathBuf::from("/one"), PathBuf::from("/two"));
        let arms = Given { binaries: [Some(&one), Some(&two)], command: &command, ..Given::default() }
            .resolve("me".into(), false)
            .unwrap();
        assert!(!arms.levers && arms.ours);
        assert_eq!((arms.arms[1].program.as_path(), arms.arms[1].label.as_str()), (two.as_path(), "/two"));
        let arms = Given { commands: [Some("A=1 sleep 1"), Some("sleep '2 s'")], ..Given::default() }
            .resolve("me".into(), false)
            .unwrap();
        assert!(!arms.ours);
        assert_eq!(arms.arms[0].environment.len(), 1);
        assert_eq!(arms.arms[1].arguments, ["2 s"]);
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        let refused = |given: Given| given.resolve("me".into(), false).unwrap_err().to_string();
        let command = words("generate x");
        assert_eq!(refused(Given { command: &command, ..Given::default() }), "nothing tells A from B");
        assert_eq!(refused(given("--l1", "", &[])), "there is no command to compare");
        assert_eq!(refused(given("'", "", &command)), "`--a '` has a ' that is not closed");
        let half = Given { commands: [Some("x"), None], ..Given::default() };
        assert_eq!(refused(half.clone()), "`--command-b` is missing");
        assert!(refused(Given { command: &command, ..half }).contains("nothing else goes with them"));
        assert_eq!(
            refused(Given { commands: [Some(""), Some("x")], ..Given::default() }),
            "`--command-a` is empty"
        );
    }
}
