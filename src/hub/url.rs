//! The little that has to be known about web addresses: where one points, and what a redirect makes of it.

use std::fmt::Write as _;

use ureq::http::Uri;

/// Scheme, host and port: whom a secret may be sent to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Origin {
    /// Whether the connection is encrypted.
    pub https: bool,
    /// In lower case.
    pub host: String,
    /// The default one when none is given.
    pub port: u16,
}

/// The origin of an http or https address; `None` for anything else.
pub(super) fn origin(url: &str) -> Option<Origin> {
    let uri: Uri = url.parse().ok()?;
    let https = match uri.scheme_str()? {
        "https" => true,
        "http" => false,
        _ => return None,
    };
    let host = uri.host().filter(|host| !host.is_empty())?.to_ascii_lowercase();
    Some(Origin { https, host, port: uri.port_u16().unwrap_or(if https { 443 } else { 80 }) })
}

/// Where `Location: {location}` leads to from `base`.
pub(super) fn join(base: &str, location: &str) -> Option<String> {
    let (scheme, rest) = base.split_once("://")?;
    let authority = rest.split(['/', '?', '#']).next()?;
    let location = location.split('#').next()?;
    let joined = if origin(location).is_some() {
        location.to_owned()
    } else if let Some(rest) = location.strip_prefix("//") {
        format!("{scheme}://{rest}")
    } else if location.starts_with('/') {
        format!("{scheme}://{authority}{location}")
    } else {
        let path = rest.split(['?', '#']).next()?;
        let folder = path.rfind('/').map_or(path, |at| &path[..at]);
        format!("{scheme}://{folder}/{location}")
    };
    origin(&joined).map(|_| joined)
}

/// A part of a path, percent-encoded; a slash too unless it is `kept`.
pub(super) fn quote(text: &str, keep_slashes: bool) -> String {
    let mut quoted = String::with_capacity(text.len());
    for byte in text.bytes() {
        let plain = byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) || (keep_slashes && byte == b'/');
        if plain {
            quoted.push(char::from(byte));
        } else {
            // Writing to a string cannot fail.
            let _ = write!(quoted, "%{byte:02X}");
        }
    }
    quoted
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn origins_tell_hosts_apart() {
        let same = |a: &str, b: &str| origin(a).unwrap() == origin(b).unwrap();
        assert!(same("https://huggingface.co/a", "https://HuggingFace.co:443/b?c"));
        assert!(!same("https://huggingface.co", "http://huggingface.co"));
        assert!(!same("https://huggingface.co", "https://huggingface.co.evil.example"));
        assert!(!same("https://huggingface.co", "https://huggingface.co@evil.example"));
        assert!(!same("http://localhost:1", "http://localhost:2"));
        for bad in ["", "huggingface.co", "ftp://a", "file:///etc/passwd", "https://", "https:///x"] {
            assert_eq!(origin(bad), None, "{bad}");
        }
    }

    #[test]
    fn redirects_are_joined() {
        for (location, expected) in [
            ("https://cdn.example/x?sig=1", Some("https://cdn.example/x?sig=1")),
            ("/api/models/new/name", Some("http://h:1/api/models/new/name")),
            ("//cdn.example/x", Some("http://cdn.example/x")),
            ("other", Some("http://h:1/a/other")),
            ("?page=2", Some("http://h:1/a/?page=2")),
            ("file:///etc/passwd", Some("http://h:1/a/file:///etc/passwd")),
        ] {
            assert_eq!(join("http://h:1/a/b?c=d/e", location).as_deref(), expected, "{location}");
        }
        assert_eq!(join("http://h", "x").as_deref(), Some("http://h/x"));
        assert_eq!(join("http://h", "//"), None);
    }

    #[test]
    fn names_are_quoted() {
        assert_eq!(quote("refs/pr/1", false), "refs%2Fpr%2F1");
        assert_eq!(quote("sub dir/größe#1?.json", true), "sub%20dir/gr%C3%B6%C3%9Fe%231%3F.json");
    }
}
