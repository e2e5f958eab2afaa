//! Finds a model's chat templates and chooses among them, by transformers' rules.

use std::fs::File;
use std::io::{ErrorKind, Read};
use std::path::Path;
use std::sync::OnceLock;

use serde_json::Value as Json;

use super::error::TemplateError;
use super::render::ChatTemplate;
use super::rewrite::MAX_SOURCE;

/// The name of the template that serves when no other is asked for.
const DEFAULT: &str = "default";

/// The name of the template that serves when tools are given.
const TOOL_USE: &str = "tool_use";

/// The chat templates of a model, by name. A template is compiled when it is first selected.
#[derive(Debug, Default)]
pub struct ChatTemplates {
    templates: Vec<Named>,
}

#[derive(Debug)]
struct Named {
    name: String,
    source: String,
    compiled: OnceLock<ChatTemplate>,
}

impl ChatTemplates {
    /// A single template, from GGUF metadata (`tokenizer.chat_template`) or a flag.
    pub fn from_source(source: impl Into<String>) -> ChatTemplates {
        let mut templates = ChatTemplates::default();
        templates.set(DEFAULT, source.into());
        templates
    }

    /// The templates of a `chat_template` value: a string, a list of `{"name", "template"}`, or null for none.
    ///
    /// # Errors
    ///
    /// [`TemplateError::Malformed`] when it is anything else.
    pub fn from_config_value(value: &Json) -> Result<ChatTemplates, TemplateError> {
        let malformed = |problem: &str| TemplateError::Malformed {
            place: "`chat_template` of tokenizer_config.json".to_owned(),
            problem: problem.to_owned(),
        };
        match value {
            Json::Null => Ok(ChatTemplates::default()),
            Json::String(source) => Ok(ChatTemplates::from_source(source)),
            Json::Array(entries) => {
                let mut templates = ChatTemplates::default();
                for entry in entries {
                    match (entry.get("name"), entry.get("template")) {
                        (Some(Json::String(name)), Some(Json::String(source))) => {
                            templates.set(name, source.clone());
                        }
                        _ => {
                            return Err(malformed(
                                "a list of templates needs a string `name` and `template` in each entry",
                            ));
                        }
                    }
                }
                Ok(templates)
            }
            _ => Err(malformed("expected a string or a list of named templates")),
        }
    }

    /// The templates of a model directory whose tokenizer_config.json is `tokenizer_config`.
    ///
    /// As in transformers, template files (`chat_template.jinja` and `additional_chat_templates/*.jinja`) replace what
    /// the config says; the legacy `chat_template.json` counts when there is nothing else. A model may have no
    /// template at all; then selecting one is the error.
    ///
    /// # Errors
    ///
    /// [`TemplateError::Unreadable`] and [`TemplateError::Malformed`].
    pub fn from_directory(directory: &Path, tokenizer_config: &Json) -> Result<ChatTemplates, TemplateError> {
        let mut templates = ChatTemplates::default();
        if let Some(source) = read_if_present(&directory.join("chat_template.jinja"))? {
            templates.set(DEFAULT, source);
        }
        let additional = directory.join("additional_chat_templates");
        for name in template_names(&additional)? {
            let path = additional.join(format!("{name}.jinja"));
            if let Some(source) = read_if_present(&path)? {
                templates.set(&name, source);
            }
        }
        if templates.is_empty() {
            templates = match tokenizer_config.get("chat_template") {
                Some(value) => ChatTemplates::from_config_value(value)?,
                None => ChatTemplates::default(),
            };
        }
        if templates.is_empty()
            && let Some(text) = read_if_present(&directory.join("chat_template.json"))?
        {
            let malformed = |problem: String| TemplateError::Malformed {
                place: directory.join("chat_template.json").display().to_string(),
                problem,
            };
            let json: Json = serde_json::from_str(&text)
                .map_err(|error| malformed(crate::checkpoint::json::problem(&error)))?;
            match json.get("chat_template") {
                Some(value) => templates = ChatTemplates::from_config_value(value)?,
                None => return Err(malformed("has no `chat_template`".to_owned())),
            }
        }
        Ok(templates)
    }

    fn set(&mut self, name: &str, source: String) {
        self.templates.retain(|template| template.name != name);
        self.templates.push(Named { name: name.to_owned(), source, compiled: OnceLock::new() });
    }

    /// Whether the model has no template.
    pub fn is_empty(&self) -> bool {
        self.templates.is_empty()
    }

    /// The templates' names, sorted.
    pub fn names(&self) -> Vec<&str> {
        let mut names: Vec<_> = self.templates.iter().map(|template| template.name.as_str()).collect();
        names.sort_unstable();
        names
    }

    /// The text of the template that [`ChatTemplates::select`] would choose.
    ///
    /// # Errors
    ///
    /// As [`ChatTemplates::select`], but the template is not compiled.
    pub fn source(&self, name: Option<&str>, with_tools: bool) -> Result<&str, TemplateError> {
        self.find(name, with_tools).map(|named| named.source.as_str())
    }

