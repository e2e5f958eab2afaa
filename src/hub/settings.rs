//! Where the hub is and how it is spoken to, from huggingface_hub's environment variables (its `constants.py`).

use std::fmt;
use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use super::error::HubError;
use super::url::origin;
use crate::checkpoint::environment::Environment;
use crate::checkpoint::hub_cache::HubCache;

const DEFAULT_ENDPOINT: &str = "https://huggingface.co";
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(10);

/// An access token; never printed.
#[derive(Clone, PartialEq, Eq)]
pub struct Token(String);

impl Token {
    /// The token of this text, without the white space around it; `None` when nothing is left.
    pub fn new(text: &str) -> Option<Self> {
        let text = text.trim();
        // Anything else could not go into a header.
        let plain = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_graphic());
        plain.then(|| Self(text.to_owned()))
    }

    pub(super) fn header(&self) -> String {
        format!("Bearer {}", self.0)
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, formatter: &mut fmt::Formatter) -> fmt::Result {
        formatter.write_str("Token(…)")
    }
}

/// How often a request is tried and how long to wait in between.
#[derive(Clone, Copy, Debug)]
pub struct Retry {
    /// Tries without any progress before giving up; at least 1.
    pub tries: u32,
    /// The first wait; it doubles from try to try, up to sixteen times.
    pub wait: Duration,
    /// Longest wait that a server may ask for.
    pub longest: Duration,
}

impl Default for Retry {
    fn default() -> Self {
        Self { tries: 5, wait: Duration::from_millis(500), longest: Duration::from_secs(120) }
    }
}

/// Where the hub is and how it is spoken to.
#[derive(Clone, Debug)]
pub struct HubSettings {
    /// The hub's address, without a slash at the end.
    pub endpoint: String,
    /// Sent to the endpoint and nowhere else.
    pub token: Option<Token>,
    /// The network is not to be used.
    pub offline: bool,
    /// The cache on this machine.
    pub cache: HubCache,
    /// Longest wait for an answer to a question.
    pub metadata_timeout: Duration,
    /// Longest wait for more of a file.
    pub download_timeout: Duration,
    /// Certificates to trust instead of the built-in ones.
    pub certificates: Option<PathBuf>,
    /// When to try again.
    pub retry: Retry,
}

impl HubSettings {
    /// What the variables say.
    ///
    /// # Errors
    /// `HF_ENDPOINT` is no web address, or a timeout is no number.
    pub fn from_environment(environment: &Environment) -> Result<Self, HubError> {
        let given = environment.get("HF_ENDPOINT").unwrap_or(DEFAULT_ENDPOINT);
        let endpoint = given.trim_end_matches('/').to_owned();
        if origin(&endpoint).is_none() {
            return Err(HubError::Setting {
                name: "HF_ENDPOINT",
                value: given.to_owned(),
                problem: "expected an address like https://huggingface.co",
            });
        }
        let offline =
            ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"].iter().any(|name| is_true(environment, name));
        Ok(Self {
            endpoint,
            token: download_token(environment),
            offline,
            cache: HubCache::from_environment(environment),
            metadata_timeout: seconds(environment, "HF_HUB_ETAG_TIMEOUT")?,
            download_timeout: seconds(environment, "HF_HUB_DOWNLOAD_TIMEOUT")?,
            certificates: ["SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"]
                .iter()
                .find_map(|name| environment.path(name)),
            retry: Retry::default(),
        })
    }

    /// The same, with the token that may write: the one saved for this program, else the general one.
    pub fn with_upload_token(mut self, environment: &Environment) -> Self {
        self.token = saved_token(environment).or_else(|| any_token(environment));
        self
    }
}

/// A variable that huggingface_hub takes for "yes".
fn is_true(environment: &Environment, name: &str) -> bool {
    let value = environment.get(name).unwrap_or_default().to_ascii_uppercase();
    matches!(value.as_str(), "1" | "ON" | "YES" | "TRUE")
}

fn seconds(environment: &Environment, name: &'static str) -> Result<Duration, HubError> {
    let Some(value) = environment.get(name) else { return Ok(DEFAULT_TIMEOUT) };
    let parsed = value.trim().parse::<f64>().ok().filter(|seconds| *seconds > 0.0);
    parsed.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok()).ok_or_else(|| HubError::Setting {
        name,
        value: value.to_owned(),
        problem: "expected a number of seconds",
    })
}

