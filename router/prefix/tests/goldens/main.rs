//! Compares rendered text and token ids with Hugging Face `transformers`, for every model and conversation in
//! `testdata/` (see `make_goldens.py` there).

mod conversion;
mod recorded;
mod traces;

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use prefix::{
    ChatBody, FallbackReason, ModelFiles, ModelTokenizer, ModelTokenizerSource, SpecialTokens, TextDecoder, WallTime,
};
use recorded::{IdsDigest, folder};
use serde::Deserialize;
use serde_json::value::RawValue;

#[derive(Deserialize)]
struct GoldenFile {
    now: i64,
    chats: Vec<ChatGolden>,
    texts: Vec<TokenizerGolden>,
    long: Vec<RepeatedTextGolden>,
}

#[derive(Deserialize)]
struct ChatGolden {
    model: String,
    chat: String,
    text: Option<String>,
    ids: Option<IdsDigest>,
    error: Option<String>,
}

#[derive(Deserialize)]
struct TokenizerGolden {
    model: String,
    text: String,
    ids: Vec<u32>,
    with_special: IdsDigest,
    /// Set only if it differs from the text.
    decoded: Option<String>,
}

/// Single user message that repeats `unit`.
#[derive(Deserialize)]
struct RepeatedTextGolden {
    model: String,
    unit: String,
    times: usize,
    ids: IdsDigest,
}

#[derive(Deserialize)]
struct ConversationFile {
    chats: Vec<Conversation>,
}

#[derive(Deserialize)]
struct Conversation {
    name: String,
    body: Box<RawValue>,
}

fn testdata() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata")
}

fn load(model: &str) -> ModelTokenizer {
    if model == "quirks" {
        let mut files = ModelFiles::read(&folder("tiny")).unwrap();
        files.chat_template = Some(std::fs::read(folder(model).join("chat_template.jinja")).unwrap().into());
        return ModelTokenizer::load(ModelTokenizerSource::Files(files)).unwrap();
    }
    ModelTokenizer::load(ModelTokenizerSource::Folder(folder(model))).unwrap()
}

fn read<T: for<'a> Deserialize<'a>>(file: &str) -> T {
    serde_json::from_slice(&std::fs::read(testdata().join(file)).unwrap()).unwrap()
}

#[test]
fn chats_render_and_encode_as_in_transformers() {
    let goldens: GoldenFile = read("goldens.json");
    let conversations: ConversationFile = read("conversations.json");
    let bodies: HashMap<_, _> = conversations.chats.iter().map(|c| (c.name.as_str(), c.body.get())).collect();
    let mut models = HashMap::new();
    let mut wrong = Vec::new();
    for golden in &goldens.chats {
        let model = models.entry(golden.model.as_str()).or_insert_with_key(|model| load(model));
        let body = ChatBody::parse(bodies[golden.chat.as_str()].as_bytes()).unwrap();
        let now = WallTime { unix_seconds: goldens.now };
        let rendered = model.render(&body, now);
        match (rendered, &golden.text) {
            (Ok(text), Some(expected)) if text == *expected => {}
            (Err(_), None) if golden.error.is_some() => continue,
            (other, expected) => {
                wrong.push(format!("{} / {}:\n{other:?}\n{expected:?}", golden.model, golden.chat));
                continue;
            }
        }
        if let Some(expected) = &golden.ids {
            assert_eq!(
                IdsDigest::of(&model.encode_chat(&body, now).unwrap()),
                *expected,
                "{} / {}",
                golden.model,
                golden.chat
            );
        }
    }
    assert!(wrong.is_empty(), "{} differ\n{}", wrong.len(), wrong.join("\n\n"));
    assert_eq!(goldens.chats.len(), 14 * bodies.len());
}

#[test]
fn texts_encode_and_decode_as_in_transformers() {
    let goldens: GoldenFile = read("goldens.json");
    let mut models = HashMap::new();
    for TokenizerGolden { model, text, ids, with_special, decoded } in &goldens.texts {
        let loaded = models.entry(model.as_str()).or_insert_with_key(|model| load(model));
        assert_eq!(loaded.encode(text, SpecialTokens::Without).unwrap(), *ids, "{model} {text:?}");
        assert_eq!(
            IdsDigest::of(&loaded.encode(text, SpecialTokens::With).unwrap()),
            *with_special,
            "{model} {text:?}"
        );
        assert_eq!(loaded.decode(ids, SpecialTokens::With).unwrap(), *decoded.as_ref().unwrap_or(text), "{model}");
    }
    assert!(goldens.texts.len() > 40);
}

#[test]
fn incremental_decoding_equals_decoding_at_once() {
    let goldens: GoldenFile = read("goldens.json");
    let mut models = HashMap::new();
    for TokenizerGolden { model, text: encoded, ids, decoded, .. } in &goldens.texts {
        let loaded = models.entry(model.as_str()).or_insert_with_key(|model| load(model));
        let mut decoder = TextDecoder::new(SpecialTokens::With);
        let mut text: String = ids.iter().map(|id| decoder.push(loaded, &[*id]).unwrap()).collect();
        text.push_str(&decoder.finish(loaded).unwrap());
        assert_eq!(text, *decoded.as_ref().unwrap_or(encoded), "{model}");
    }
}

#[test]
fn very_long_lines_encode_as_in_transformers_or_are_rejected() {
    let goldens: GoldenFile = read("goldens.json");
    let mut models = HashMap::new();
    let mut refused = 0;
    for RepeatedTextGolden { model, unit, times, ids } in &goldens.long {
        let loaded = models.entry(model.as_str()).or_insert_with_key(|model| load(model));
        let content = serde_json::to_string(&unit.repeat(*times)).unwrap();
        let body = format!(r#"{{"messages":[{{"role":"user","content":{content}}}]}}"#);
        let body = ChatBody::parse(body.as_bytes()).unwrap();
        match loaded.encode_chat(&body, WallTime { unix_seconds: goldens.now }) {
            Ok(ours) => assert_eq!(IdsDigest::of(&ours), *ids, "{model}: {times} times {:.20}", unit),
            Err(error) => {
                assert_eq!(error.reason(), FallbackReason::TooLarge, "{model}: {times} times {:.20}: {error}", unit);
                refused += 1;
            }
        }
    }
    assert!(goldens.long.len() > 100 && refused * 2 < goldens.long.len(), "{refused} of {}", goldens.long.len());
}
