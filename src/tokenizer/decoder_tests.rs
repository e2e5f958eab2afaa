//! The pipeline against the `tokenizers` crate's own decoders, over random tokens.

use proptest::prelude::*;
use serde_json::json;

use super::*;

const PREFIX_SPACE: &str = r#"{"type":"Metaspace","replacement":"▁","prepend_scheme":"always","split":true}"#;

fn decoder(json: &str) -> DecoderWrapper {
    serde_json::from_str(json).unwrap()
}

/// The text of each push and of the end.
fn segments(decoder: Option<&DecoderWrapper>, clean_up: bool, tokens: &[&str]) -> Vec<String> {
    let mut pipeline = Pipeline::new(decoder, clean_up);
    let mut all: Vec<String> = Vec::new();
    for token in tokens {
        let mut text = String::new();
        pipeline.push((*token).to_owned(), &mut text);
        all.push(text);
    }
    let mut text = String::new();
    pipeline.finish(&mut text);
    all.push(text);
    all
}

fn clean_up(text: &str) -> String {
    CLEAN_UP.iter().fold(text.to_owned(), |text, (pattern, content)| text.replace(pattern, content))
}

/// All decoders and orders worth trying, the odd ones included.
fn decoders() -> Vec<DecoderWrapper> {
    let replace = json!({"type": "Replace", "pattern": {"String": "▁"}, "content": " "});
    let replace_long = json!({"type": "Replace", "pattern": {"String": "aab"}, "content": "-"});
    let replace_regex = json!({"type": "Replace", "pattern": {"Regex": "a+"}, "content": "."});
    let fallback = json!({"type": "ByteFallback"});
    let fuse = json!({"type": "Fuse"});
    let strip = json!({"type": "Strip", "content": " ", "start": 1, "stop": 0});
    let strip_two = json!({"type": "Strip", "content": " ", "start": 2, "stop": 0});
    let byte_level =
        json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true});
    let never = json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "never", "split": false});
    let metaspace: serde_json::Value = serde_json::from_str(PREFIX_SPACE).unwrap();
    let wordpiece = json!({"type": "WordPiece", "prefix": "##", "cleanup": true});
    let suffix = json!({"type": "BPEDecoder", "suffix": "</w>"});
    let ctc = json!({"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": true});
    let sequence = |decoders: &[&serde_json::Value]| json!({"type": "Sequence", "decoders": decoders});
    let chains = [
        byte_level.clone(),
        metaspace.clone(),
        never.clone(),
        wordpiece.clone(),
        suffix.clone(),
        ctc.clone(),
        fuse.clone(),
        strip.clone(),
        replace_regex.clone(),
        sequence(&[&replace, &fallback, &fuse, &strip]),
        sequence(&[&replace, &fallback, &fuse]),
        sequence(&[&replace, &fallback, &strip]),
        sequence(&[&fallback, &metaspace]),
        sequence(&[&fallback, &fuse, &metaspace, &strip_two]),
        sequence(&[&fuse, &replace_long, &replace]),
        sequence(&[&fuse, &replace_regex, &never]),
        sequence(&[&fuse, &fallback]),
        sequence(&[&byte_level, &strip_two, &wordpiece]),
        sequence(&[&fuse, &byte_level]),
        sequence(&[&fuse, &suffix, &ctc]),
        sequence(&[&wordpiece, &suffix]),
        sequence(&[&ctc, &wordpiece]),
        sequence(&[&sequence(&[&fallback, &fuse]), &strip]),
        sequence(&[]),
    ];
    chains.iter().map(|chain| decoder(&chain.to_string())).collect()
}

fn tokens() -> impl Strategy<Value = Vec<String>> {
    let token = prop_oneof![
        "[a▁ .,']{0,3}",
        "[aĠĊðŁĺĢÃ©]{1,3}",
        Just("<0xF0>".to_owned()),
        Just("<0x9F>".to_owned()),
        Just("<0x98>".to_owned()),
        Just("<0x80>".to_owned()),
        Just("<0x41>".to_owned()),
        Just("##ab".to_owned()),
        Just("a</w>".to_owned()),
        Just("n't".to_owned()),
        Just("<pad>".to_owned()),
        Just("|".to_owned()),
        "\\PC{0,3}",
    ];
    prop::collection::vec(token, 1..12)
}

