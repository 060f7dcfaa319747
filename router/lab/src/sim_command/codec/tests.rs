use std::path::Path;

use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Value, json};

use super::*;

fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
}

fn family(name: &str) -> ModelTextCodec {
    ModelTextCodec::load(Some(repository("router/prefix/testdata/models").join(name))).unwrap()
}

/// The small model with a template that prints what it is given.
fn echo(template: &str) -> ModelTextCodec {
    let folder = tempfile::tempdir().unwrap();
    let copied = |from: PathBuf| std::fs::copy(&from, folder.path().join(from.file_name().unwrap())).unwrap();
    copied(repository("configs/models/tiny/tokenizer.json"));
    copied(repository("configs/models/tiny/tokenizer_config.json"));
    copied(repository("router/prefix/testdata/models").join(template).join("chat_template.jinja"));
    ModelTextCodec::load(Some(folder.path().to_owned())).unwrap()
}

fn encode(codec: &ModelTextCodec, api: ConversationApi, body: &Value) -> Result<Vec<u32>, String> {
    codec.encode_chat(api, body.to_string().as_bytes()).map_err(|error| error.0)
}

#[derive(Deserialize)]
struct RenderingGolden {
    template: String,
    endpoint: String,
    body: Box<RawValue>,
    text: Option<String>,
}

#[test]
fn requests_of_all_endpoints_render_as_in_vllm() {
    let recorded = std::fs::read(repository("router/prefix/testdata/shapes.json")).unwrap();
    let shapes: Vec<RenderingGolden> = serde_json::from_slice(&recorded).unwrap();
    let echoes = ["echo_text", "echo_parts"].map(|name| (name, echo(name)));
    let (mut same, mut refused) = ([0; 3], 0);
    for shape in &shapes {
        let (_, codec) = echoes.iter().find(|(name, _)| *name == shape.template).unwrap();
        let words = match shape.endpoint.as_str() {
            "messages" => ConversationApi::Messages,
            "responses" => ConversationApi::Responses,
            _ => ConversationApi::Chat,
        };
        let Some(expected) = &shape.text else { continue };
        match codec.encode_chat(words, shape.body.get().as_bytes()) {
            Ok(ids) => {
                let body = shape.body.get();
                assert_eq!(ids, codec.encode(expected, AddSpecialTokens::Bare).unwrap(), "{} {body}", shape.endpoint);
                same[words as usize] += 1;
            }
            Err(error) => {
                assert!(error.0.ends_with("a simulated worker does not do that: leave it out"), "{error}");
                refused += 1;
            }
        }
    }
    assert!(same.iter().all(|count| *count > 15) && refused < 10, "{same:?} and {refused} refused");
}

