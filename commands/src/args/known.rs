//! The flags of one group out of a whole command line, for those who only want to know what some of them say.

use clap::{Arg, Command};

/// Reads the flags of `T` among `words`, whatever else stands between them; the verb itself complains of nonsense.
///
/// # Errors
/// A flag of the group has a value that it cannot have.
pub fn read<T: clap::Args>(words: &[String]) -> Result<T, clap::Error> {
    let mut command = T::augment_args(Command::new("flags").no_binary_name(true).args_override_self(true));
    command.build();
    let matches = command.clone().try_get_matches_from(known(&command, words))?;
    T::from_arg_matches(&matches)
}

fn known<'a>(command: &Command, words: &'a [String]) -> Vec<&'a str> {
    let mut found = Vec::new();
    let mut words = words.iter().map(String::as_str).take_while(|word| *word != "--");
    while let Some(word) = words.next() {
        let (name, value) = word.split_once('=').map_or((word, None), |(name, value)| (name, Some(value)));
        let Some(arg) = command.get_arguments().find(|arg| is_called(arg, name)) else { continue };
        found.push(word);
        if arg.get_action().takes_values() && value.is_none() {
            found.extend(words.next());
        }
    }
    found
}

fn is_called(arg: &Arg, word: &str) -> bool {
    if let Some(name) = word.strip_prefix("--") {
        let aliases = arg.get_all_aliases().unwrap_or_default();
        return arg.get_long() == Some(name) || aliases.contains(&name);
    }
    let short = word.strip_prefix('-').and_then(|name| name.parse::<char>().ok());
    short.is_some() && arg.get_short() == short
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::model::ModelArgs;
    use crate::args::numerics::NumericsArgs;

    fn words(text: &str) -> Vec<String> {
        text.split_whitespace().map(str::to_owned).collect()
    }

    #[test]
    fn other_flags_are_passed_over() {
        let numerics: NumericsArgs = read(&words("generate --batch 4 -p x --l1 --threads=2 --json")).unwrap();
        assert!(numerics.levers.l1 && numerics.threads == Some(2));
        let model: ModelArgs = read(&words("serve --l1 -M a --port 0 --model b")).unwrap();
        assert_eq!(model.model.as_deref(), Some("b"));
        let none: NumericsArgs = read(&words("generate -- --l1")).unwrap();
        assert!(!none.levers.l1);
        assert!(read::<NumericsArgs>(&words("--threads x")).is_err());
    }
}
