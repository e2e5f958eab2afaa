//! Who may come in: keys, and which pages and names a browser may reach the server by.

use axum::http::uri::Authority;
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use sha2::{Digest as _, Sha256};

use super::error::ApiError;

/// The rules.
#[derive(Clone, Debug, Default)]
pub struct Guard {
    /// Hashes of the keys that open the server; empty for an open one.
    keys: Vec<[u8; 32]>,
    /// Origins of web pages that may read replies, beside pages of this machine; `*` for all.
    origins: Vec<String>,
    /// Names that the server is reached by, beside addresses and this machine's own.
    hosts: Vec<String>,
}

impl Guard {
    /// Rules for these keys, origins and host names.
    pub fn new(keys: &[String], origins: Vec<String>, hosts: Vec<String>) -> Self {
        let keys = keys.iter().map(|key| Sha256::digest(key.as_bytes()).into()).collect();
        let lower =
            |list: Vec<String>| list.iter().map(|text| text.trim_end_matches('/').to_lowercase()).collect();
        Self { keys, origins: lower(origins), hosts: lower(hosts) }
    }

    /// Checks a request; `open` is a route that needs no key.
    ///
    /// # Errors
    /// It may not come in.
    pub fn check(&self, method: &Method, headers: &HeaderMap, open: bool) -> Result<(), ApiError> {
        self.check_host(headers)?;
        self.check_origin(headers)?;
        if open || *method == Method::OPTIONS || self.keys.is_empty() || self.has_key(headers) {
            return Ok(());
        }
        let message = "this server needs its API key: `Authorization: Bearer KEY`, or `x-api-key: KEY`";
        Err(ApiError::new(StatusCode::UNAUTHORIZED, message).code("invalid_api_key"))
    }

    /// A page that made its own name point here (DNS rebinding) is recognised by that name. It knows no key, so with
    /// keys any name will do.
    fn check_host(&self, headers: &HeaderMap) -> Result<(), ApiError> {
        let Some(host) = headers.get(header::HOST) else { return Ok(()) };
        if !self.keys.is_empty() {
            return Ok(());
        }
        let name = host.to_str().ok().and_then(|host| host.parse::<Authority>().ok());
        let name = name.map(|authority| authority.host().to_lowercase()).unwrap_or_default();
        if is_address(&name) || is_local(&name) || self.hosts.contains(&name) {
            return Ok(());
        }
        let message = format!(
            "`{name}` is no name of this server; start it with --allowed-hosts {name} if it should be"
        );
        Err(ApiError::new(StatusCode::FORBIDDEN, message))
    }

    fn check_origin(&self, headers: &HeaderMap) -> Result<(), ApiError> {
        let Some(origin) = headers.get(header::ORIGIN) else { return Ok(()) };
        if self.allows(origin, headers) {
            return Ok(());
        }
        let message = "this web page may not use the server; --cors-origin allows pages by their origin";
        Err(ApiError::new(StatusCode::FORBIDDEN, message))
    }

    /// Whether a page of this origin may use the server: one of this machine, of the server's own address, or listed.
    fn allows(&self, origin: &HeaderValue, headers: &HeaderMap) -> bool {
        let Some(origin) = origin.to_str().ok().map(str::to_lowercase) else { return false };
        if self.origins.iter().any(|allowed| *allowed == "*" || *allowed == origin) {
            return true;
        }
        let authority = origin.strip_prefix("http://").or(origin.strip_prefix("https://"));
        let Some(authority) = authority.and_then(|authority| authority.parse::<Authority>().ok()) else {
            return false;
        };
        let host = headers.get(header::HOST).and_then(|host| host.to_str().ok()).unwrap_or_default();
        is_local(authority.host()) || (!host.is_empty() && authority.as_str().eq_ignore_ascii_case(host))
    }

    /// All keys are compared, each in full, whatever is presented.
    fn has_key(&self, headers: &HeaderMap) -> bool {
        let bearer = headers.get(header::AUTHORIZATION).map(HeaderValue::as_bytes).and_then(|value| {
            let (scheme, key) = value.split_at_checked(7)?;
            scheme.eq_ignore_ascii_case(b"bearer ").then_some(key.trim_ascii())
        });
        let presented = bearer.or_else(|| headers.get("x-api-key").map(|key| key.as_bytes().trim_ascii()));
        let Some(presented) = presented else { return false };
        let presented: [u8; 32] = Sha256::digest(presented).into();
        let differs = |key: &[u8; 32]| key.iter().zip(presented).fold(0, |bits, (a, b)| bits | (a ^ b));
        self.keys.iter().fold(false, |found, key| found | (differs(key) == 0))
    }

