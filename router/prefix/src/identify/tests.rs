use std::path::Path;

use proptest::prelude::*;
use vocabulary::Blocks;

use super::*;
use crate::{ModelFiles, ModelTextSource, TemplateKind};

fn tiny() -> Arc<ModelText> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs/models/tiny");
    Arc::new(ModelText::load(ModelTextSource::Files(ModelFiles::read(&folder).unwrap())).unwrap())
}

fn identifier_of(text: Option<Arc<ModelText>>) -> Identifier {
    let namespace = Namespace { model: "tiny".into(), revision: "".into(), tokenizer: "ignored".into() };
    Identifier::new(IdentifierOptions { namespace, seed: Seed(7), block: Tokens(4), text, limits: Limits::default() })
}

fn identifier() -> Identifier {
    identifier_of(Some(tiny()))
}

fn fallback_reason(prompt: &Prompt) -> Option<FallbackReason> {
    match prompt.identity {
        Identity::Exact => None,
        Identity::Fallback(reason) => Some(reason),
    }
}

#[test]
fn a_chat_is_named_by_the_ids_of_its_rendering() {
    let identifier = identifier();
    let body =
        br#"{"model":"tiny","messages":[{"role":"user","content":"Hello there, how are you?"}],"temperature":0}"#;
    let prompt = identifier.chat(body, Asked::default());
    let rendered = "<|im_start|>user\nHello there, how are you?<|im_end|>\n<|im_start|>assistant\n";
    let ids = identifier.text().unwrap().encode(rendered, SpecialTokens::Without).unwrap();
    assert_eq!(prompt.tokens(), Some(&ids[..]));
    assert_eq!(prompt.chain, Chain::over_tokens(identifier.root(RootKeys::default()), Seed(7), Tokens(4), &ids));
    assert!(prompt.chain.blocks() > Blocks(1));
    assert_eq!((prompt.identity, prompt.detail), (Identity::Exact, None));
}