proptest! {
    #[test]
    fn stream_equals_batch_decode_for_every_decoder(tokens in tokens(), clean in any::<bool>()) {
        let borrowed: Vec<&str> = tokens.iter().map(String::as_str).collect();
        let finish = |text: String| if clean { clean_up(&text) } else { text };
        for decoder in decoders() {
            let expected = finish(decoder.decode(tokens.clone()).unwrap());
            let streamed = segments(Some(&decoder), clean, &borrowed).concat();
            prop_assert_eq!(streamed, expected, "{:?}", decoder);
        }
        prop_assert_eq!(segments(None, clean, &borrowed).concat(), finish(tokens.join(" ")));
    }

    #[test]
    fn byte_level_stream_equals_batch_decode_of_raw_bytes(bytes in prop::collection::vec(any::<u8>(), 1..40)) {
        let decoder = decoder(r#"{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":false}"#);
        let alphabet: Vec<String> =
            bytes.iter().map(|&byte| printable(byte).to_string()).collect();
        let tokens: Vec<&str> = alphabet.iter().map(String::as_str).collect();
        let streamed = segments(Some(&decoder), false, &tokens).concat();
        prop_assert_eq!(&streamed, &String::from_utf8_lossy(&bytes));
        prop_assert_eq!(streamed, decoder.decode(alphabet.clone()).unwrap());
    }
}

/// GPT-2's table the other way, by search.
fn printable(byte: u8) -> char {
    ('\u{21}'..='\u{143}').find(|&c| byte_of(c) == Some(byte)).unwrap()
}

#[test]
fn byte_table_covers_every_byte_once() {
    let mut bytes: Vec<u8> = ('\0'..='\u{fff}').filter_map(byte_of).collect();
    bytes.sort_unstable();
    assert_eq!(bytes, (0..=255).collect::<Vec<u8>>());
    assert_eq!((byte_of('Ġ'), byte_of('Ċ'), byte_of(' ')), (Some(b' '), Some(b'\n'), None));
}

#[test]
fn an_emoji_in_four_byte_tokens_comes_out_whole() {
    let byte_level = decoder(r#"{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":false}"#);
    let bytes = ["ð", "Ł", "ĺ", "Ģ", "a"];
    assert_eq!(segments(Some(&byte_level), false, &bytes), ["", "", "", "😀", "a", ""]);
    let fallback = decoder(r#"{"type":"ByteFallback"}"#);
    let bytes = ["<0xF0>", "<0x9F>", "<0x98>", "<0x80>", "a"];
    assert_eq!(segments(Some(&fallback), false, &bytes), ["", "", "", "", "😀a", ""]);
}

#[test]
fn an_unfinished_character_is_replaced_only_at_the_end() {
    let byte_level = decoder(r#"{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":false}"#);
    assert_eq!(segments(Some(&byte_level), false, &["a", "ð", "Ł"]), ["a", "", "", "\u{fffd}"]);
}

#[test]
fn words_are_streamed_at_once() {
    let metaspace = decoder(PREFIX_SPACE);
    assert_eq!(segments(Some(&metaspace), false, &["▁Hi", "▁you", "▁", "!"]), ["Hi", " you", " ", "!", ""]);
    let cleaned = segments(Some(&metaspace), true, &["▁it", "▁", "'s", "▁ok", "▁", "."]);
    assert_eq!(cleaned.concat(), "it's ok.");
}

#[test]
fn decoders_that_panic_in_the_crate_do_not_here() {
    let suffix = decoder(r#"{"type":"BPEDecoder","suffix":"</w>"}"#);
    assert_eq!(segments(Some(&suffix), false, &[]).concat(), "");
    let strip = decoder(r#"{"type":"Strip","content":" ","start":1,"stop":2}"#);
    assert_eq!(segments(Some(&strip), false, &["", " ", "  a   "]).concat(), " a ");
    let fused = decoder(
        r#"{"type":"Sequence","decoders":[{"type":"Fuse"},{"type":"Strip","content":" ","start":1,"stop":2}]}"#,
    );
    assert_eq!(
        segments(Some(&fused), false, &[" ", " a ", " ", " ", "b", " "]),
        ["", " a", "", " ", "  b", "", ""]
    );
}
