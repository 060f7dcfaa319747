//! Rendered text and token ids equal those of Hugging Face `transformers`, for every model and conversation in
//! `testdata/` (see `make_goldens.py` there).

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use prefix::{ChatBody, ModelFiles, ModelText, ModelTextSource, SpecialTokens, TextDecoder, WallTime};
use serde::Deserialize;
use serde_json::value::RawValue;

#[derive(Deserialize)]
struct Goldens {
    now: i64,
    chats: Vec<ChatGolden>,
    texts: Vec<TextGolden>,
}

#[derive(Deserialize)]
struct ChatGolden {
    model: String,
    chat: String,
    text: Option<String>,
    ids: Option<Vec<u32>>,
    error: Option<String>,
}

#[derive(Deserialize)]
struct TextGolden {
    model: String,
    text: String,
    ids: Vec<u32>,
    with_special: Vec<u32>,
    decoded: String,
}

#[derive(Deserialize)]
struct Conversations {
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

fn folder(model: &str) -> PathBuf {
    match model {
        "tiny" => Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs/models/tiny"),
        _ => testdata().join("models").join(model),
    }
}

fn load(model: &str) -> ModelText {
    if model == "quirks" {
        let mut files = ModelFiles::read(&folder("tiny")).unwrap();
        files.chat_template = Some(std::fs::read(folder(model).join("chat_template.jinja")).unwrap().into());
        return ModelText::load(ModelTextSource::Files(files)).unwrap();
    }
    ModelText::load(ModelTextSource::Folder(folder(model))).unwrap()
}

fn read<T: for<'a> Deserialize<'a>>(file: &str) -> T {
    serde_json::from_slice(&std::fs::read(testdata().join(file)).unwrap()).unwrap()
}

#[test]
fn chats_render_and_encode_as_transformers_does() {
    let goldens: Goldens = read("goldens.json");
    let conversations: Conversations = read("conversations.json");
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
            assert_eq!(model.encode_chat(&body, now).unwrap(), *expected, "{} / {}", golden.model, golden.chat);
        }
    }
    assert!(wrong.is_empty(), "{} differ\n{}", wrong.len(), wrong.join("\n\n"));
    assert_eq!(goldens.chats.len(), 5 * bodies.len());
}

#[test]
fn texts_encode_and_decode_as_transformers_does() {
    let goldens: Goldens = read("goldens.json");
    let mut models = HashMap::new();
    for TextGolden { model, text, ids, with_special, decoded } in &goldens.texts {
        let loaded = models.entry(model.as_str()).or_insert_with_key(|model| load(model));
        assert_eq!(loaded.encode(text, SpecialTokens::Without).unwrap(), *ids, "{model} {text:?}");
        assert_eq!(loaded.encode(text, SpecialTokens::With).unwrap(), *with_special, "{model} {text:?}");
        assert_eq!(loaded.decode(ids, SpecialTokens::With).unwrap(), *decoded, "{model} {text:?}");
    }
    assert!(goldens.texts.len() > 40);
}

#[test]
fn text_decoded_id_by_id_is_the_text_decoded_at_once() {
    let goldens: Goldens = read("goldens.json");
    let mut models = HashMap::new();
    for TextGolden { model, ids, decoded, .. } in &goldens.texts {
        let loaded = models.entry(model.as_str()).or_insert_with_key(|model| load(model));
        let mut decoder = TextDecoder::new(SpecialTokens::With);
        let mut text: String = ids.iter().map(|id| decoder.push(loaded, &[*id]).unwrap()).collect();
        text.push_str(&decoder.finish(loaded).unwrap());
        assert_eq!(text, *decoded, "{model}");
    }
}
