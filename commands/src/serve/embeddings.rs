//! `/v1/embeddings`, for models that were made for it.

use std::sync::Arc;

use axum::Extension;
use axum::body::Body;
use axum::extract::State;
use axum::http::Request;
use axum::response::Response;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use mlx_bun::generate::stream::StreamError;
use mlx_bun::scheduler::EmbedError;
use serde_json::{Map, Value, json};
use tokio::sync::oneshot;

use super::app::App;
use super::error::ApiError;
use super::fields::Fields;
use super::log::RequestLog;
use super::prepare::{check_length, submit_error};
use super::reply::{Usage, json_response};
use super::request;
use crate::args::range;

/// Inputs of one request.
const MOST_INPUTS: usize = 2048;
/// What Qwen's embedding models end a text with.
const END_OF_TEXT: &str = "<|endoftext|>";

/// One text, or its tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Input {
    Text(String),
    Tokens(Vec<u32>),
}

/// What is asked.
#[derive(Debug, PartialEq)]
struct EmbeddingRequest {
    inputs: Vec<Input>,
    dimensions: Option<usize>,
    base64: bool,
}

impl EmbeddingRequest {
    fn read(body: &Map<String, Value>) -> Result<Self, ApiError> {
        let fields = Fields::new(body);
        fields.text("model")?;
        if request::adapters(&fields)?.is_some_and(|adapters| !adapters.is_empty()) {
            return Err(
                fields.wrong("adapter", "is not supported here: texts are embedded by the base model")
            );
        }
        let base64 = match fields.text("encoding_format")? {
            None | Some("float") => false,
            Some("base64") => true,
            Some(_) => return Err(fields.wrong("encoding_format", "must be float or base64")),
        };
        let mut inputs = inputs(&fields)?;
        if let Some(instruction) = fields.text("instruction")? {
            for input in &mut inputs {
                if let Input::Text(text) = input {
                    *text = format!("Instruct: {instruction}\nQuery:{text}");
                }
            }
        }
        Ok(Self { inputs, dimensions: fields.number("dimensions", range::DIMENSIONS)?, base64 })
    }
}

fn inputs(fields: &Fields) -> Result<Vec<Input>, ApiError> {
    let wrong = || fields.wrong("input", "must be a text, a list of texts, or token ids; none of them empty");
    let text = |value: &Value| {
        value.as_str().filter(|text| !text.is_empty()).map(|text| Input::Text(text.to_owned()))
    };
    let tokens = |values: &[Value]| {
        let ids: Option<Vec<u32>> = values.iter().map(|id| u32::try_from(id.as_u64()?).ok()).collect();
        ids.filter(|ids| !ids.is_empty()).map(Input::Tokens)
    };
    let inputs: Option<Vec<Input>> = match fields.get("input") {
        Some(value @ Value::String(_)) => text(value).map(|input| vec![input]),
        Some(Value::Array(values)) => match values.first() {
            Some(Value::Number(_)) => tokens(values).map(|input| vec![input]),
            Some(Value::String(_)) => values.iter().map(text).collect(),
            Some(Value::Array(_)) => values.iter().map(|value| tokens(value.as_array()?)).collect(),
            _ => None,
        },
        Some(_) => None,
        None => return Err(fields.wrong("input", "is missing")),
    };
    match inputs.ok_or_else(wrong)? {
        inputs if inputs.len() > MOST_INPUTS => {
            Err(fields
                .wrong("input", format!("has {} entries; at most {MOST_INPUTS} are taken", inputs.len())))
        }
        inputs => Ok(inputs),
    }
}

/// Answers a request.
pub async fn handle(
    State(app): State<Arc<App>>,
    Extension(log): Extension<Arc<RequestLog>>,
    request: Request<Body>,
) -> Result<Response, ApiError> {
    let body = app.bodies.read_object(request).await?;
    if !app.served.embeds {
        return Err(ApiError::invalid(format!(
            "served model \"{}\" is not an embedding model; start the server with one, such as Qwen3-Embedding",
            app.served.id
        )));
    }
    let request = EmbeddingRequest::read(&body)?;
    let _room = body.into_room();
    let inputs = request.inputs;
    let texts = inputs.iter().map(|input| if let Input::Text(text) = input { text.len() } else { 0 });
    let bytes = texts.sum();
    check_length(bytes)?;
    let ids = app.off_thread_over(bytes, move |app| {
        inputs.iter().map(|input| ids(app, input)).collect::<Result<Vec<_>, _>>()
    });
    let ids = ids.await?;
    let prompt = ids.iter().map(Vec::len).sum();
    let (sender, receiver) = oneshot::channel();
    let reply = move |result| drop(sender.send(result));
    app.engine.embed(ids, reply).map_err(|error| embed_error(&error))?;
    let vectors =
        receiver.await.map_err(|_| ApiError::unavailable())?.map_err(|error| embed_error(&error))?;
    let mut data = Vec::with_capacity(vectors.len());
    for (index, vector) in vectors.into_iter().enumerate() {
        let vector = shortened(vector, request.dimensions)?;
        let embedding = if request.base64 { json!(in_base64(&vector)) } else { json!(vector) };
        data.push(json!({"object": "embedding", "index": index, "embedding": embedding}));
    }
    log.finished(Usage { prompt, ..Usage::default() });
    Ok(json_response(&json!({
        "object": "list", "data": data, "model": app.served.id,
        "usage": {"prompt_tokens": prompt, "total_tokens": prompt},
    })))
}

