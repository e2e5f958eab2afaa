//! Requests to the hub: with its token, tried again when that may help, redirects followed by our own rules.
//!
//! The HTTP client below follows no redirect by itself, so that the token is sent to the endpoint alone and a
//! `Range` survives the hop to the storage host.

use std::io::{self, Read};
use std::path::Path;
use std::thread;
use std::time::Duration;

use ureq::http::{HeaderMap, Request, Response, request};
use ureq::tls::{Certificate, PemItem, RootCerts, TlsConfig, parse_pem};
use ureq::{Agent, AsSendBody, Body, SendBody};

use super::error::HubError;
use super::progress::TransferProgress;
use super::settings::HubSettings;
use super::url::{join, origin};

const MOST_REDIRECTS: usize = 5;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Longest answer to a question.
const LONGEST_ANSWER: u64 = 64 << 20;
const LONGEST_COMPLAINT: u64 = 4096;
/// Statuses after which huggingface_hub tries again (`utils/_http.py`).
const TRANSIENT: [u16; 6] = [408, 429, 500, 502, 503, 504];
/// A host that cannot be reached at all is given up sooner than one that stumbles.
const MOST_CONNECTS: u32 = 2;
const NAP: Duration = Duration::from_millis(50);

/// TLS that trusts the certificates of a PEM file and no others.
///
/// # Errors
/// The file cannot be read.
pub fn trusting(file: &Path) -> io::Result<TlsConfig> {
    let pem = std::fs::read(file)?;
    let certificate = |item| match item {
        Ok(PemItem::Certificate(certificate)) => Some(certificate),
        _ => None,
    };
    let roots: Vec<Certificate> = parse_pem(&pem).filter_map(certificate).collect();
    Ok(TlsConfig::builder().root_certs(RootCerts::Specific(roots.into())).build())
}

/// Speaks to the hub. Can be shared between threads.
#[derive(Clone, Debug)]
pub struct HubClient {
    agent: Agent,
    settings: HubSettings,
}

/// What is sent along.
pub(super) enum Payload<'a> {
    None,
    Bytes(&'a [u8]),
    /// So many bytes of what `open` gives, which is called once a try.
    Stream {
        length: u64,
        open: &'a dyn Fn() -> io::Result<Box<dyn Read + 'a>>,
    },
}

/// A request.
pub(super) struct Call<'a> {
    pub method: &'static str,
    pub url: String,
    pub headers: Vec<(String, String)>,
    pub payload: Payload<'a>,
    /// Longest wait for a byte.
    pub timeout: Duration,
    /// What this is, for messages: "listing org/name".
    pub action: &'a str,
}

/// An answer whose status is not an error.
pub(super) struct Answer {
    pub status: u16,
    pub headers: HeaderMap,
    /// Headers of the endpoint's own answer, where that was a redirect.
    pub first_headers: HeaderMap,
    pub body: Body,
}

/// One try that failed.
enum Failure {
    /// The answer is an error.
    Status { status: u16, headers: HeaderMap, detail: String },
    /// There is none. Whether the request may have been carried out all the same.
    Network { host: String, cause: String, connected: bool },
    /// It makes no sense to try again.
    Final(HubError),
}

impl HubClient {
    /// A client with these settings.
    ///
    /// # Errors
    /// The certificates cannot be read.
    pub fn new(settings: HubSettings) -> Result<Self, HubError> {
        let mut config = Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .timeout_connect(Some(CONNECT_TIMEOUT))
            .timeout_resolve(Some(CONNECT_TIMEOUT))
            .accept_encoding("identity")
            .user_agent(concat!("mlx-bun/", env!("CARGO_PKG_VERSION")));
        if let Some(file) = &settings.certificates {
            config = config.tls_config(trusting(file).map_err(HubError::io("read", file))?);
        }
        Ok(Self { agent: config.build().new_agent(), settings })
    }

    /// The settings.
    pub fn settings(&self) -> &HubSettings {
        &self.settings
    }

    /// A question with a JSON answer.
    pub(super) fn json(
        &self,
        call: &Call,
        repeatable: bool,
        progress: &dyn TransferProgress,
    ) -> Result<serde_json::Value, HubError> {
        let answer = self.send(call, repeatable, progress)?;
        let text = answer.text(call.action)?;
        serde_json::from_slice(&text).map_err(|error| HubError::Malformed {
            action: call.action.to_owned(),
            problem: error.to_string(),
        })
    }