#[test]
fn tool_schema_keys_keep_the_order_of_the_request() {
    let codec = family("qwen_like");
    let tokens = |parameters: &str| {
        let function = format!(r#"{{"name":"look","parameters":{parameters}}}"#);
        let ask = r#"[{"role":"user","content":"Where?"}]"#;
        let body = format!(r#"{{"messages":{ask},"tools":[{{"type":"function","function":{function}}}]}}"#);
        codec.encode_chat(ConversationApi::Chat, body.as_bytes()).unwrap()
    };
    let sent = codec.decode(&tokens(r#"{"type":"object","required":["at"],"properties":{}}"#));
    assert!(sent.contains(r#"{"type": "object", "required": ["at"], "properties": {}}"#), "{sent}");
}

#[test]
fn template_receives_request_arguments_and_earlier_reasoning() {
    let codec = family("qwen_like");
    let told = |more: &str| {
        let thought = r#"{"role":"assistant","reasoning_content":"Hm, gates.","content":"There."}"#;
        let messages = format!(r#"[{{"role":"user","content":"Where?"}},{thought}]"#);
        let body = format!(r#"{{"messages":{messages}{more}}}"#);
        codec.decode(&codec.encode_chat(ConversationApi::Chat, body.as_bytes()).unwrap())
    };
    let plain = told("");
    assert!(plain.contains("Hm, gates."), "{plain}");
    assert_ne!(told(r#","chat_template_kwargs":{"enable_thinking":false}"#), plain);
    assert!(plain.starts_with(&told(r#","add_generation_prompt":false"#)));
}

#[test]
fn answer_is_continued_only_without_a_generation_prompt() {
    let codec = ModelTextCodec::load(None).unwrap();
    let with = |more: Value| {
        let mut body =
            json!({"messages": [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": "On "}]});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        encode(&codec, ConversationApi::Chat, &body)
    };
    let whole = with(json!({"add_generation_prompt": false})).unwrap();
    let begun = with(json!({"add_generation_prompt": false, "continue_final_message": true})).unwrap();
    assert!(whole.starts_with(&begun) && begun.len() < whole.len());
    for both in [
        json!({"continue_final_message": true, "add_generation_prompt": true}),
        json!({"continue_final_message": true}),
    ] {
        let error = with(both).unwrap_err();
        assert!(error.contains("add_generation_prompt: false"), "{error}");
    }
}

#[test]
fn rejected_requests_name_a_remedy() {
    let codec = ModelTextCodec::load(None).unwrap();
    let image = json!({"type": "image_url", "image_url": {"url": "http://x/y.png"}});
    let anthropics = json!({"type": "image", "source": {"type": "url", "url": "http://x/y.png"}});
    let responses = json!({"type": "input_image", "image_url": "http://x/y.png"});
    let asked = |part: &Value| json!([{"role": "user", "content": [part]}]);
    let cases = [
        (ConversationApi::Chat, json!({"messages": asked(&image)}), "takes text only"),
        (ConversationApi::Messages, json!({"messages": asked(&anthropics)}), "takes text only"),
        (ConversationApi::Responses, json!({"input": asked(&responses)}), "takes text only"),
        (ConversationApi::Chat, json!({"messages": [], "tools": []}), "no messages"),
        (ConversationApi::Chat, json!({"messages": asked(&json!("x")), "chat_template": "x"}), "leave it out"),
        (ConversationApi::Responses, json!({"input": "x", "truncation": "auto"}), "leave it out"),
        (ConversationApi::Chat, json!({"messages": asked(&json!("x")), "tools": [{"type": "function"}]}), "a tool"),
    ];
    for (words, body, expected) in cases {
        let error = encode(&codec, words, &body).unwrap_err();
        assert!(error.contains(expected), "{body}: {error}");
    }
    let none = family_without_template()
        .encode_chat(ConversationApi::Chat, br#"{"messages":[{"role":"user","content":"x"}]}"#);
    assert!(none.unwrap_err().0.contains("--tokenizer-dir"));
}

fn family_without_template() -> ModelTextCodec {
    let folder = tempfile::tempdir().unwrap();
    std::fs::copy(repository("configs/models/tiny/tokenizer.json"), folder.path().join("tokenizer.json")).unwrap();
    ModelTextCodec::load(Some(folder.path().to_owned())).unwrap()
}

#[test]
fn completions_use_tokenizer_framing_and_chats_use_the_template() {
    let (framed, plain) = (family("llama_like"), family("qwen_like"));
    let begin = framed.text.token_id("<|begin_of_text|>").unwrap();
    let completion = |codec: &ModelTextCodec, more: &str| {
        let body = format!(r#"{{"prompt":"Where is it?"{more}}}"#);
        codec.encode_completion(body.as_bytes()).unwrap().concat()
    };
    let bare = framed.encode("Where is it?", AddSpecialTokens::Bare).unwrap();
    assert_eq!(completion(&framed, ""), [&[begin], &bare[..]].concat());
    assert_eq!(completion(&framed, r#","add_special_tokens":false"#), bare);
    assert_eq!(framed.encode("Where is it?", AddSpecialTokens::Framed).unwrap(), completion(&framed, ""));
    assert_eq!(completion(&plain, ""), plain.encode("Where is it?", AddSpecialTokens::Bare).unwrap());
    let chat =
        encode(&framed, ConversationApi::Chat, &json!({"messages": [{"role": "user", "content": "Hi"}]})).unwrap();
    assert_eq!(chat.iter().filter(|id| **id == begin).count(), 1, "the template writes it, and nobody again");
}

#[test]
fn completions_accept_text_token_ids_and_batches() {
    let codec = ModelTextCodec::load(None).unwrap();
    let prompts = |prompt: &str| codec.encode_completion(format!(r#"{{"prompt":{prompt}}}"#).as_bytes());
    assert_eq!(prompts("[1,2]").unwrap(), [[1, 2]]);
    assert_eq!(prompts("[[1],[2,3]]").unwrap(), [vec![1], vec![2, 3]]);
    assert_eq!(
        prompts(r#"["a","b"]"#).unwrap(),
        [prompts(r#""a""#).unwrap().concat(), prompts(r#""b""#).unwrap().concat()]
    );
    assert!(prompts("[]").is_err() && prompts("7").is_err());
}

#[test]
fn encoding_and_decoding_round_trip() {
    let codec = ModelTextCodec::load(None).unwrap();
    let chat =
        encode(&codec, ConversationApi::Chat, &json!({"messages": [{"role": "user", "content": "Where is my bag?"}]}));
    assert!(codec.decode(&chat.unwrap()).contains("Where is my bag?"));
    assert_eq!(codec.decode(&codec.encode("plain text", AddSpecialTokens::Framed).unwrap()), "plain text");
    assert!(codec.eos() < codec.vocabulary_size());
}
