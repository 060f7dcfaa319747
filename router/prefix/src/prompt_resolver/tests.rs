use std::path::Path;

use proptest::prelude::*;
use vocabulary::Blocks;

use super::*;
use crate::canonical::FieldLayout;
use crate::{ModelFiles, ModelTokenizerSource, PrefixStability};

fn tiny() -> Arc<ModelTokenizer> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs/models/tiny");
    Arc::new(ModelTokenizer::load(ModelTokenizerSource::Files(ModelFiles::read(&folder).unwrap())).unwrap())
}

fn identifier_of(text: Option<Arc<ModelTokenizer>>) -> PromptResolver {
    let namespace = ModelNamespace { model: "tiny".into(), revision: "".into(), tokenizer: "ignored".into() };
    PromptResolver::new(PromptResolverOptions {
        namespace,
        seed: HashSeed(7),
        block_size: Tokens(4),
        text,
        limits: PromptWorkLimits::default(),
    })
}

fn identifier() -> PromptResolver {
    identifier_of(Some(tiny()))
}

fn fallback_reason(prompt: &Prompt) -> Option<FallbackReason> {
    match prompt.identity {
        PromptIdentity::Exact => None,
        PromptIdentity::Fallback(reason) => Some(reason),
    }
}

#[test]
fn chat_is_identified_by_the_token_ids_of_its_rendering() {
    let identifier = identifier();
    let body =
        br#"{"model":"tiny","messages":[{"role":"user","content":"Hello there, how are you?"}],"temperature":0}"#;
    let prompt = identifier.resolve_chat(body, ExtraPromptInputs::default());
    let rendered = "<|im_start|>user\nHello there, how are you?<|im_end|>\n<|im_start|>assistant\n";
    let ids = identifier.text().unwrap().encode(rendered, SpecialTokens::Without).unwrap();
    assert_eq!(prompt.token_ids(), Some(&ids[..]));
    assert_eq!(
        prompt.chain,
        PrefixChain::over_tokens(identifier.root(RequestNamespace::default()), HashSeed(7), Tokens(4), &ids)
    );
    assert!(prompt.chain.blocks() > Blocks(1));
    assert_eq!((prompt.identity, prompt.detail), (PromptIdentity::Exact, None));
}