    /// Lets a page that may use the server read the reply.
    pub fn add_cors(&self, request: &HeaderMap, reply: &mut HeaderMap) {
        let Some(origin) = request.get(header::ORIGIN).filter(|origin| self.allows(origin, request)) else {
            return;
        };
        reply.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin.clone());
        reply.append(header::VARY, HeaderValue::from_static("Origin"));
        reply.insert(
            header::ACCESS_CONTROL_EXPOSE_HEADERS,
            HeaderValue::from_static("X-Request-Id, Warning, Retry-After"),
        );
        let methods = HeaderValue::from_static("GET, POST, DELETE, HEAD, OPTIONS");
        reply.insert(header::ACCESS_CONTROL_ALLOW_METHODS, methods);
        reply.insert(header::ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static("600"));
        let asked = request.get(header::ACCESS_CONTROL_REQUEST_HEADERS).cloned();
        let headers = asked.unwrap_or(HeaderValue::from_static("Authorization, Content-Type"));
        reply.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, headers);
    }
}

fn is_address(host: &str) -> bool {
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    bare.parse::<std::net::IpAddr>().is_ok()
}

fn is_local(host: &str) -> bool {
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    bare == "localhost"
        || bare.ends_with(".localhost")
        || bare.parse::<std::net::IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
        pairs.iter().map(|(name, value)| (name.parse().unwrap(), value.parse().unwrap())).collect()
    }

    fn status(guard: &Guard, pairs: &[(&'static str, &str)]) -> u16 {
        guard
            .check(&Method::POST, &headers(pairs), false)
            .map_or_else(|error| error.status.as_u16(), |()| 200)
    }

    #[test]
    fn x9_only_pages_of_this_machine_come_in() {
        let guard = Guard::default();
        for origin in
            ["http://localhost:3000", "https://127.0.0.1", "http://[::1]:8080", "http://app.localhost"]
        {
            assert_eq!(status(&guard, &[("host", "127.0.0.1:8080"), ("origin", origin)]), 200, "{origin}");
        }
        for origin in
            ["https://evil.example", "http://localhost.evil.example", "null", "file://", "http://1.2.3.4"]
        {
            assert_eq!(status(&guard, &[("host", "127.0.0.1:8080"), ("origin", origin)]), 403, "{origin}");
        }
        assert_eq!(status(&guard, &[("host", "1.2.3.4:8080"), ("origin", "http://1.2.3.4:8080")]), 200);
        let listed = Guard::new(&[], vec!["https://Good.example/".to_owned()], Vec::new());
        assert_eq!(status(&listed, &[("origin", "https://good.example")]), 200);
        assert_eq!(status(&Guard::new(&[], vec!["*".to_owned()], Vec::new()), &[("origin", "null")]), 200);
    }

    #[test]
    fn x9_rebound_names_are_refused() {
        let guard = Guard::default();
        for host in ["localhost:8080", "127.0.0.1", "[::1]:8080", "192.168.1.5:8080"] {
            assert_eq!(status(&guard, &[("host", host)]), 200, "{host}");
        }
        assert_eq!(status(&guard, &[("host", "evil.example:8080")]), 403);
        assert_eq!(status(&guard, &[("host", "evil.example"), ("origin", "http://evil.example")]), 403);
        let named = Guard::new(&[], Vec::new(), vec!["Box.lan".to_owned()]);
        assert_eq!(status(&named, &[("host", "box.LAN:8080")]), 200);
        let keyed = Guard::new(&["k".to_owned()], Vec::new(), Vec::new());
        assert_eq!(status(&keyed, &[("host", "any.example"), ("x-api-key", "k")]), 200);
    }

    #[test]
    fn keys_open_the_server() {
        let guard = Guard::new(&["one".to_owned(), "two".to_owned()], Vec::new(), Vec::new());
        assert_eq!(status(&guard, &[]), 401);
        assert_eq!(status(&guard, &[("authorization", "Bearer two")]), 200);
        assert_eq!(status(&guard, &[("authorization", "bearer one ")]), 200);
        assert_eq!(status(&guard, &[("x-api-key", "one")]), 200);
        for wrong in ["Bearer", "Bearer ", "Bearer on", "Bearer ones", "Basic one"] {
            assert_eq!(status(&guard, &[("authorization", wrong)]), 401, "{wrong}");
        }
        assert!(guard.check(&Method::POST, &headers(&[]), true).is_ok());
        assert!(guard.check(&Method::OPTIONS, &headers(&[]), false).is_ok());
    }
}
