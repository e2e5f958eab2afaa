//! The environment variables that say where models are, as a value that tests can make up.

use std::collections::HashMap;
use std::path::PathBuf;

/// A copy of environment variables. An empty variable counts as unset.
#[derive(Clone, Debug, Default)]
pub struct Environment {
    variables: HashMap<String, String>,
}

impl Environment {
    /// This process's variables, without those that are not UTF-8. `HOME` is the system's idea of it when
    /// the variable is unset.
    pub fn of_process() -> Self {
        let mut variables: HashMap<_, _> = std::env::vars_os()
            .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
            .collect();
        if variables.get("HOME").is_none_or(String::is_empty)
            && let Some(home) = std::env::home_dir().and_then(|home| home.into_os_string().into_string().ok())
        {
            variables.insert("HOME".to_owned(), home);
        }
        Self { variables }
    }

    /// The variables given.
    pub fn from_pairs<'a>(pairs: impl IntoIterator<Item = (&'a str, &'a str)>) -> Self {
        let variables = pairs.into_iter().map(|(name, value)| (name.to_owned(), value.to_owned()));
        Self { variables: variables.collect() }
    }

    /// A variable that is set and not empty.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.variables.get(name).map(String::as_str).filter(|value| !value.is_empty())
    }

    /// A variable as a path, with a leading `~` and `$NAME` or `${NAME}` in it replaced.
    pub fn path(&self, name: &str) -> Option<PathBuf> {
        self.get(name).map(|value| self.expand(value))
    }

    /// Where caches go: `XDG_CACHE_HOME`, else `~/.cache`.
    pub fn cache_home(&self) -> PathBuf {
        self.path("XDG_CACHE_HOME").unwrap_or_else(|| self.home().join(".cache"))
    }

    /// Where this program keeps models: `MLX_BUN_CACHE`, else `mlx-bun` in the caches.
    pub fn mlx_bun_cache(&self) -> PathBuf {
        self.path("MLX_BUN_CACHE").unwrap_or_else(|| self.cache_home().join("mlx-bun"))
    }

    fn home(&self) -> PathBuf {
        self.get("HOME").map_or_else(|| PathBuf::from("~"), PathBuf::from)
    }

    /// Replaces a leading `~` and then variables, as Python's `expanduser` and `expandvars` do; an unset
    /// variable and another user's `~name` stay as they are.
    pub fn expand(&self, text: &str) -> PathBuf {
        let (mut expanded, mut rest) = (String::new(), text);
        if let Some(after) = text.strip_prefix('~')
            && (after.is_empty() || after.starts_with('/'))
            && let Some(home) = self.get("HOME")
        {
            expanded.push_str(home.trim_end_matches('/'));
            rest = after;
        }
        while let Some((before, after)) = rest.split_once('$') {
            expanded.push_str(before);
            let (name, after_name) = variable_name(after);
            match name.and_then(|name| self.variables.get(name)) {
                Some(value) => expanded.push_str(value),
                None => expanded.extend(["$", &after[..after.len() - after_name.len()]]),
            }
            rest = after_name;
        }
        expanded.push_str(rest);
        PathBuf::from(expanded)
    }
}

/// The variable's name that `text`, the part after a `$`, begins with, and what follows it.
fn variable_name(text: &str) -> (Option<&str>, &str) {
    if let Some(braced) = text.strip_prefix('{') {
        return match braced.split_once('}') {
            Some((name, rest)) => (Some(name), rest),
            None => (None, text),
        };
    }
    let end = text.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(text.len());
    let (name, rest) = text.split_at(end);
    (Some(name).filter(|name| !name.is_empty()), rest)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn home_and_variables_are_expanded() {
        let environment = Environment::from_pairs([("HOME", "/home/me"), ("DISK", "/big"), ("EMPTY", "")]);
        for (text, expected) in [
            ("~", "/home/me"),
            ("~/models", "/home/me/models"),
            ("~you/models", "~you/models"),
            ("a~", "a~"),
            ("$DISK/hf", "/big/hf"),
            ("${DISK}s/$DISK", "/bigs//big"),
            ("$UNSET/x", "$UNSET/x"),
            ("${UNSET}x", "${UNSET}x"),
            ("${DISK", "${DISK"),
            ("x$EMPTY/y$", "x/y$"),
            ("$ä", "$ä"),
        ] {
            assert_eq!(environment.expand(text), Path::new(expected), "{text}");
        }
    }

    #[test]
    fn caches_follow_the_variables() {
        let cache = |pairs: &[(&str, &str)]| {
            Environment::from_pairs(pairs.iter().copied()).mlx_bun_cache().to_string_lossy().into_owned()
        };
        assert_eq!(cache(&[("HOME", "/h")]), "/h/.cache/mlx-bun");
        assert_eq!(cache(&[("HOME", "/h"), ("XDG_CACHE_HOME", "/c")]), "/c/mlx-bun");
        assert_eq!(cache(&[("HOME", "/h"), ("XDG_CACHE_HOME", ""), ("MLX_BUN_CACHE", "~/m")]), "/h/m");
    }
}
