//! Who may come in: keys, and which pages and names a browser may reach the server by.

use std::net::{IpAddr, Ipv6Addr};

use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use sha2::{Digest as _, Sha256};

use super::error::ApiError;
use crate::error::Complaint;

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
    ///
    /// # Errors
    /// An origin or a name that no request could ever have.
    pub fn new(keys: &[String], origins: &[String], hosts: &[String]) -> Result<Self, Complaint> {
        let keys = keys.iter().map(|key| Sha256::digest(key.as_bytes()).into()).collect();
        let origins = origins.iter().map(|origin| {
            let hint = "an origin is a scheme and a name, as in https://chat.example; `*` is all of them";
            let wrong = || Complaint::usage(format!("`--cors-origin {origin}` is no origin")).hint(hint);
            if origin == "*" { Ok(origin.clone()) } else { normal_origin(origin).ok_or_else(wrong) }
        });
        let hosts = hosts.iter().map(|host| {
            let hint = "give the name alone, as in box.lan";
            let wrong =
                || Complaint::usage(format!("`--allowed-hosts {host}` is no name of a host")).hint(hint);
            Authority::parse(host).map(|authority| authority.name).ok_or_else(wrong)
        });
        Ok(Self {
            keys,
            origins: origins.collect::<Result<_, _>>()?,
            hosts: hosts.collect::<Result<_, _>>()?,
        })
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
        let mut hosts = headers.get_all(header::HOST).iter();
        let Some(host) = hosts.next() else { return Ok(()) };
        let read = host.to_str().ok().and_then(Authority::parse);
        let Some(host) = read.filter(|_| hosts.next().is_none()) else {
            return Err(ApiError::invalid("the header `Host` is no name of a host, or is there twice"));
        };
        if !self.keys.is_empty() || host.ip().is_some() || host.is_local() || self.hosts.contains(&host.name)
        {
            return Ok(());
        }
        let name = host.name;
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
        if self.origins.iter().any(|allowed| *allowed == "*") {
            return true;
        }
        let Some(origin) = origin.to_str().ok().and_then(normal_origin) else { return false };
        if self.origins.contains(&origin) {
            return true;
        }
        let authority = origin.strip_prefix("http://").or(origin.strip_prefix("https://"));
        let Some(page) = authority.and_then(Authority::parse) else { return false };
        let host = headers.get(header::HOST).and_then(|host| Authority::parse(host.to_str().ok()?));
        page.is_local()
            || host.is_some_and(|host| host.name == page.name && host.port_or(80) == page.port_or(80))
    }

    /// All keys are compared, each in full, whatever is presented.
    fn has_key(&self, headers: &HeaderMap) -> bool {
        let bearer = headers.get(header::AUTHORIZATION).map(HeaderValue::as_bytes).and_then(|value| {
            let (scheme, key) = value.split_at_checked(7)?;
            scheme.eq_ignore_ascii_case(b"bearer ").then_some(key.trim_ascii())
        });
        let bare = headers.get("x-api-key").map(|key| key.as_bytes().trim_ascii());
        // Clients have a header of their own choice, and proxies add theirs: either may be right.
        let opens = |presented: &[u8]| {
            let presented: [u8; 32] = Sha256::digest(presented).into();
            let differs = |key: &[u8; 32]| key.iter().zip(presented).fold(0, |bits, (a, b)| bits | (a ^ b));
            self.keys.iter().fold(false, |found, key| found | (differs(key) == 0))
        };
        bearer.into_iter().chain(bare).fold(false, |found, key| found | opens(key))
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

/// A host and perhaps a port, and nothing else.
struct Authority {
    /// In lower case, an IPv6 address without brackets.
    name: String,
    port: Option<u16>,
}

impl Authority {
    /// Reads `name`, `name:port`, `[address]` or `[address]:port`.
    fn parse(text: &str) -> Option<Self> {
        let (name, port) = match text.strip_prefix('[') {
            Some(rest) => {
                let (address, port) = rest.split_once(']')?;
                address.parse::<Ipv6Addr>().ok()?;
                (address, port)
            }
            None => {
                let (name, port) = text.split_at(text.find(':').unwrap_or(text.len()));
                let fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
                if name.is_empty() || !name.chars().all(fits) {
                    return None;
                }
                (name, port)
            }
        };
        let port = match port.strip_prefix(':') {
            None if port.is_empty() => None,
            // RFC 9110 lets it stand for none.
            Some("") => None,
            Some(digits) if digits.bytes().all(|digit| digit.is_ascii_digit()) => Some(digits.parse().ok()?),
            _ => return None,
        };
        Some(Self { name: name.to_ascii_lowercase(), port })
    }

    fn ip(&self) -> Option<IpAddr> {
        self.name.parse().ok()
    }

    fn port_or(&self, usual: u16) -> u16 {
        self.port.unwrap_or(usual)
    }

    fn is_local(&self) -> bool {
        let is_loopback = self.ip().is_some_and(|ip| ip.is_loopback());
        self.name == "localhost" || self.name.ends_with(".localhost") || is_loopback
    }
}

/// An origin as browsers write it: in lower case, without a slash at its end or a port that its scheme implies.
fn normal_origin(text: &str) -> Option<String> {
    let lower = text.strip_suffix('/').unwrap_or(text).to_ascii_lowercase();
    let (scheme, rest) = lower.split_once("://")?;
    let is_scheme = |scheme: &str| {
        scheme.starts_with(|c: char| c.is_ascii_alphabetic())
            && scheme.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '+' | '-' | '.'))
    };
    let Authority { name, port } = Authority::parse(rest).filter(|_| is_scheme(scheme))?;
    let usual = match scheme {
        "http" => Some(80),
        "https" => Some(443),
        _ => None,
    };
    let name = if name.contains(':') { format!("[{name}]") } else { name };
    Some(match port.filter(|port| Some(*port) != usual) {
        Some(port) => format!("{scheme}://{name}:{port}"),
        None => format!("{scheme}://{name}"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
        pairs.iter().map(|(name, value)| (name.parse().unwrap(), value.parse().unwrap())).collect()
    }

    fn guard_of(keys: &[&str], origins: &[&str], hosts: &[&str]) -> Guard {
        let owned = |list: &[&str]| list.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>();
        Guard::new(&owned(keys), &owned(origins), &owned(hosts)).unwrap()
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
        for listed in ["https://Good.example/", "https://good.example:443"] {
            let listed = guard_of(&[], &[listed], &[]);
            assert_eq!(status(&listed, &[("origin", "https://good.example")]), 200);
            assert_eq!(status(&listed, &[("origin", "https://good.example:444")]), 403);
            assert_eq!(status(&listed, &[("origin", "http://good.example")]), 403);
        }
        assert_eq!(status(&guard_of(&[], &["*"], &[]), &[("origin", "null")]), 200);
        for wrong in
            ["evil", "", "https://", "https://a b", "https://a/b", "https://u@a", "://a", "https://a:99999"]
        {
            let error = Guard::new(&[], &[wrong.to_owned()], &[]).unwrap_err().to_string();
            assert_eq!(error, format!("`--cors-origin {wrong}` is no origin"));
        }
    }

    #[test]
    fn x9_rebound_names_are_refused() {
        let guard = Guard::default();
        for host in ["localhost:8080", "127.0.0.1", "[::1]:8080", "192.168.1.5:8080"] {
            assert_eq!(status(&guard, &[("host", host)]), 200, "{host}");
        }
        assert_eq!(status(&guard, &[("host", "evil.example:8080")]), 403);
        assert_eq!(status(&guard, &[("host", "evil.example"), ("origin", "http://evil.example")]), 403);
        for named in ["Box.lan", "box.lan:80"] {
            let named = guard_of(&[], &[], &[named]);
            assert_eq!(status(&named, &[("host", "box.LAN:8080")]), 200);
            assert_eq!(status(&named, &[("host", "x.box.lan")]), 403);
        }
        for wrong in ["", "http://box.lan", "box lan", "*", "box.lan/", "u@box"] {
            assert!(Guard::new(&[], &[], &[wrong.to_owned()]).is_err(), "{wrong}");
        }
        let keyed = guard_of(&["k"], &[], &[]);
        assert_eq!(status(&keyed, &[("host", "any.example"), ("x-api-key", "k")]), 200);
    }

    #[test]
    fn hosts_that_only_look_local_are_refused() {
        let odd = [
            "[::1].evil.example",
            "user@127.0.0.1",
            "127.0.0.1@evil.example",
            "[::1",
            "::1",
            "[[::1]]",
            "localhost:x",
            "localhost:80:80",
            "localhost/",
            "127.0.0.1:99999",
            " localhost",
            "[evil]",
            "",
        ];
        for guard in [Guard::default(), guard_of(&["k"], &[], &[])] {
            for host in odd {
                assert_eq!(status(&guard, &[("host", host), ("x-api-key", "k")]), 400, "{host}");
            }
            let mut twice = headers(&[("host", "localhost"), ("x-api-key", "k")]);
            twice.append("host", HeaderValue::from_static("evil.example"));
            assert_eq!(guard.check(&Method::GET, &twice, false).unwrap_err().status, 400);
        }
        for origin in
            ["http://[::1].evil.example", "http://127.0.0.1@evil.example", "http://evil.example#localhost"]
        {
            assert_eq!(
                status(&Guard::default(), &[("host", "localhost"), ("origin", origin)]),
                403,
                "{origin}"
            );
        }
    }

    #[test]
    fn keys_open_the_server() {
        let guard = guard_of(&["one", "two"], &[], &[]);
        assert_eq!(status(&guard, &[]), 401);
        assert_eq!(status(&guard, &[("authorization", "Bearer two")]), 200);
        assert_eq!(status(&guard, &[("authorization", "bearer one ")]), 200);
        assert_eq!(status(&guard, &[("x-api-key", "one")]), 200);
        for wrong in ["Bearer", "Bearer ", "Bearer on", "Bearer ones", "Basic one"] {
            assert_eq!(status(&guard, &[("authorization", wrong)]), 401, "{wrong}");
        }
        // Either header may be the right one.
        for pair in [("Bearer bad", "two"), ("Basic xyz", "one"), ("Bearer one", "bad")] {
            assert_eq!(status(&guard, &[("authorization", pair.0), ("x-api-key", pair.1)]), 200, "{pair:?}");
        }
        assert_eq!(status(&guard, &[("authorization", "Bearer bad"), ("x-api-key", "bad")]), 401);
        assert!(guard.check(&Method::POST, &headers(&[]), true).is_ok());
        assert!(guard.check(&Method::OPTIONS, &headers(&[]), false).is_ok());
    }
}
