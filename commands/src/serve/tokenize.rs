//! `/tokenize` and `/detokenize`, with the fields of llama.cpp and of vLLM.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::State;
use axum::http::Request;
use axum::response::Response;
use serde_json::{Map, Value, json};

use super::app::App;
use super::error::ApiError;
use super::fields::Fields;
use super::prepare::check_length;
use super::reply::json_response;
use super::request::{self, Chat, Prompt};
use super::tools;

/// What is to be tokenized.
enum Source {
    Text { text: String, add_special: bool },
    Chat(Prompt),
}

fn read(body: &Map<String, Value>) -> Result<(Source, bool), ApiError> {
    let fields = Fields::new(body);
    let flag = |names: [&str; 2]| -> Result<Option<bool>, ApiError> {
        Ok(fields.boolean(names[0])?.or(fields.boolean(names[1])?))
    };
    let pieces = flag(["with_pieces", "return_token_strs"])?.unwrap_or(false);
    let text = fields.text("content")?.or(fields.text("prompt")?);
    let source = match text {
        Some(text) => Source::Text {
            text: text.to_owned(),
            add_special: flag(["add_special", "add_special_tokens"])?.unwrap_or(true),
        },
        None if fields.get("messages").is_some() => {
            let (variables, _) = request::template_variables(&fields)?;
            let messages = request::messages(&fields)?;
            let tools = tools::read(&fields)?;
            Source::Chat(Prompt::Chat(Chat { messages, tools, variables, ..Chat::default() }))
        }
        None => return Err(ApiError::invalid("`content`, `prompt` or `messages` is required")),
    };
    Ok((source, pieces))
}

/// Token ids of a text or of a conversation.
pub async fn tokenize(State(app): State<Arc<App>>, request: Request<Body>) -> Result<Response, ApiError> {
    let body = app.bodies.read_object(request).await?;
    let (source, pieces) = read(&body)?;
    let _room = body.into_room();
    let bytes = match &source {
        Source::Text { text, .. } => text.len(),
        Source::Chat(prompt) => prompt.text_bytes(),
    };
    let tokens = app.off_thread_over(bytes, move |app| match source {
        Source::Text { text, .. } if text.is_empty() => Ok(Vec::new()),
        Source::Text { text, add_special } => {
            check_length(text.len())?;
            app.check_fits(&text)?;
            let ids = app.tokenizer().encode(&text, add_special);
            ids.map_err(|error| ApiError::invalid(format!("the text cannot be tokenized: {error}")))
        }
        Source::Chat(prompt) => app.prompt_tokens(&prompt),
    });
    let tokens = tokens.await?;
    let text = |id: &u32| String::from_utf8_lossy(&app.tokenizer().token_bytes(*id)).into_owned();
    let mut reply = json!({
        "tokens": tokens, "count": tokens.len(), "max_model_len": app.served.parts.context_length,
    });
    if pieces {
        let texts: Vec<String> = tokens.iter().map(text).collect();
        reply["token_strs"] = json!(texts);
        let pieces = tokens.iter().zip(&texts).map(|(id, piece)| json!({"id": id, "piece": piece}));
        reply["tokens"] = pieces.collect();
    }
    Ok(json_response(&reply))
}

/// The text of token ids.
pub async fn detokenize(State(app): State<Arc<App>>, request: Request<Body>) -> Result<Response, ApiError> {
    let body = app.bodies.read_object(request).await?;
    let fields = Fields::new(&body);
    let list = fields.list("tokens")?.ok_or_else(|| fields.wrong("tokens", "is missing"))?;
    let ids: Option<Vec<u32>> = list.iter().map(|id| u32::try_from(id.as_u64()?).ok()).collect();
    let ids = ids.ok_or_else(|| fields.wrong("tokens", "must be a list of token ids"))?;
    // A model may have more rows than its tokenizer has tokens; they stand for no text.
    let known =
        |id: u32| (id as usize) < app.served.parts.vocab_size || app.tokenizer().id_to_token(id).is_some();
    if let Some(unknown) = ids.iter().find(|id| !known(**id)) {
        return Err(fields.wrong("tokens", format!("has {unknown}, which is outside the vocabulary")));
    }
    let text = app.off_thread(move |app| Ok(app.tokenizer().decode(&ids, false))).await?;
    Ok(json_response(&json!({"content": text, "prompt": text})))
}
