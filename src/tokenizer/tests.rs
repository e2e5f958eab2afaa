use std::path::PathBuf;

use serde_json::{Map, json};

use super::*;

fn fixture(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("fixtures/tokenizers").join(name)
}

fn parts(name: &str) -> TokenizerParts {
    let read = |file: &str| std::fs::read(fixture(name).join(file)).unwrap();
    TokenizerParts {
        tokenizer_json: read("tokenizer.json"),
        config: serde_json::from_slice(&read("tokenizer_config.json")).unwrap(),
        special_tokens_map: None,
    }
}

/// A fixture with entries of its tokenizer_config.json replaced.
fn changed(name: &str, changes: Value) -> Result<Tokenizer, TokenizerError> {
    let mut parts = parts(name);
    let changes: Map<String, Value> = serde_json::from_value(changes).unwrap();
    parts.config.as_object_mut().unwrap().extend(changes);
    Tokenizer::from_parts(parts)
}

fn message(result: Result<Tokenizer, TokenizerError>) -> String {
    result.unwrap_err().to_string()
}

#[test]
fn byte_level_fixture_has_320_tokens_and_a_chat_template() {
    let tokenizer = Tokenizer::from_dir(&fixture("byte-level")).unwrap();
    assert_eq!(tokenizer.vocab_size(), 320);
    assert_eq!((tokenizer.bos_token(), tokenizer.eos_token()), (Some("<|bos|>"), Some("<|im_end|>")));
    assert!(tokenizer.config()["chat_template"].as_str().unwrap().contains("<|im_start|>"));
}

#[test]
fn bos_is_never_doubled() {
    let tokenizer = Tokenizer::from_dir(&fixture("byte-level")).unwrap();
    let bos = tokenizer.bos_id().unwrap();
    let count = |text: &str| tokenizer.encode_prompt(text).unwrap().iter().filter(|&&id| id == bos).count();
    assert_eq!(count("hello"), 1);
    assert_eq!(count("<|bos|>hello"), 1);
    assert_eq!(count("<|bos|><|bos|>hello"), 1);
    assert_eq!(count(""), 1);
    assert_eq!(tokenizer.encode_prompt("<|bos|>hello").unwrap(), tokenizer.encode_prompt("hello").unwrap());
    let templated = "<|bos|><|im_start|>user\nhi";
    assert_eq!(tokenizer.encode(templated, false).unwrap().iter().filter(|&&id| id == bos).count(), 1);
    assert_eq!(tokenizer.encode(templated, true).unwrap().iter().filter(|&&id| id == bos).count(), 2);
}

#[test]
fn eos_tokens_are_the_tokenizers_and_those_added() {
    let mut tokenizer = Tokenizer::from_dir(&fixture("byte-level")).unwrap();
    assert_eq!(tokenizer.eos_token_ids(), &BTreeSet::from([2]));
    tokenizer.extend_eos_token_ids([7, 2]);
    tokenizer.add_eos_token("<|endoftext|>").unwrap();
    tokenizer.add_eos_token(" 319 ").unwrap();
    assert_eq!(tokenizer.eos_token_ids(), &BTreeSet::from([2, 3, 7, 319]));
    for unknown in ["<nope>", "-1", "", "4294967296"] {
        let error = tokenizer.add_eos_token(unknown).unwrap_err().to_string();
        assert!(error.contains(&format!("`{unknown}` is not a token")), "{error}");
    }
    assert_eq!(tokenizer.eos_token_ids().len(), 4);
}

#[test]
fn an_unknown_eos_token_is_not_taken_for_the_unknown_token() {
    let mut tokenizer = Tokenizer::from_dir(&fixture("byte-fallback")).unwrap();
    assert!(tokenizer.unk_id().is_some());
    assert!(tokenizer.add_eos_token("<nope>").is_err());
}

#[test]
fn thinking_is_inferred_from_the_vocabulary() {
    let tokenizer = Tokenizer::from_dir(&fixture("byte-level")).unwrap();
    assert_eq!((tokenizer.think_start(), tokenizer.think_end()), (Some("<think>"), Some("</think>")));
    assert_eq!(tokenizer.thinking().unwrap().start_tokens, [tokenizer.token_to_id("<think>").unwrap()]);
    assert!(!Tokenizer::from_dir(&fixture("metaspace")).unwrap().has_thinking());

    let channels = changed("byte-fallback", json!({"extra_special_tokens": ["<|channel>", "<channel|>"]}));
    let channels = channels.unwrap();
    let thinking = channels.thinking().unwrap();
    assert_eq!((thinking.start.as_str(), thinking.end.as_str()), ("<|channel>thought", "<channel|>"));
    assert!(thinking.start_tokens.len() > 1 && thinking.end_tokens.len() == 1);
}

#[test]
fn a_class_that_does_not_fit_the_vocabulary_leaves_tokenizer_json_alone() {
    let plain = Tokenizer::from_parts(parts("byte-level")).unwrap();
    for class in ["LlamaTokenizer", "GemmaTokenizer", "NoSuchTokenizer"] {
        let tokenizer = changed("byte-level", json!({"tokenizer_class": class})).unwrap();
        let ids = tokenizer.encode("two words", false).unwrap();
        assert_eq!(ids, plain.encode("two words", false).unwrap(), "{class}");
        assert_eq!(tokenizer.decode(&ids, false), "two words", "{class}");
    }
}