#[test]
fn text_and_token_ids_of_a_completion_give_the_same_chain() {
    let identifier = identifier();
    let text =
        identifier.resolve_completion(br#"{"prompt":"The quick brown fox jumps over"}"#, ExtraPromptInputs::default());
    let ids = format!(r#"{{"prompt":{:?}}}"#, text[0].token_ids().unwrap());
    assert_eq!(identifier.resolve_completion(ids.as_bytes(), ExtraPromptInputs::default()), text);
    let batch = identifier
        .resolve_completion(br#"{"prompt":["The quick brown fox jumps over","b"]}"#, ExtraPromptInputs::default());
    assert_eq!((batch.len(), &batch[0]), (2, &text[0]));
}

#[test]
fn batch_with_an_unresolvable_prompt_falls_back_as_a_whole() {
    let body = br#"{"prompt":["fine","\ud800"]}"#;
    let prompts = identifier().resolve_completion(body, ExtraPromptInputs::default());
    assert_eq!(prompts.len(), 1);
    assert_eq!(fallback_reason(&prompts[0]), Some(FallbackReason::LoneSurrogate));
}

#[test]
fn text_without_a_tokenizer_falls_back_but_token_ids_do_not() {
    let identifier = identifier_of(None);
    let chat =
        identifier.resolve_chat(br#"{"messages":[{"role":"user","content":"x"}]}"#, ExtraPromptInputs::default());
    assert_eq!(fallback_reason(&chat), Some(FallbackReason::NoTokenizer));
    assert!(chat.detail.is_some_and(|detail| detail.contains("no tokenizer")));
    let ids = identifier.resolve_completion(br#"{"prompt":[1,2,3,4,5]}"#, ExtraPromptInputs::default());
    assert_eq!((ids[0].identity, ids[0].chain.blocks()), (PromptIdentity::Exact, Blocks(1)));
    assert_eq!(&*identifier.namespace().tokenizer, "");
}

#[test]
fn every_fallback_reason_is_distinguished() {
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
        assert_eq!(
            fallback_reason(&identifier.resolve_chat(body.as_bytes(), ExtraPromptInputs::default())),
            Some(expected),
            "{body}"
        );
    }
    assert_eq!(
        fallback_reason(&identifier.resolve_chat(b"\xff{", ExtraPromptInputs::default())),
        Some(FallbackReason::Malformed)
    );
}

#[test]
fn surrogate_pairs_and_escaped_backslashes_are_valid_text() {
    for content in [r#""\ud83c\udf0d""#, r#""\\ud83c""#, r#""\ud83c\udf0d\ud83c\udf0d""#] {
        let body = format!(r#"{{"messages":[{{"role":"user","content":{content}}}]}}"#);
        assert_eq!(
            identifier().resolve_chat(body.as_bytes(), ExtraPromptInputs::default()).identity,
            PromptIdentity::Exact,
            "{content}"
        );
        assert!(!has_lone_surrogate(body.as_bytes()), "{content}");
    }
}

#[test]
fn refusing_or_missing_template_falls_back() {
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
        let limits = PromptWorkLimits { template_steps: 10_000, ..PromptWorkLimits::default() };
        let text = ModelTokenizer::load_with_limits(ModelTokenizerSource::Files(files), limits).unwrap();
        let body = br#"{"messages":[{"role":"user","content":"x"}]}"#;
        let prompt = identifier_of(Some(Arc::new(text))).resolve_chat(body, ExtraPromptInputs::default());
        assert_eq!(fallback_reason(&prompt), Some(expected));
        let (bytes, chain) = (b":{\"role\":\"user\",\"content\":\"x\"}\n", &prompt.chain);
        assert_eq!(prompt.content, PromptContent::Unknown);
        assert_eq!(*chain, PrefixChain::over_bytes(chain.root, HashSeed(7), chain.block, bytes));
    }
}

#[test]
fn request_namespace_changes_the_whole_chain_and_fallback_has_its_own_root() {
    let identifier = identifier();
    let body = br#"{"messages":[{"role":"user","content":"Hello there, how are you?"}]}"#;
    let plain = identifier.resolve_chat(body, ExtraPromptInputs::default());
    let keys = RequestNamespace { salt: Some("tenant"), ..RequestNamespace::default() };
    let salted = identifier.resolve_chat(body, ExtraPromptInputs { keys, now: WallTime::default() });
    assert_eq!(plain.token_ids(), salted.token_ids());
    assert!(plain.chain.ids.iter().zip(&salted.chain.ids).all(|(a, b)| a != b));
    let error = PrefixError::unresolvable(FallbackReason::Multimodal, "x");
    assert_ne!(identifier.fallback_prompt(body, &error, RequestNamespace::default()).chain.root, plain.chain.root);
}

#[test]
fn fallback_prompt_has_no_token_ids() {
    let prompt = identifier_of(None).resolve_chat(b"{}", ExtraPromptInputs::default());
    assert_eq!(prompt.token_ids(), None);
}

#[test]
fn zero_block_size_does_not_divide_by_zero() {
    let namespace = identifier().namespace().clone();
    let options = PromptResolverOptions {
        namespace,
        seed: HashSeed(1),
        block_size: Tokens(0),
        text: None,
        limits: PromptWorkLimits::default(),
    };
    assert_eq!(
        PromptResolver::new(options).resolve_completion(br#"{"prompt":[1]}"#, ExtraPromptInputs::default()).len(),
        1
    );
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
    fn extending_a_conversation_extends_its_chain(messages in conversation()) {
        let exact = IDENTIFIER.with(Clone::clone);
        prop_assert_eq!(exact.text().unwrap().prefix_stability(), PrefixStability::AppendOnly);
        let bytes = identifier_of(None);
        for identifier in [&exact, &bytes] {
            let full = identifier.resolve_chat(body_of(&messages).as_bytes(), ExtraPromptInputs::default());
            for turns in 1..messages.len() {
                // With an append-only template the next turn starts after a special token, so tokens cannot merge
                // across the boundary.
                let environment = ExtraPromptInputs::default();
                let part = identifier.resolve_chat(no_generation(&messages[..turns]).as_bytes(), environment);
                prop_assert!(full.chain.ids.starts_with(&part.chain.ids));
            }
        }
    }

    #[test]
    fn arbitrary_bodies_do_not_panic(body in prop::collection::vec(any::<u8>(), 0..200), json in "[\\[\\]{}\":,0-9a-z \\\\]{0,80}") {
        let identifier = IDENTIFIER.with(Clone::clone);
        let wrapped = format!(r#"{{"messages":[{json}],"prompt":[{json}]}}"#);
        for body in [&body[..], json.as_bytes(), wrapped.as_bytes()] {
            identifier.resolve_chat(body, ExtraPromptInputs::default());
            prop_assert!(!identifier.resolve_completion(body, ExtraPromptInputs::default()).is_empty());
        }
    }
}

fn no_generation(messages: &[(String, String)]) -> String {
    body_of(messages).replacen('{', r#"{"add_generation_prompt":false,"#, 1)
}

thread_local! {
    static IDENTIFIER: PromptResolver = identifier();
}

/// Bodies of one conversation whose messages have these texts: each has one more message than the one before, or is sent
/// again, with other fields after the messages.
fn growing_bodies(texts: &[String], tools: &str, after: &[&str]) -> Vec<String> {
    let body = |messages: &[String], after: &str| {
        let messages: Vec<_> =
            messages.iter().map(|text| serde_json::json!({"role": "user", "content": text}).to_string()).collect();
        format!("{{\"tools\": {tools},\"messages\":[ {} ] {after}}}", messages.join(" , "))
    };
    let steps = (0..=texts.len()).flat_map(|count| [count, count]).zip(after.iter().cycle());
    steps.map(|(count, after)| body(&texts[..count], after)).collect()
}

proptest! {
    #[test]
    fn a_grown_conversation_has_the_chain_of_the_whole_one(
        texts in proptest::collection::vec("[a-z\"\\\\\\[\\]{}, é\n]{0,40}", 0..7),
        tools in prop_oneof![Just("null"), Just("[{\"b\": [1, 2]}]")],
        after in proptest::collection::vec(prop_oneof![Just(""), Just(", \"prompt\":\"x\""), Just(",\"system\": \"s\"")], 1..5),
    ) {
        let identifier = identifier_of(None);
        let resolve = |body: &str, known: Option<KnownConversation<'_>>| {
            let fields: Vec<_> = crate::chat_body_layout::field_spans(body.as_bytes()).unwrap();
            let asked = (RequestNamespace::default(), known, &FieldLayout::unknown as LayoutOf<'_, '_>);
            identifier.prompt_without_tokenizer(body.as_bytes(), fields.into_iter(), asked)
        };
        let bodies = growing_bodies(&texts, tools, &after);
        let mut before: Option<(&String, BytesCheckpoint)> = None;
        for body in &bodies {
            let known = before.as_ref().and_then(|(known, checkpoint)| {
                // After the last message come " ] " and the rest.
                let end = known.rfind(" ] ")?;
                body.starts_with(&known[..end]).then_some(KnownConversation { body: known.as_bytes(), checkpoint, end })
            });
            let is_known = known.is_some();
            let (whole, (grown, checkpoint)) = (resolve(body, None), resolve(body, known));
            prop_assert_eq!(&grown, &whole.0);
            prop_assert_eq!(&grown.chain.ids, &identifier.fallback_prompt(body.as_bytes(), &NO_TOKENIZER, RequestNamespace::default()).chain.ids);
            prop_assert_eq!(&checkpoint, &whole.1);
            prop_assert!(is_known || before.is_none());
            before = checkpoint.map(|checkpoint| (body, checkpoint));
        }
    }
}
