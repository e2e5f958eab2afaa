//! GLM's syntax with tags of its own, or JSON (mlx_lm/tool_parsers/longcat.py).

use super::glm47::{Tags, tagged};
use super::{Malformed, Parsed, ToolSchemas, json_tools, python};

const TAGS: Tags = Tags {
    key: ["<longcat_arg_key>", "</longcat_arg_key>"],
    value: ["<longcat_arg_value>", "</longcat_arg_value>"],
};

pub(super) fn parse(text: &str, tools: &ToolSchemas) -> Parsed {
    let text = python::strip(text);
    if text.starts_with('{') && python::json(text).is_some() {
        return json_tools::parse(text);
    }
    let call = tagged(text, &TAGS, tools).filter(|call| !call.name.is_empty());
    Ok(vec![call.ok_or(Malformed("the call has no arguments"))?])
}