#[test]
fn ids_past_the_vocabulary_are_empty_text() {
    let tokenizer = Tokenizer::from_dir(&fixture("byte-level")).unwrap();
    let mut detokenizer = tokenizer.detokenizer();
    for id in [320, 151_936, u32::MAX] {
        assert_eq!(tokenizer.decode(&[id], false), "");
        detokenizer.add_token(id);
        assert_eq!(detokenizer.take_segment(), "");
    }
    assert_eq!(detokenizer.finish(), "");
}

#[test]
fn decoders_of_two_streams_are_independent() {
    let tokenizer = Tokenizer::from_dir(&fixture("byte-level")).unwrap();
    let ids = |text: &str| tokenizer.encode(text, false).unwrap();
    let (emoji, czech) = (ids("🙂"), ids("kůň"));
    let (mut first, mut second) = (tokenizer.detokenizer(), tokenizer.detokenizer());
    let (mut first_text, mut second_text) = (String::new(), String::new());
    for step in 0..emoji.len().max(czech.len()) {
        emoji.get(step).into_iter().for_each(|&id| first.add_token(id));
        czech.get(step).into_iter().for_each(|&id| second.add_token(id));
        first_text += &first.take_segment();
        second_text += &second.take_segment();
    }
    assert_eq!((first_text + &first.finish(), second_text + &second.finish()), ("🙂".into(), "kůň".into()));
}

#[test]
fn a_detokenizer_starts_anew_after_finish() {
    let tokenizer = Tokenizer::from_dir(&fixture("metaspace")).unwrap();
    let ids = tokenizer.encode("the fox", false).unwrap();
    let mut detokenizer = tokenizer.detokenizer();
    for _ in 0..2 {
        ids.iter().for_each(|&id| detokenizer.add_token(id));
        assert_eq!(detokenizer.finish(), "the fox");
    }
}

#[test]
fn missing_tokenizer_names_the_file_and_a_way_out() {
    let dir = tempfile::tempdir().unwrap();
    let error = message(Tokenizer::from_dir(dir.path()));
    assert!(error.contains("tokenizer.json` is missing: download it"), "{error}");
    std::fs::write(dir.path().join("tokenizer.model"), b"x").unwrap();
    let error = message(Tokenizer::from_dir(dir.path()));
    assert!(error.contains("convert it once with transformers"), "{error}");
}

#[test]
fn tokenizer_json_cut_anywhere_is_an_error() {
    let whole = parts("byte-fallback");
    for end in (0..whole.tokenizer_json.len() - 2).step_by(97) {
        let parts = TokenizerParts { tokenizer_json: whole.tokenizer_json[..end].to_vec(), ..whole.clone() };
        let error = message(Tokenizer::from_parts(parts));
        assert!(error.starts_with("`tokenizer.json` is not valid JSON"), "{error}");
        assert_eq!(error.lines().count(), 1);
    }
}

#[test]
fn malformed_files_are_errors_that_name_them() {
    let from = |json: &str| {
        message(Tokenizer::from_parts(TokenizerParts {
            tokenizer_json: json.as_bytes().to_vec(),
            ..TokenizerParts::default()
        }))
    };
    assert!(from("{}").contains("`tokenizer.json` cannot be used: it has no `model`"));
    assert!(from(r#"{"model":{"type":"BPE","vocab":{},"merges":[["a","b"]]}}"#).contains("tokenizer.json"));
    assert!(from(r#"{"model":{"type":"Nope"}}"#).contains("tokenizer.json"));
    let config = |changes: Value| message(changed("byte-level", changes));
    assert!(config(json!({"bos_token": 3})).contains("`tokenizer_config.json` cannot be used: `bos_token`"));
    assert!(config(json!({"added_tokens_decoder": {"x": "y"}})).contains("has the id `x`"));
    assert!(config(json!({"extra_special_tokens": 1})).contains("`extra_special_tokens`"));
    let list = TokenizerParts { config: json!([]), ..parts("byte-level") };
    assert!(message(Tokenizer::from_parts(list)).contains("not a JSON object"));
}

#[test]
fn a_tokens_bytes_are_its_text_inside_a_sequence() {
    for (name, text) in
        [("byte-level", "the é 🌍 end"), ("byte-fallback", "the é 🌍 end"), ("metaspace", "the end")]
    {
        let Ok(tokenizer) = Tokenizer::from_dir(&fixture(name)) else { continue };
        let ids = tokenizer.encode(text, false).unwrap();
        let bytes: Vec<u8> = ids.iter().flat_map(|&id| tokenizer.token_bytes(id)).collect();
        assert_eq!(String::from_utf8(bytes).unwrap().trim_start(), text, "{name}");
    }
    let tokenizer = Tokenizer::from_dir(&fixture("byte-level")).unwrap();
    assert_eq!(tokenizer.token_bytes(tokenizer.eos_id().unwrap()), b"<|im_end|>");
    assert_eq!(tokenizer.token_bytes(u32::MAX), b"");
}
