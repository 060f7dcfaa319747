use std::path::Path;
use std::sync::Arc;

use proptest::prelude::*;
use vocabulary::{HashSeed, ModelNamespace, Tokens};

use super::*;
use crate::conversion_traits::AllowedSystemPosition;
use crate::{
    ExtraPromptInputs, ModelFiles, ModelTokenizer, ModelTokenizerSource, Prompt, PromptIdentity, PromptResolver,
    PromptResolverOptions, PromptWorkLimits,
};

const PERMISSIVE_TRAITS: ConversionTraits =
    ConversionTraits { system_placement: AllowedSystemPosition::Anywhere, no_thinking_effort: "none" };

fn of_messages(body: &str) -> Result<String, PrefixError> {
    messages::convert_request(body.as_bytes(), PERMISSIVE_TRAITS).map(text_of)
}

fn of_responses(body: &str) -> Result<String, PrefixError> {
    responses::convert_request(body.as_bytes()).map(text_of)
}

fn text_of(converted: ConvertedRequest) -> String {
    let read = ChatBodyLayout::read(&converted.body).map(|layout| layout.message_list().to_vec());
    assert_eq!(read.as_deref(), Some(converted.layout().message_list()), "messages lie where they are said to");
    String::from_utf8(converted.body).unwrap()
}

fn identifier(template: Option<&str>) -> PromptResolver {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs/models/tiny");
    let files = ModelFiles::read(&folder).unwrap();
    let chat_template = template.map_or(files.chat_template.clone(), |text| Some(text.as_bytes().to_vec().into()));
    let text = Some(Arc::new(
        ModelTokenizer::load(ModelTokenizerSource::Files(ModelFiles { chat_template, ..files })).unwrap(),
    ));
    let namespace = ModelNamespace { model: "tiny".into(), revision: "".into(), tokenizer: "".into() };
    PromptResolver::new(PromptResolverOptions {
        namespace,
        seed: HashSeed(7),
        block_size: Tokens(4),
        text,
        limits: PromptWorkLimits::default(),
    })
}

fn template_traits(template: &str) -> ConversionTraits {
    identifier(Some(template)).text().unwrap().template_traits()
}

#[test]
fn all_endpoints_convert_to_the_same_prompt() {
    let identifier = identifier(None);
    let inputs = ExtraPromptInputs::default();
    let chat = br#"{"messages":[{"role":"system","content":"Be."},{"role":"user","content":"Hi"},{"role":"assistant","content":"Yes?"},{"role":"user","content":"More."}]}"#;
    let messages = br#"{"system":"Be.","max_tokens":1,"messages":[{"role":"user","content":"Hi"},{"role":"assistant","content":[{"type":"text","text":"Yes?"}]},{"role":"user","content":"More."}]}"#;
    let responses = br#"{"instructions":"Be.","input":[{"role":"user","content":"Hi"},{"type":"message","role":"assistant","content":[{"type":"output_text","text":"Yes?"}]},{"role":"user","content":"More."}]}"#;
    let expected = identifier.resolve_chat(chat, inputs);
    assert_eq!(expected.identity, PromptIdentity::Exact);
    assert_eq!(identifier.resolve_messages(messages, inputs), expected);
    assert_eq!(identifier.resolve_responses(responses, inputs), expected);
}

