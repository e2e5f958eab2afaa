//! The `tokenizers` crate on files that nobody vouches for: it panics on some, and others make a short text long.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook};
use std::sync::Once;

use serde_json::Value;

/// How much longer a normalizer or decoder may make a text. Real ones replace a space by three bytes.
const MOST_GROWTH: f64 = 1000.0;

thread_local! {
    static GUARDED: Cell<bool> = const { Cell::new(false) };
}

/// Runs code that panics on some malformed files; `None` then, and nothing is printed.
pub(super) fn guard<T>(run: impl FnOnce() -> T) -> Option<T> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let previous = take_hook();
        set_hook(Box::new(move |info| {
            if !GUARDED.get() {
                previous(info);
            }
        }));
    });
    let outer = GUARDED.replace(true);
    let outcome = catch_unwind(AssertUnwindSafe(run));
    GUARDED.set(outer);
    outcome.ok()
}

/// Checks that a normalizer or decoder of tokenizer.json cannot blow a text up.
///
/// # Errors
/// By how much it can.
pub(super) fn check_growth(part: &Value) -> Result<(), String> {
    match growth(part) {
        growth if growth <= MOST_GROWTH => Ok(()),
        growth => Err(format!(
            "its replacements can make a text {growth:.0} times as long, and {MOST_GROWTH} is the most that is run"
        )),
    }
}

/// By what factor a part can lengthen a text.
fn growth(part: &Value) -> f64 {
    if let Some(parts) = ["normalizers", "decoders"].iter().find_map(|name| part.get(*name)?.as_array()) {
        return parts.iter().map(growth).product();
    }
    let text = |value: Option<&Value>| value.and_then(Value::as_str).map_or(0, str::len) as f64;
    match part.get("content") {
        // A regular expression may match a single byte.
        content @ Some(_) => {
            let pattern = text(part.get("pattern").and_then(|pattern| pattern.get("String")));
            (text(content) / pattern.max(1.0)).max(1.0)
        }
        None => 1.0,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_panic_inside_is_an_answer() {
        assert_eq!(guard(|| 5), Some(5));
        assert_eq!(guard(|| -> i32 { panic!("not seen") }), None);
        assert!(!GUARDED.get());
    }

    #[test]
    fn replacements_multiply() {
        let replace = |pattern: Value, content: &str| json!({"type": "Replace", "pattern": pattern, "content": content});
        let usual = json!({"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "▁"},
            replace(json!({"String": " "}), "▁"),
            replace(json!({"Regex": " {2,}"}), "▁"),
        ]});
        assert!(check_growth(&usual).is_ok());
        assert!(check_growth(&Value::Null).is_ok());
        let long = "a".repeat(64);
        let bomb =
            json!({"type": "Sequence", "normalizers": vec![replace(json!({"String": "a"}), &long); 5]});
        assert!(check_growth(&bomb).unwrap_err().contains("1073741824 times"));
    }
}