/// Texts without the tokenizer's own specials, and the end that such models were trained with.
fn ids(app: &App, input: &Input) -> Result<Vec<u32>, ApiError> {
    let tokenizer = app.tokenizer();
    match input {
        Input::Tokens(ids) => Ok(ids.clone()),
        Input::Text(text) => {
            let about_input = |error| ApiError { param: Some("input".to_owned()), ..error };
            app.check_fits(text).map_err(about_input)?;
            let ids = tokenizer.encode(text, false);
            let mut ids =
                ids.map_err(|error| ApiError::invalid(format!("the input cannot be tokenized: {error}")))?;
            ids.extend(tokenizer.token_to_id(END_OF_TEXT).or(tokenizer.eos_id()));
            Ok(ids)
        }
    }
}

/// The first numbers, of length 1 again (Matryoshka representations).
fn shortened(mut vector: Vec<f32>, dimensions: Option<usize>) -> Result<Vec<f32>, ApiError> {
    if let Some(dimensions) = dimensions {
        if dimensions > vector.len() {
            let problem = format!("must be at most {}, what the model gives", vector.len());
            return Err(ApiError::field("dimensions", problem));
        }
        vector.truncate(dimensions);
    }
    let length = vector.iter().map(|x| f64::from(*x) * f64::from(*x)).sum::<f64>().sqrt();
    if length > 0.0 {
        vector.iter_mut().for_each(|x| *x = (f64::from(*x) / length) as f32);
    }
    Ok(vector)
}

fn in_base64(vector: &[f32]) -> String {
    let bytes: Vec<u8> = vector.iter().flat_map(|x| x.to_le_bytes()).collect();
    STANDARD.encode(bytes)
}

fn embed_error(error: &EmbedError) -> ApiError {
    match error {
        EmbedError::Input { error: StreamError::ContextLength { prompt, context }, .. } => {
            ApiError { param: Some("input".to_owned()), ..ApiError::context_length(*prompt, *context) }
        }
        EmbedError::Input { .. } => ApiError::invalid(error.to_string()),
        EmbedError::Mlx(_) => ApiError::internal(error.to_string()),
        EmbedError::Refused(error) => submit_error(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(body: Value) -> Result<EmbeddingRequest, ApiError> {
        EmbeddingRequest::read(body.as_object().unwrap())
    }

    #[test]
    fn inputs_have_four_forms() {
        let inputs = |input: Value| parse(json!({"input": input})).map(|request| request.inputs);
        let text = |text: &str| Input::Text(text.to_owned());
        assert_eq!(inputs(json!("a")).unwrap(), [text("a")]);
        assert_eq!(inputs(json!(["a", "b"])).unwrap(), [text("a"), text("b")]);
        assert_eq!(inputs(json!([1, 2])).unwrap(), [Input::Tokens(vec![1, 2])]);
        assert_eq!(inputs(json!([[1], [2]])).unwrap(), [Input::Tokens(vec![1]), Input::Tokens(vec![2])]);
        for wrong in [
            json!(""),
            json!([]),
            json!([""]),
            json!([[]]),
            json!([1, "a"]),
            json!([-1]),
            json!(3),
            json!([true]),
        ] {
            assert!(inputs(wrong.clone()).is_err(), "{wrong}");
        }
        let request = parse(json!({"input": "a", "instruction": "i", "encoding_format": "base64"})).unwrap();
        assert_eq!(request.inputs, [text("Instruct: i\nQuery:a")]);
        for adapter in [json!({"adapter": "x"}), json!({"adapters": ["x"]})] {
            let mut body = adapter.as_object().unwrap().clone();
            body.insert("input".to_owned(), json!("a"));
            assert!(EmbeddingRequest::read(&body).unwrap_err().message.contains("base model"));
        }
        assert!(parse(json!({"input": "a", "adapter": "none"})).is_ok());
        assert!(request.base64 && parse(json!({"input": "a", "encoding_format": "int8"})).is_err());
    }

    #[test]
    fn vectors_have_length_one() {
        assert_eq!(shortened(vec![3.0, 4.0, 12.0], Some(2)).unwrap(), [0.6, 0.8]);
        assert_eq!(shortened(vec![0.0], None).unwrap(), [0.0]);
        assert!(shortened(vec![1.0], Some(2)).is_err());
        assert_eq!(in_base64(&[1.0, -2.0]), "AACAPwAAAMA=");
    }
}