#[test]
fn unconvertible_requests_fall_back_to_their_own_bytes() {
    let identifier = identifier(None);
    let reason = |prompt: Prompt| match prompt.identity {
        PromptIdentity::Fallback(reason) => reason,
        PromptIdentity::Exact => panic!("exact"),
    };
    let inputs = ExtraPromptInputs::default();
    let stored = identifier.resolve_responses(br#"{"input":"a","previous_response_id":"resp_1"}"#, inputs);
    assert_eq!(reason(stored), FallbackReason::UnsupportedOption);
    let surrogate = identifier.resolve_messages(br#"{"messages":[{"role":"user","content":"\ud800"}]}"#, inputs);
    assert_eq!(reason(surrogate), FallbackReason::LoneSurrogate);
    let image = br#"{"messages":[{"role":"user","content":[{"type":"image","source":{}}]}]}"#;
    assert_eq!(reason(identifier.resolve_messages(image, inputs)), FallbackReason::Multimodal);
    let image = br#"{"input":[{"role":"user","content":[{"type":"input_image","image_url":"x"}]}]}"#;
    assert_eq!(reason(identifier.resolve_responses(image, inputs)), FallbackReason::Multimodal);
    assert_eq!(reason(identifier.resolve_responses(b"[]", inputs)), FallbackReason::Malformed);
}

#[test]
fn requests_only_the_engine_can_resolve_are_unsupported() {
    let unsupported = |body: &str| of_messages(body).unwrap_err().reason() == FallbackReason::UnsupportedOption;
    assert!(unsupported(r#"{"messages":[{"role":"assistant","content":[{"type":"tool_use","name":"f"}]}]}"#));
    assert!(unsupported(
        r#"{"messages":[{"role":"system","content":[{"type":"tool_removal","tool":{"type":"tool_reference","name":"f"}}]}]}"#
    ));
    assert!(unsupported(
        r#"{"messages":[{"role":"assistant","content":[{"type":"tool_result","content":[{"type":"text","text":"a"}]}]}]}"#
    ));
    assert!(of_responses(r#"{"input":[{"type":"item_reference","id":"x"}]}"#).is_err());
    for truncation in [r#""auto""#, "null"] {
        let error = of_responses(&format!(r#"{{"input":"a","truncation":{truncation}}}"#)).unwrap_err();
        assert_eq!(error.reason(), FallbackReason::UnsupportedOption);
    }
    assert!(of_responses(r#"{"input":"a","truncation":"disabled"}"#).is_ok());
}

#[test]
fn tool_results_precede_user_text() {
    let body = r#"{"messages":[{"role":"user","content":[{"type":"text","text":"b"},{"type":"tool_result","tool_use_id":"t","content":"a"}]}]}"#;
    let expected = r#"{"messages":[{"role":"tool","content":"a","tool_call_id":"t"},{"role":"user","content":"b"}]}"#;
    assert_eq!(of_messages(body).unwrap(), expected);
}

#[test]
fn consecutive_assistant_items_merge_into_one_message() {
    let body = r#"{"input":[{"type":"reasoning","summary":[{"text":"why"}]},{"role":"assistant","content":"so"},{"type":"function_call","call_id":"c","name":"f","arguments":"{}"}]}"#;
    let expected = r#"{"messages":[{"role":"assistant","content":"so","reasoning":"why","tool_calls":[{"id":"c","type":"function","function":{"name":"f","arguments":"{}"}}]}]}"#;
    assert_eq!(of_responses(body).unwrap(), expected);
}

#[test]
fn unfinished_answer_is_continued() {
    let body = r#"{"input":[{"role":"user","content":"a"},{"type":"message","role":"assistant","status":"incomplete","content":[{"type":"output_text","text":"On"}]}]}"#;
    assert!(
        of_responses(body).unwrap().starts_with(r#"{"add_generation_prompt":false,"continue_final_message":true,"#)
    );
}

#[test]
fn system_turns_move_to_the_head_only_for_strict_templates() {
    let plain = "{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}";
    let strict = "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('first') }}{% endif %}{{ m.content }}{% endfor %}";
    let dated = "{{ strftime_now('%Y') }}{% for m in messages %}{{ m.content }}{% endfor %}";
    let tagged = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}";
    let merges = [plain, strict, dated, tagged].map(|template| template_traits(template).system_placement);
    assert_eq!(
        merges,
        [
            AllowedSystemPosition::Anywhere,
            AllowedSystemPosition::Head,
            AllowedSystemPosition::Head,
            AllowedSystemPosition::Head
        ]
    );
    let body = br#"{"system":"a","messages":[{"role":"user","content":"b"},{"role":"system","content":"c"}]}"#;
    let merged = messages::convert_request(
        body,
        ConversionTraits { system_placement: AllowedSystemPosition::Head, ..PERMISSIVE_TRAITS },
    )
    .unwrap();
    let expected = r#"{"messages":[{"role":"system","content":"ac"},{"role":"user","content":"b"}]}"#;
    assert_eq!(text_of(merged), expected);
}

#[test]
fn disabled_thinking_uses_the_effort_the_template_distinguishes() {
    let of = |template: &str| template_traits(template).no_thinking_effort;
    assert_eq!(of("{{ messages[0].content }}{{ reasoning_effort }}"), "none");
    assert_eq!(of("{{ messages[0].content }}{% if enable_thinking is false %}quick{% endif %}"), "none");
    assert_eq!(of("{{ messages[0].content }}"), "low");
    assert_eq!(of("{{ raise_exception('no') }}"), "low");
    assert_eq!(
        of("{% if reasoning_effort == 'none' %}{{ raise_exception('no') }}{% endif %}{{ reasoning_effort }}"),
        "low"
    );
}

#[test]
fn tool_schemas_default_to_type_object() {
    let tool = |schema: &str| {
        of_messages(&format!(r#"{{"messages":[],"tools":[{{"name":"f","input_schema":{schema}}}]}}"#)).unwrap()
    };
    assert!(tool("{}").contains(r#""parameters":{"type":"object"}"#));
    assert!(tool(r#"{"b":1,"a":{"type":"x"}}"#).contains(r#""parameters":{"b":1,"a":{"type":"x"},"type":"object"}"#));
    assert!(tool(r#"{"type":"x"}"#).contains(r#""parameters":{"type":"x"}"#));
    assert!(tool(r#"{ "type" : null }"#).contains(r#""parameters":{ "type" : null }"#));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// Conversion preserves every text and always yields a chat request.
    #[test]
    fn texts_survive_every_conversion(system in ".{0,20}", said in prop::collection::vec(".{1,20}", 1..5)) {
        let quoted = |text: &String| serde_json::to_string(text).unwrap();
        let blocks: Vec<String> = said.iter().map(|text| format!(r#"{{"type":"text","text":{}}}"#, quoted(text))).collect();
        let body = format!(r#"{{"system":{},"messages":[{{"role":"user","content":[{}]}}]}}"#, quoted(&system), blocks.join(","));
        let items: Vec<String> = said.iter().map(|text| format!(r#"{{"role":"user","content":{}}}"#, quoted(text))).collect();
        let input = format!(r#"{{"instructions":{},"input":[{}]}}"#, quoted(&system), items.join(","));
        for chat in [of_messages(&body).unwrap(), of_responses(&input).unwrap()] {
            let chat: serde_json::Value = serde_json::from_str(&chat).unwrap();
            let messages = chat["messages"].as_array().unwrap();
            let contents = messages.iter().flat_map(|message| match &message["content"] {
                serde_json::Value::Array(parts) => parts.iter().map(|part| part["text"].clone()).collect(),
                text => vec![text.clone()],
            });
            let texts: Vec<String> = contents.map(|text| text.as_str().unwrap().to_owned()).collect();
            let system = (!system.is_empty()).then(|| system.clone());
            let expected: Vec<String> = system.into_iter().chain(said.iter().cloned()).collect();
            prop_assert_eq!(texts, expected);
        }
    }

    /// Any body is either converted to a chat request or refused.
    #[test]
    fn conversion_never_panics_on_arbitrary_bodies(body in prop::collection::vec(any::<u8>(), 0..64), cut in 0..200_usize) {
        let whole = br#"{"input":[{"type":"function_call","call_id":"c","name":"f","arguments":"{}"}],"messages":[{"role":"user","content":[{"type":"tool_result","content":[{"type":"text"}]}]}],"tools":[]}"#;
        for body in [&body[..], &whole[..cut.min(whole.len())]] {
            let _ = messages::convert_request(body, ConversionTraits::default()).map(|converted| converted.chat().unwrap());
            let _ = responses::convert_request(body).map(|converted| converted.chat().unwrap());
        }
    }
}