fn download_token(environment: &Environment) -> Option<Token> {
    if is_true(environment, "HF_HUB_DISABLE_IMPLICIT_TOKEN") {
        return None;
    }
    any_token(environment)
}

fn any_token(environment: &Environment) -> Option<Token> {
    let variable = ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"].iter().find_map(|name| environment.get(name));
    variable.and_then(Token::new).or_else(|| {
        let file =
            environment.path("HF_TOKEN_PATH").unwrap_or_else(|| HubCache::home(environment).join("token"));
        Token::new(&fs::read_to_string(file).ok()?)
    })
}

/// `token` of `~/.mlx-bun/hf.json`.
fn saved_token(environment: &Environment) -> Option<Token> {
    let text = fs::read(environment.expand("~/.mlx-bun/hf.json")).ok()?;
    let saved: serde_json::Value = serde_json::from_slice(&text).ok()?;
    Token::new(saved.get("token")?.as_str()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(pairs: &[(&str, &str)]) -> Result<HubSettings, HubError> {
        HubSettings::from_environment(&Environment::from_pairs(pairs.iter().copied()))
    }

    #[test]
    fn variables_are_read() {
        let plain = settings(&[("HOME", "/nonexistent")]).unwrap();
        assert_eq!(plain.endpoint, DEFAULT_ENDPOINT);
        assert!(plain.token.is_none() && !plain.offline);
        let set = settings(&[
            ("HF_ENDPOINT", "http://mirror:8080/hf/"),
            ("HF_TOKEN", " hf_x\n"),
            ("TRANSFORMERS_OFFLINE", "Yes"),
            ("HF_HUB_DOWNLOAD_TIMEOUT", "0.5"),
        ])
        .unwrap();
        assert_eq!(set.endpoint, "http://mirror:8080/hf");
        assert_eq!(set.token, Token::new("hf_x"));
        assert!(set.offline);
        assert_eq!(set.download_timeout, Duration::from_millis(500));
        assert!(settings(&[("HF_HUB_OFFLINE", "0")]).is_ok_and(|settings| !settings.offline));
    }

    #[test]
    fn bad_values_name_the_variable() {
        for (name, value) in [
            ("HF_ENDPOINT", "huggingface.co"),
            ("HF_ENDPOINT", "ftp://x"),
            ("HF_HUB_ETAG_TIMEOUT", "soon"),
            ("HF_HUB_DOWNLOAD_TIMEOUT", "-1"),
            ("HF_HUB_DOWNLOAD_TIMEOUT", "1e99"),
        ] {
            let message = settings(&[(name, value)]).unwrap_err().to_string();
            assert!(message.starts_with(&format!("{name} is `{value}`: expected ")), "{message}");
        }
    }

    #[test]
    fn tokens_come_from_variable_then_file_and_stay_secret() {
        let home = tempfile::tempdir().unwrap();
        let home_path = home.path().to_str().unwrap();
        fs::create_dir_all(home.path().join(".mlx-bun")).unwrap();
        fs::write(home.path().join("token"), "from_file\n").unwrap();
        let variables = [("HOME", home_path), ("HF_HOME", home_path)];
        let token = |more: &[(&str, &str)]| {
            let pairs: Vec<_> = variables.iter().chain(more).copied().collect();
            settings(&pairs).unwrap().token
        };
        assert_eq!(token(&[]), Token::new("from_file"));
        assert_eq!(token(&[("HF_TOKEN", "from_variable")]), Token::new("from_variable"));
        assert_eq!(token(&[("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1")]), None);

        fs::write(home.path().join(".mlx-bun/hf.json"), r#"{"token":"saved","savedAt":"x"}"#).unwrap();
        let environment =
            Environment::from_pairs(variables.into_iter().chain([("HF_TOKEN", "from_variable")]));
        let upload = HubSettings::from_environment(&environment).unwrap().with_upload_token(&environment);
        assert_eq!(upload.token, Token::new("saved"));
        assert!(!format!("{upload:?}").contains("saved"));
        assert_eq!(Token::new("two\nlines"), None);
    }
}