    /// Sends a request, again and again while that may help. One that is not `repeatable` is sent again only when
    /// it was certainly not carried out.
    pub(super) fn send(
        &self,
        call: &Call,
        repeatable: bool,
        progress: &dyn TransferProgress,
    ) -> Result<Answer, HubError> {
        let mut tries = 0;
        loop {
            let failure = match self.follow(call) {
                Ok(answer) => return Ok(answer),
                Err(failure) => failure,
            };
            tries += 1;
            let (most, asked) = match &failure {
                Failure::Status { status, headers, .. } => {
                    let refused = matches!(status, 429 | 503);
                    let may_help = TRANSIENT.contains(status) && (repeatable || refused);
                    (if may_help { self.settings.retry.tries } else { 0 }, retry_after(headers))
                }
                Failure::Network { connected, .. } if *connected => {
                    (if repeatable { self.settings.retry.tries } else { 0 }, None)
                }
                Failure::Network { .. } => (self.settings.retry.tries.min(MOST_CONNECTS), None),
                Failure::Final(_) => (0, None),
            };
            if tries >= most {
                return Err(self.complaint(call, failure));
            }
            self.wait(tries, asked, progress)?;
        }
    }

    /// Waits before try number `tries`, as long as the server asks for within reason.
    pub(super) fn wait(
        &self,
        tries: u32,
        asked: Option<Duration>,
        progress: &dyn TransferProgress,
    ) -> Result<(), HubError> {
        let retry = self.settings.retry;
        let own = retry.wait.saturating_mul(1 << tries.saturating_sub(1).min(4));
        let mut left = asked.unwrap_or(own).min(retry.longest);
        if asked.is_some() {
            progress.waiting(left);
        }
        while !left.is_zero() {
            if progress.is_cancelled() {
                return Err(HubError::Cancelled);
            }
            let nap = left.min(NAP);
            thread::sleep(nap);
            left -= nap;
        }
        Ok(())
    }

    /// One try, through all redirects.
    fn follow(&self, call: &Call) -> Result<Answer, Failure> {
        let mut url = call.url.clone();
        let mut first_headers = None;
        for _ in 0..=MOST_REDIRECTS {
            let response = self.once(call, &url)?;
            let (parts, body) = response.into_parts();
            let status = parts.status.as_u16();
            if status < 300 {
                let first_headers = first_headers.unwrap_or_else(|| parts.headers.clone());
                return Ok(Answer { status, headers: parts.headers, first_headers, body });
            }
            let kept = matches!(status, 307 | 308) || (matches!(status, 301..=303) && call.method == "GET");
            let location = parts.headers.get("location").and_then(|location| location.to_str().ok());
            let Some(location) = location.filter(|_| kept) else {
                let detail = complaint_text(body, &parts.headers);
                return Err(Failure::Status { status, headers: parts.headers, detail });
            };
            url = self.next_url(&url, location).map_err(|problem| {
                Failure::Final(HubError::Redirect { action: call.action.to_owned(), problem })
            })?;
            first_headers.get_or_insert(parts.headers);
        }
        let problem = format!("more than {MOST_REDIRECTS} redirects");
        Err(Failure::Final(HubError::Redirect { action: call.action.to_owned(), problem }))
    }

    fn next_url(&self, from: &str, location: &str) -> Result<String, String> {
        let next =
            join(from, location).ok_or_else(|| format!("redirected to `{location}`, no web address"))?;
        let encrypted = |url: &str| origin(url).is_some_and(|origin| origin.https);
        match encrypted(from) && !encrypted(&next) {
            true => Err(format!("redirected from https to `{next}`, which is not encrypted")),
            false => Ok(next),
        }
    }

    fn once(&self, call: &Call, url: &str) -> Result<Response<Body>, Failure> {
        let malformed =
            |problem: String| Failure::Final(HubError::Malformed { action: call.action.to_owned(), problem });
        let to = origin(url).ok_or_else(|| malformed(format!("`{url}` is no web address")))?;
        let mut request = Request::builder().method(call.method).uri(url);
        for (name, value) in &call.headers {
            request = request.header(name, value);
        }
        if let Some(token) = &self.settings.token
            && origin(&self.settings.endpoint).as_ref() == Some(&to)
        {
            request = request.header("Authorization", token.header());
        }
        let network = |error: ureq::Error| {
            let connected = !matches!(
                error,
                ureq::Error::HostNotFound | ureq::Error::ConnectionFailed | ureq::Error::Tls(_)
            ) && !matches!(&error, ureq::Error::Io(cause) if never_connected(cause));
            Failure::Network { host: to.host.clone(), cause: error.to_string(), connected }
        };
        match &call.payload {
            Payload::None => self.run(request, (), call.timeout),
            Payload::Bytes(bytes) => {
                self.run(request.header("Content-Length", bytes.len()), *bytes, call.timeout)
            }
            Payload::Stream { length, open } => {
                let mut reader = open().map_err(|cause| malformed(cause.to_string()))?;
                let body = SendBody::from_reader(&mut reader);
                self.run(request.header("Content-Length", *length), body, call.timeout)
            }
        }
        .map_err(network)
    }