    /// Chooses a template: the one of the given name; else the only one; else `tool_use` when tools are given and
    /// there is one; else `default`.
    ///
    /// # Errors
    ///
    /// [`TemplateError::Missing`] when the model has none, [`TemplateError::NoSuchTemplate`] with the names there are,
    /// [`TemplateError::Syntax`] when the chosen one does not compile.
    pub fn select(&self, name: Option<&str>, with_tools: bool) -> Result<&ChatTemplate, TemplateError> {
        let named = self.find(name, with_tools)?;
        if let Some(compiled) = named.compiled.get() {
            return Ok(compiled);
        }
        let compiled = ChatTemplate::new(&named.name, &named.source)?;
        Ok(named.compiled.get_or_init(|| compiled))
    }

    fn find(&self, name: Option<&str>, with_tools: bool) -> Result<&Named, TemplateError> {
        let by_name = |name: &str| self.templates.iter().find(|named| named.name == name);
        if self.templates.is_empty() {
            return Err(TemplateError::Missing);
        }
        let found = match (name, self.templates.as_slice()) {
            (Some(name), _) => by_name(name),
            // A single template under another name comes from a list, which transformers does not unwrap.
            (None, [only]) if only.name == DEFAULT => Some(only),
            (None, _) => with_tools.then(|| by_name(TOOL_USE)).flatten().or_else(|| by_name(DEFAULT)),
        };
        found.ok_or_else(|| TemplateError::NoSuchTemplate {
            wanted: match name {
                Some(name) => format!("there is no chat template named `{name}`"),
                None => "none of the model's chat templates is the default".to_owned(),
            },
            available: self.names().iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", "),
        })
    }
}

fn unreadable(path: &Path, cause: std::io::Error) -> TemplateError {
    TemplateError::Unreadable { path: path.to_owned(), cause }
}

/// Reads a template file, or nothing when there is none.
fn read_if_present(path: &Path) -> Result<Option<String>, TemplateError> {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(unreadable(path, error)),
    };
    let mut text = String::new();
    // JSON escapes can make a legal template up to six times longer.
    let limit = 6 * MAX_SOURCE as u64 + 1;
    let read = file.take(limit).read_to_string(&mut text).map_err(|error| unreadable(path, error))?;
    if read as u64 == limit {
        return Err(TemplateError::Malformed {
            place: path.display().to_string(),
            problem: format!("longer than {} bytes", limit - 1),
        });
    }
    Ok(Some(text))
}

/// The names of the `.jinja` files in a directory, sorted.
fn template_names(directory: &Path) -> Result<Vec<String>, TemplateError> {
    let entries = match std::fs::read_dir(directory) {
        Ok(entries) => entries,
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
            return Ok(Vec::new());
        }
        Err(error) => return Err(unreadable(directory, error)),
    };
    let mut names = Vec::new();
    for entry in entries {
        let file_name = entry.map_err(|error| unreadable(directory, error))?.file_name();
        if let Some(name) = file_name.to_str().and_then(|name| name.strip_suffix(".jinja")) {
            names.push(name.to_owned());
        }
    }
    names.sort_unstable();
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn write(directory: &Path, name: &str, text: &str) {
        let path = directory.join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }

    #[test]
    fn template_files_replace_the_config() {
        let directory = tempfile::tempdir().unwrap();
        let config = json!({"chat_template": "config"});
        let source = |config: &Json| {
            let templates = ChatTemplates::from_directory(directory.path(), config).unwrap();
            templates.source(None, false).map(str::to_owned)
        };
        assert!(matches!(source(&json!({})), Err(TemplateError::Missing)));
        write(directory.path(), "chat_template.json", r#"{"chat_template": "legacy"}"#);
        assert_eq!(source(&json!({})).unwrap(), "legacy");
        assert_eq!(source(&config).unwrap(), "config");
        write(directory.path(), "chat_template.jinja", "file");
        assert_eq!(source(&config).unwrap(), "file");
        write(directory.path(), "additional_chat_templates/tool_use.jinja", "tools");
        let templates = ChatTemplates::from_directory(directory.path(), &config).unwrap();
        assert_eq!(templates.names(), ["default", "tool_use"]);
        assert_eq!(templates.source(None, false).unwrap(), "file");
        assert_eq!(templates.source(None, true).unwrap(), "tools");
    }

    #[test]
    fn named_templates_are_chosen_by_name_then_by_tools() {
        let templates = ChatTemplates::from_config_value(&json!([
            {"name": "rag", "template": "R"},
            {"name": "default", "template": "D"},
            {"name": "tool_use", "template": "T"},
        ]))
        .unwrap();
        assert_eq!(templates.source(None, false).unwrap(), "D");
        assert_eq!(templates.source(None, true).unwrap(), "T");
        assert_eq!(templates.source(Some("rag"), true).unwrap(), "R");
        let error = templates.source(Some("other"), false).unwrap_err();
        assert_eq!(
            error.to_string(),
            "there is no chat template named `other`; this model's templates are named `default`, `rag`, `tool_use`"
        );
    }

    #[test]
    fn several_templates_without_default_are_an_error_that_names_them() {
        let templates = ChatTemplates::from_config_value(&json!([
            {"name": "b", "template": ""},
            {"name": "a", "template": ""},
        ]))
        .unwrap();
        let error = templates.select(None, true).unwrap_err();
        assert!(error.to_string().ends_with("named `a`, `b`"), "{error}");
    }

    #[test]
    fn a_malformed_config_value_is_an_error() {
        for value in [json!(3), json!({"a": "b"}), json!([{"name": "a"}]), json!(["a"])] {
            assert!(ChatTemplates::from_config_value(&value).is_err(), "{value}");
        }
    }
}
