//! File name patterns as `hf download --include` takes them: Python's `fnmatch`, where `*` also crosses slashes.

/// mlx-lm's own choice (`utils.py`, `_download`), and what people want to read.
pub const MODEL_FILES: [&str; 12] = [
    "*.json",
    "model*.safetensors",
    "optiq_*.safetensors",
    "*.py",
    "tokenizer.model",
    "*.tiktoken",
    "tiktoken.model",
    "*.txt",
    "*.jsonl",
    "*.jinja",
    "README.md",
    "LICENSE*",
];

/// Whether a path is wanted: it matches a pattern of `include`, or there is none, and none of `exclude`. A pattern
/// that ends with a slash stands for all that is below.
pub fn is_wanted(path: &str, include: &[String], exclude: &[String]) -> bool {
    let any = |patterns: &[String]| patterns.iter().any(|pattern| matches(pattern, path));
    (include.is_empty() || any(include)) && !any(exclude)
}

/// Whether a path matches a pattern of `*`, `?`, `[abc]`, `[!abc]`.
pub fn matches(pattern: &str, path: &str) -> bool {
    let mut pattern: Vec<char> = pattern.chars().collect();
    if pattern.last() == Some(&'/') {
        pattern.push('*');
    }
    let path: Vec<char> = path.chars().collect();
    // Where to go on after the last star when the rest does not fit.
    let mut star: Option<(usize, usize)> = None;
    let (mut p, mut t) = (0, 0);
    while t < path.len() {
        if pattern.get(p) == Some(&'*') {
            star = Some((p + 1, t));
            p += 1;
            continue;
        }
        if let Some(width) = one(&pattern[p..], path[t]) {
            (p, t) = (p + width, t + 1);
        } else if let Some((after, from)) = star {
            star = Some((after, from + 1));
            (p, t) = (after, from + 1);
        } else {
            return false;
        }
    }
    pattern[p..].iter().all(|c| *c == '*')
}

/// Length of the part at the pattern's start that matches this character.
fn one(pattern: &[char], c: char) -> Option<usize> {
    match pattern.first()? {
        '?' => Some(1),
        '[' => match set(pattern) {
            Some((members, negated, width)) => (has(members, c) != negated).then_some(width),
            None => (c == '[').then_some(1),
        },
        plain => (*plain == c).then_some(1),
    }
}

/// The members of a `[set]`, whether it is negated, and its length; `None` when it is not closed.
fn set(pattern: &[char]) -> Option<(&[char], bool, usize)> {
    let negated = pattern.get(1) == Some(&'!');
    let start = if negated { 2 } else { 1 };
    // A bracket right at the start is a member.
    let end = start + 1 + pattern.get(start + 1..)?.iter().position(|c| *c == ']')?;
    Some((&pattern[start..end], negated, end + 1))
}

fn has(members: &[char], c: char) -> bool {
    let mut at = 0;
    while let Some(&low) = members.get(at) {
        match (members.get(at + 1), members.get(at + 2)) {
            (Some('-'), Some(&high)) => {
                if (low..=high).contains(&c) {
                    return true;
                }
                at += 3;
            }
            _ => {
                if low == c {
                    return true;
                }
                at += 1;
            }
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_are_those_of_fnmatch() {
        // Each checked with Python's fnmatch.fnmatchcase.
        for (pattern, path, expected) in [
            ("*.json", "config.json", true),
            ("*.json", "sub/config.json", true),
            ("*.json", "config.jsonl", false),
            ("model*.safetensors", "model-00001-of-00002.safetensors", true),
            ("model*.safetensors", "consolidated.safetensors", false),
            ("*", "", true),
            ("", "a", false),
            ("a?c", "abc", true),
            ("a?c", "ac", false),
            ("**a*b", "xxaxxb", true),
            ("[a-c]x", "bx", true),
            ("[!a-c]x", "bx", false),
            ("[]]x", "]x", true),
            ("[x", "[x", true),
            ("[!]x", "[!]x", true),
            ("a*b*c", "aXbYbZ", false),
            ("größ*", "größe", true),
        ] {
            assert_eq!(matches(pattern, path), expected, "{pattern} {path}");
        }
        assert!(matches("sub/", "sub/a/b"));
    }

    #[test]
    fn exclusion_wins() {
        let list = |patterns: &[&str]| patterns.iter().map(|p| (*p).to_owned()).collect::<Vec<_>>();
        assert!(is_wanted("a.bin", &[], &[]));
        assert!(!is_wanted("a.bin", &list(&["*.json"]), &[]));
        assert!(!is_wanted("a.json", &list(&["*.json"]), &list(&["a*"])));
    }

    #[test]
    fn many_stars_take_no_time() {
        let started = std::time::Instant::now();
        assert!(!matches(&"*a".repeat(200), &"a".repeat(199)));
        assert!(started.elapsed().as_secs() < 5);
    }
}