    fn run(
        &self,
        request: request::Builder,
        body: impl AsSendBody,
        timeout: Duration,
    ) -> Result<Response<Body>, ureq::Error> {
        let request = self
            .agent
            .configure_request(request.body(body)?)
            .timeout_per_read(Some(timeout))
            .timeout_per_write(Some(timeout))
            .build();
        self.agent.run(request)
    }

    fn complaint(&self, call: &Call, failure: Failure) -> HubError {
        let action = call.action.to_owned();
        match failure {
            Failure::Final(error) => error,
            Failure::Network { host, cause, .. } => HubError::Unreachable { action, host, cause },
            Failure::Status { status, headers, detail } => {
                let hint = self.hint(status, &headers);
                HubError::Status { action, status, detail, hint }
            }
        }
    }

    fn hint(&self, status: u16, headers: &HeaderMap) -> Option<String> {
        let code = headers.get("x-error-code").and_then(|code| code.to_str().ok()).unwrap_or_default();
        let with_token = self.settings.token.is_some();
        let hint = match (status, code) {
            (401 | 403, "GatedRepo") => {
                "the repository is gated: accept its terms on its page, then set HF_TOKEN".to_owned()
            }
            (401, _) if !with_token => {
                "it is gated, private or not there; set HF_TOKEN if you have access".to_owned()
            }
            (401, _) => "the token is not accepted; set HF_TOKEN to a valid one".to_owned(),
            (403, _) => {
                "the token has no access to this; see its rights on the hub's settings page".to_owned()
            }
            (404, _) => "check the id and the revision; a private repository needs HF_TOKEN".to_owned(),
            (413, _) => "the file is too large for this way of sending".to_owned(),
            (429, _) => "too many requests; wait a little".to_owned(),
            _ => return None,
        };
        Some(hint)
    }
}

fn never_connected(cause: &io::Error) -> bool {
    use io::ErrorKind::{AddrNotAvailable, ConnectionRefused, HostUnreachable, NetworkUnreachable};
    matches!(cause.kind(), ConnectionRefused | HostUnreachable | NetworkUnreachable | AddrNotAvailable)
}

impl Answer {
    /// The whole body of an answer to a question.
    pub(super) fn text(self, action: &str) -> Result<Vec<u8>, HubError> {
        let mut text = Vec::new();
        let mut reader = self.body.into_reader().take(LONGEST_ANSWER + 1);
        let problem = match reader.read_to_end(&mut text) {
            Ok(_) if text.len() as u64 <= LONGEST_ANSWER => return Ok(text),
            Ok(_) => format!("it is longer than {LONGEST_ANSWER} bytes"),
            Err(error) => error.to_string(),
        };
        Err(HubError::Malformed { action: action.to_owned(), problem })
    }
}

/// What the hub says went wrong: its header, the `error` of its JSON, or the text as it is.
fn complaint_text(body: Body, headers: &HeaderMap) -> String {
    if let Some(message) = headers.get("x-error-message").and_then(|message| message.to_str().ok()) {
        return message.to_owned();
    }
    let mut text = Vec::new();
    // A body that breaks off says what it says.
    let _ = body.into_reader().take(LONGEST_COMPLAINT).read_to_end(&mut text);
    let parsed: Option<serde_json::Value> = serde_json::from_slice(&text).ok();
    let field = |name| parsed.as_ref()?.get(name)?.as_str().map(str::to_owned);
    let text =
        field("error").or_else(|| field("message")).unwrap_or_else(|| String::from_utf8_lossy(&text).into());
    if text.trim().is_empty() { "no reason given".to_owned() } else { text.trim().to_owned() }
}

/// Seconds that the server wants us to wait: `Retry-After`, or the `t` of the `RateLimit` draft.
fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let text = |name| headers.get(name).and_then(|value| value.to_str().ok());
    let limit = || {
        let field = text("ratelimit")?.split(';').find_map(|field| field.trim().strip_prefix("t="))?;
        field.parse().ok()
    };
    let seconds: Option<u64> = text("retry-after").and_then(|value| value.trim().parse().ok()).or_else(limit);
    seconds.map(Duration::from_secs)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_say_how_long_to_wait() {
        let wait = |name: &'static str, value: &'static str| {
            let mut headers = HeaderMap::new();
            headers.insert(name, value.parse().unwrap());
            retry_after(&headers)
        };
        assert_eq!(wait("retry-after", "7"), Some(Duration::from_secs(7)));
        assert_eq!(wait("ratelimit", r#""api";r=0;t=55"#), Some(Duration::from_secs(55)));
        assert_eq!(wait("retry-after", "Wed, 21 Oct 2015 07:28:00 GMT"), None);
        assert_eq!(wait("retry-after", "-1"), None);
    }
}