#[test]
fn text_and_ids_of_a_completion_have_the_same_name() {
    let identifier = identifier();
    let text = identifier.completion(br#"{"prompt":"The quick brown fox jumps over"}"#, Asked::default());
    let ids = format!(r#"{{"prompt":{:?}}}"#, text[0].tokens().unwrap());
    assert_eq!(identifier.completion(ids.as_bytes(), Asked::default()), text);
    let batch = identifier.completion(br#"{"prompt":["The quick brown fox jumps over","b"]}"#, Asked::default());
    assert_eq!((batch.len(), &batch[0]), (2, &text[0]));
}

#[test]
fn a_batch_is_identified_as_a_whole_or_not_at_all() {
    let body = br#"{"prompt":["fine","\ud800"]}"#;
    let prompts = identifier().completion(body, Asked::default());
    assert_eq!(prompts.len(), 1);
    assert_eq!(fallback_reason(&prompts[0]), Some(FallbackReason::LoneSurrogate));
}

#[test]
fn without_a_tokenizer_text_falls_back_and_ids_do_not() {
    let identifier = identifier_of(None);
    let chat = identifier.chat(br#"{"messages":[{"role":"user","content":"x"}]}"#, Asked::default());
    assert_eq!(fallback_reason(&chat), Some(FallbackReason::NoTokenizer));
    assert!(chat.detail.is_some_and(|detail| detail.contains("no tokenizer")));
    let ids = identifier.completion(br#"{"prompt":[1,2,3,4,5]}"#, Asked::default());
    assert_eq!((ids[0].identity, ids[0].chain.blocks()), (Identity::Exact, Blocks(1)));
    assert_eq!(&*identifier.namespace().tokenizer, "");
}

#[test]
fn every_reason_to_fall_back_is_told_apart() {
    let identifier = identifier();
    let user = |content: &str| format!(r#"{{"messages":[{{"role":"user","content":{content}}}]}}"#);
    let with = |field: &str| format!(r#"{{"messages":[{{"role":"user","content":"x"}}],{field}}}"#);
    let image = r#"[{"type":"image_url","image_url":{"url":"data:,"}}]"#;
    let tool = |schema: &str| {
        with(&format!(r#""tools":[{{"type":"function","function":{{"name":"f","parameters":{{"x":{schema}}}}}}}]"#))
    };
    let cases = [
        (user(image), FallbackReason::Multimodal),
        (user(r#""\ud83c""#), FallbackReason::LoneSurrogate),
        (user(r#""\udf0d\ud83c""#), FallbackReason::LoneSurrogate),
        (tool("123456789012345678901"), FallbackReason::UnsupportedNumber),
        (with(r#""truncate_prompt_tokens":5"#), FallbackReason::UnsupportedOption),
        (with(r#""chat_template":"{{ 1 }}""#), FallbackReason::UnsupportedOption),
        (with(r#""chat_template_kwargs":{"messages":[]}"#), FallbackReason::UnsupportedOption),
        (with(r#""messages":[]"#), FallbackReason::Malformed),
        (with(r#""continue_final_message":true"#), FallbackReason::Malformed),
        (with(r#""tools":[{}]"#), FallbackReason::Malformed),
        (user("5"), FallbackReason::Malformed),
        ("{".into(), FallbackReason::Malformed),
        ("{}".into(), FallbackReason::Malformed),
        (r#"{"messages":[]}"#.into(), FallbackReason::Malformed),
        (r#"{"messages":[{"role":"user","content":"x"}]} x"#.into(), FallbackReason::Malformed),
    ];
    for (body, expected) in cases {
        assert_eq!(fallback_reason(&identifier.chat(body.as_bytes(), Asked::default())), Some(expected), "{body}");
    }
    assert_eq!(fallback_reason(&identifier.chat(b"\xff{", Asked::default())), Some(FallbackReason::Malformed));
}

#[test]
fn a_surrogate_pair_and_an_escaped_backslash_are_text() {
    for content in [r#""\ud83c\udf0d""#, r#""\\ud83c""#, r#""\ud83c\udf0d\ud83c\udf0d""#] {
        let body = format!(r#"{{"messages":[{{"role":"user","content":{content}}}]}}"#);
        assert_eq!(identifier().chat(body.as_bytes(), Asked::default()).identity, Identity::Exact, "{content}");
        assert!(!has_lone_surrogate(body.as_bytes()), "{content}");
    }
}

#[test]
fn a_template_that_refuses_and_one_that_is_missing_fall_back() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs/models/tiny");
    let cases = [
        (Some("{{ raise_exception('no') }}"), FallbackReason::TemplateError),
        (
            Some("{% for a in range(99999) %}{% for a in range(99999) %}{{ a }}{% endfor %}{% endfor %}"),
            FallbackReason::TooLarge,
        ),
        (None, FallbackReason::UnsupportedTemplate),
    ];
    for (template, expected) in cases {
        let mut files = ModelFiles::read(&folder).unwrap();
        files.chat_template = template.map(|template| template.as_bytes().to_vec().into());
        let limits = Limits { template_steps: 10_000, ..Limits::default() };
        let text = ModelText::load_within(ModelTextSource::Files(files), limits).unwrap();
        let body = br#"{"messages":[{"role":"user","content":"x"}]}"#;
        let prompt = identifier_of(Some(Arc::new(text))).chat(body, Asked::default());
        assert_eq!(fallback_reason(&prompt), Some(expected));
        assert_eq!(prompt.content, Content::Bytes(b":{\"role\":\"user\",\"content\":\"x\"}\n".to_vec()));
    }
}

#[test]
fn keys_of_the_request_change_the_whole_chain_and_fallback_has_a_root_of_its_own() {
    let identifier = identifier();
    let body = br#"{"messages":[{"role":"user","content":"Hello there, how are you?"}]}"#;
    let plain = identifier.chat(body, Asked::default());
    let keys = RootKeys { salt: Some("tenant"), ..RootKeys::default() };
    let salted = identifier.chat(body, Asked { keys, now: WallTime::default() });
    assert_eq!(plain.tokens(), salted.tokens());
    assert!(plain.chain.ids.iter().zip(&salted.chain.ids).all(|(a, b)| a != b));
    let error = PrefixError::unforeseeable(FallbackReason::Multimodal, "x");
    assert_ne!(identifier.fallback(body, &error, RootKeys::default()).chain.root, plain.chain.root);
}

#[test]
fn a_prompt_known_by_bytes_has_no_ids() {
    let prompt = identifier_of(None).chat(b"{}", Asked::default());
    assert_eq!(prompt.tokens(), None);
}

#[test]
fn a_block_of_nothing_does_not_divide_by_zero() {
    let namespace = identifier().namespace().clone();
    let options =
        IdentifierOptions { namespace, seed: Seed(1), block: Tokens(0), text: None, limits: Limits::default() };
    assert_eq!(Identifier::new(options).completion(br#"{"prompt":[1]}"#, Asked::default()).len(), 1);
}

fn body_of(messages: &[(String, String)]) -> String {
    let messages: Vec<_> =
        messages.iter().map(|(role, text)| serde_json::json!({"role": role, "content": text})).collect();
    serde_json::json!({ "messages": messages }).to_string()
}

fn conversation() -> impl Strategy<Value = Vec<(String, String)>> {
    let role = prop::sample::select(vec!["user", "assistant", "system", "tool"]).prop_map(str::to_owned);
    prop::collection::vec((role, "\\PC{0,40}|(<\\|im_end\\|>|\\s|[a-z]{1,8} ){0,8}"), 1..6)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn a_grown_conversation_extends_the_chain_of_its_turns(messages in conversation()) {
        let exact = IDENTIFIER.with(Clone::clone);
        prop_assert_eq!(exact.text().unwrap().template_kind(), TemplateKind::AppendOnly);
        let bytes = identifier_of(None);
        for identifier in [&exact, &bytes] {
            let full = identifier.chat(body_of(&messages).as_bytes(), Asked::default());
            for turns in 1..messages.len() {
                // The next turn of an append-only template starts after a special token, so ids cannot merge across.
                let part = identifier.chat(no_generation(&messages[..turns]).as_bytes(), Asked::default());
                prop_assert!(full.chain.ids.starts_with(&part.chain.ids));
            }
        }
    }

    #[test]
    fn no_body_panics(body in prop::collection::vec(any::<u8>(), 0..200), json in "[\\[\\]{}\":,0-9a-z \\\\]{0,80}") {
        let identifier = IDENTIFIER.with(Clone::clone);
        let wrapped = format!(r#"{{"messages":[{json}],"prompt":[{json}]}}"#);
        for body in [&body[..], json.as_bytes(), wrapped.as_bytes()] {
            identifier.chat(body, Asked::default());
            prop_assert!(!identifier.completion(body, Asked::default()).is_empty());
        }
    }
}

fn no_generation(messages: &[(String, String)]) -> String {
    body_of(messages).replacen('{', r#"{"add_generation_prompt":false,"#, 1)
}

thread_local! {
    static IDENTIFIER: Identifier = identifier();
}
