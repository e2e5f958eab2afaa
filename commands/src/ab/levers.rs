//! `ab levers`: the engine's settings and what is known of them.

use std::io::Write as _;

use mlx_bun::levers::{LEVERS, Lever};
use serde_json::json;

use crate::output::SCHEMA_VERSION;
use crate::printer::Printer;
use crate::table::write_table;

/// List the engine's levers: flag, variable, default, what they do to the output, and the evidence
#[derive(Clone, Debug, clap::Args)]
#[command(after_long_help = "Example:\n  mlx-bun ab levers --json")]
pub struct LeversArgs {
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

impl LeversArgs {
    /// Prints the table.
    ///
    /// # Errors
    /// Standard output cannot be written.
    pub fn run(&self, printer: &Printer) -> anyhow::Result<()> {
        let mut stdout = printer.stdout();
        if self.json {
            writeln!(stdout, "{}", json!({"schema_version": SCHEMA_VERSION, "levers": LEVERS}))?;
        } else {
            let rows: Vec<[String; 6]> = LEVERS.iter().map(row).collect();
            let headings = ["lever", "flag or variable", "values", "default", "output", "evidence"];
            write_table(&mut stdout, headings, &[], &rows)?;
        }
        stdout.flush()?;
        Ok(())
    }
}

fn row(lever: &Lever) -> [String; 6] {
    let set_by: Vec<&str> = lever.flag.into_iter().chain(lever.env).collect();
    [lever.name, &set_by.join(", "), lever.values, lever.default, lever.effect.name(), lever.evidence]
        .map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Groups of flags that say what is asked or who may ask, not how it is computed.
    const REQUESTS: [&str; 12] = [
        "Prompt",
        "Model",
        "Chat template",
        "Sampling",
        "Penalties",
        "Stopping",
        "Output",
        "Structure",
        "Network",
        "Defaults of requests",
        "Conversation",
        "Global options",
    ];
    /// Flags beside levers that are none themselves.
    const NONE: [&str; 3] = ["prompt-cache-file", "kv-budget", "memory-budget"];

    #[test]
    fn every_flag_that_changes_what_is_computed_is_a_lever() {
        let mut command = crate::cli::command();
        command.build();
        for verb in ["generate", "serve", "chat"] {
            let verb = command.find_subcommand(verb).unwrap();
            for arg in verb.get_arguments().filter(|arg| !arg.is_global_set()) {
                let (Some(flag), Some(heading)) = (arg.get_long(), arg.get_help_heading()) else { continue };
                let known = LEVERS.iter().any(|lever| lever.name == flag);
                assert!(
                    REQUESTS.contains(&heading) || NONE.contains(&flag) || known,
                    "--{flag} of {} ({heading}) is missing in src/levers.rs",
                    verb.get_name()
                );
            }
        }
    }

    #[test]
    fn levers_are_flags_and_variables_that_there_are() {
        let mut command = crate::cli::command();
        command.build();
        let verbs: Vec<_> =
            ["generate", "serve"].iter().filter_map(|verb| command.find_subcommand(verb)).collect();
        let variables: Vec<_> = crate::env::GROUPS
            .iter()
            .flat_map(|(_, list)| list.iter().map(|variable| variable.name))
            .collect();
        for lever in LEVERS {
            if lever.flag.is_some() {
                let arg = verbs.iter().flat_map(|verb| verb.get_arguments());
                let arg = arg.into_iter().find(|arg| arg.get_long() == Some(lever.name));
                let arg = arg.unwrap_or_else(|| panic!("there is no flag --{}", lever.name));
                assert_eq!(arg.get_env().and_then(|name| name.to_str()), lever.env, "{}", lever.name);
            }
            assert!(lever.env.is_none_or(|name| variables.contains(&name)), "{}", lever.name);
        }
    }

    #[test]
    fn the_table_names_them_all() {
        let (printer, captured) = Printer::captured(crate::printer::Verbosity::Default);
        LeversArgs { json: false }.run(&printer).unwrap();
        assert_eq!(captured.out().lines().count(), 1 + LEVERS.len());
        let (printer, captured) = Printer::captured(crate::printer::Verbosity::Default);
        LeversArgs { json: true }.run(&printer).unwrap();
        let value: serde_json::Value = serde_json::from_str(&captured.out()).unwrap();
        assert_eq!(value["levers"][0]["effect"], "rounding");
    }
}
