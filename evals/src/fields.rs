//! Fields of a row, with what is wrong with them in words.

use serde_json::{Map, Value};

/// The row as an object.
///
/// # Errors
/// It is none.
pub fn object(row: &Value) -> Result<&Map<String, Value>, String> {
    row.as_object().ok_or_else(|| "the row is not an object".to_owned())
}

/// A field that must be there.
///
/// # Errors
/// It is not.
pub fn field<'a>(row: &'a Map<String, Value>, name: &str) -> Result<&'a Value, String> {
    row.get(name).ok_or_else(|| format!("the row has no `{name}`"))
}

/// A text that must be there.
///
/// # Errors
/// It is absent, or no text.
pub fn text<'a>(row: &'a Map<String, Value>, name: &str) -> Result<&'a str, String> {
    field(row, name)?.as_str().ok_or_else(|| format!("`{name}` is not a string"))
}

/// A list of texts that must be there.
///
/// # Errors
/// It is absent, or no such list.
pub fn texts(row: &Map<String, Value>, name: &str) -> Result<Vec<String>, String> {
    let wrong = || format!("`{name}` is not a list of strings");
    let items = field(row, name)?.as_array().ok_or_else(wrong)?;
    items.iter().map(|item| item.as_str().map(str::to_owned).ok_or_else(wrong)).collect()
}

/// A list that must be there.
///
/// # Errors
/// It is absent, or no list.
pub fn list<'a>(row: &'a Map<String, Value>, name: &str) -> Result<&'a [Value], String> {
    field(row, name)?.as_array().map(Vec::as_slice).ok_or_else(|| format!("`{name}` is not a list"))
}

/// What a row is called: one of these fields, else its number.
pub fn id(row: &Map<String, Value>, names: &[&str], index: usize) -> String {
    let named = names.iter().find_map(|name| match row.get(*name) {
        Some(Value::String(text)) => Some(text.clone()),
        Some(Value::Number(number)) => Some(number.to_string()),
        _ => None,
    });
    named.unwrap_or_else(|| index.to_string())
}
