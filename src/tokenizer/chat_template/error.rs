//! What can go wrong with a chat template.

use std::path::PathBuf;

use minijinja::ErrorKind;

/// A chat template that cannot be found, parsed or rendered.
#[derive(Debug, thiserror::Error)]
pub enum TemplateError {
    /// The model ships no template and none was given.
    #[error(
        "the model has no chat template; give one with `--chat-template`, or use `--raw` to send the prompt as it is"
    )]
    Missing,

    /// No template of that name, or several with none to prefer.
    #[error("{wanted}; this model's templates are named {available}")]
    NoSuchTemplate {
        /// What was asked for.
        wanted: String,
        /// The names there are, in order.
        available: String,
    },

    /// A file that should hold templates cannot be read.
    #[error("cannot read the chat template {}: {cause}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// Why.
        cause: std::io::Error,
    },

    /// A field or file that should hold templates holds something else.
    #[error("{place}: {problem}")]
    Malformed {
        /// The field or file.
        place: String,
        /// What is wrong with it.
        problem: String,
    },

    /// The template is not valid Jinja, or goes past what is allowed.
    #[error("chat template `{template}`, line {line}: {message}")]
    Syntax {
        /// The template's name.
        template: String,
        /// The line, from 1.
        line: usize,
        /// What is wrong.
        message: String,
    },

    /// The template called `raise_exception`.
    #[error("the chat template `{template}` refuses the conversation: {message} (line {line})")]
    Raised {
        /// The template's name.
        template: String,
        /// The line of the call, from 1.
        line: usize,
        /// What the template says.
        message: String,
    },

    /// The template failed while it ran.
    #[error("chat template `{template}`, line {line}: {message}")]
    Render {
        /// The template's name.
        template: String,
        /// The line, from 1; 0 when unknown.
        line: usize,
        /// What went wrong.
        message: String,
    },

    /// The template ran longer than it may.
    #[error(
        "chat template `{template}`, line {line}: stopped after {fuel} steps; the template loops too long for this conversation"
    )]
    OutOfFuel {
        /// The template's name.
        template: String,
        /// The line it was stopped at; 0 when unknown.
        line: usize,
        /// The steps it was given.
        fuel: u64,
    },

    /// The template wrote more than it may.
    #[error("chat template `{template}`: the prompt is longer than {limit} bytes")]
    OutputTooLong {
        /// The template's name.
        template: String,
        /// The limit in bytes.
        limit: usize,
    },

    /// The request cannot be rendered by any template.
    #[error("{0}")]
    InvalidRequest(String),
}

/// A syntax error before the template's name is known.
#[derive(Debug, PartialEq)]
pub(super) struct SyntaxError {
    pub(super) line: usize,
    pub(super) message: String,
}

/// Marks an error as the template's own doing.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(super) struct RaisedByTemplate(pub(super) String);

impl SyntaxError {
    pub(super) fn named(self, template: &str) -> TemplateError {
        TemplateError::Syntax { template: template.to_owned(), line: self.line, message: self.message }
    }
}

/// Translates minijinja's error, finding the innermost cause and line.
pub(super) fn from_minijinja(template: &str, fuel: u64, error: &minijinja::Error) -> TemplateError {
    let mut innermost = error;
    let mut line = error.line().unwrap_or(0);
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        if let Some(raised) = cause.downcast_ref::<RaisedByTemplate>() {
            return TemplateError::Raised { template: template.to_owned(), line, message: raised.0.clone() };
        }
        if let Some(cause) = cause.downcast_ref::<minijinja::Error>() {
            innermost = cause;
            line = cause.line().unwrap_or(line);
        }
        source = cause.source();
    }
    if innermost.kind() == ErrorKind::OutOfFuel {
        return TemplateError::OutOfFuel { template: template.to_owned(), line, fuel };
    }
    let message = match (innermost.kind(), innermost.detail()) {
        (ErrorKind::InvalidOperation | ErrorKind::SyntaxError, Some(detail)) => detail.to_owned(),
        (ErrorKind::UndefinedError, None) => "an attribute of an undefined value is read".to_owned(),
        (kind, Some(detail)) => format!("{kind}: {detail}"),
        (kind, None) => kind.to_string(),
    };
    let (template, message) = (template.to_owned(), one_line(&message));
    if innermost.kind() == ErrorKind::SyntaxError {
        return TemplateError::Syntax { template, line, message };
    }
    TemplateError::Render { template, line, message }
}

fn one_line(message: &str) -> String {
    message.split_whitespace().collect::<Vec<_>>().join(" ")
}
