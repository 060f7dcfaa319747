use std::path::{Path, PathBuf};
use std::sync::{LazyLock, OnceLock};

use proptest::prelude::*;
use serde_json::{Value, json};
use vocabulary::{Bytes, HashSeed, ModelNamespace, RequestNamespace};

use super::*;
use crate::{
    ChatEndpoint, ConvertedRequest, ModelFiles, ModelTokenizerSource, PromptResolverOptions, PromptWorkLimits,
};

/// Every committed model with a tokenizer and a template, loaded on first use because most tests need one.
static MODELS: LazyLock<Vec<(PathBuf, OnceLock<PromptResolver>)>> = LazyLock::new(|| {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folders = std::fs::read_dir(root.join("testdata/models")).unwrap().map(|entry| entry.unwrap().path());
    let mut folders: Vec<PathBuf> = folders
        .filter(|path| path.join("tokenizer.json").exists() && path.join("chat_template.jinja").exists())
        .collect();
    folders.push(root.join("../../configs/models/tiny"));
    folders.sort();
    folders.into_iter().map(|path| (path, OnceLock::new())).collect()
});

fn models() -> impl Iterator<Item = (&'static str, &'static PromptResolver)> {
    MODELS.iter().map(|(path, loaded)| (name(path), loaded.get_or_init(|| load(path, None))))
}

fn name(folder: &Path) -> &str {
    folder.file_name().unwrap().to_str().unwrap()
}

fn load(folder: &Path, template: Option<&str>) -> PromptResolver {
    let mut files = ModelFiles::read(folder).unwrap();
    if let Some(template) = template {
        files.chat_template = Some(template.as_bytes().to_vec().into());
    }
    let text = ModelTokenizer::load(ModelTokenizerSource::Files(files)).unwrap();
    let namespace = ModelNamespace { model: "m".into(), revision: "".into(), tokenizer: "".into() };
    let limits = PromptWorkLimits::default();
    PromptResolver::new(PromptResolverOptions {
        namespace,
        seed: HashSeed(7),
        block_size: Tokens(4),
        text: Some(text.into()),
        limits,
    })
}

fn model(name: &str) -> &'static PromptResolver {
    let (path, loaded) = MODELS.iter().find(|(path, _)| path.ends_with(name)).unwrap();
    loaded.get_or_init(|| load(path, None))
}

fn trails() -> ConversationCache {
    ConversationCache::new(Bytes(1 << 20))
}

fn memory(conversations: &ConversationCache) -> ConversationQuery<'_> {
    ConversationQuery { cache: conversations, tenant: "t", session: Some(1) }
}

/// Resolves a prompt from the cache, or in full, and compares both.
fn resolve_and_verify(
    resolver: &PromptResolver,
    body: &str,
    lookup: ConversationQuery<'_>,
    now: WallTime,
) -> LookupTier {
    resolve_and_verify_as(ChatEndpoint::Chat, resolver, (body, now), lookup)
}

fn resolve_and_verify_as(
    endpoint: ChatEndpoint,
    resolver: &PromptResolver,
    (body, now): (&str, WallTime),
    lookup: ConversationQuery<'_>,
) -> LookupTier {
    let inputs = ExtraPromptInputs { keys: RequestNamespace::default(), now };
    let whole = resolver.resolve_conversation(endpoint, body.as_bytes(), (inputs, None)).prompt;
    let converted = resolver.convert(endpoint, body.as_bytes());
    let layout = match &converted {
        None => ChatBodyLayout::read(body.as_bytes()),
        Some(converted) => converted.as_ref().ok().map(ConvertedRequest::layout),
    };
    match layout.and_then(|layout| resolver.extend(layout, inputs, lookup)) {
        Some(ExtendedPrompt { prompt, reused_tokens: known, tier: rung }) => {
            assert_eq!((prompt.identity, &prompt.detail), (whole.identity, &whole.detail), "{body}");
            assert_eq!(prompt.chain, whole.chain, "{body}");
            assert_eq!(prompt.tail(), whole.tail(), "{body}");
            assert!(known <= whole.chain.tokens && rung != LookupTier::Miss);
            rung
        }
        None => {
            let begun = layout.map(|layout| resolver.resolve_and_cache(layout, inputs, None, lookup).prompt);
            assert!(begun.is_none_or(|begun| begun == whole));
            LookupTier::Miss
        }
    }
}

fn step(resolver: &PromptResolver, body: &Value, lookup: ConversationQuery<'_>) -> LookupTier {
    resolve_and_verify(resolver, &body.to_string(), lookup, WallTime::default())
}

fn user(text: &str) -> Value {
    json!({"role": "user", "content": text})
}

fn call(id: &str) -> Value {
    json!({"role": "assistant", "content": "", "reasoning": "so", "tool_calls": [
        {"id": id, "type": "function", "function": {"name": "look", "arguments": "{\"at\":\"sea\"}"}}]})
}

fn result(id: &str, text: &str) -> Value {
    json!({"role": "tool", "tool_call_id": id, "content": text})
}

fn tools() -> Value {
    json!([{"type": "function", "function": {"name": "look", "description": "Looks", "parameters": {"type": "object"}}}])
}

fn body(messages: &[Value]) -> Value {
    json!({"model": "m", "messages": messages, "tools": tools()})
}

/// Writes the same conversation in another endpoint's format.
fn convert_body(endpoint: ChatEndpoint, messages: &[Value]) -> Value {
    let body = json!({"model": "m", "max_tokens": 9});
    let (list, tools): (&str, Value) = match endpoint {
        ChatEndpoint::Chat => ("messages", tools()),
        ChatEndpoint::Messages => ("messages", json!([{"name": "look", "description": "Looks", "input_schema": {}}])),
        ChatEndpoint::Responses => {
            ("input", json!([{"type": "function", "name": "look", "parameters": {"type": "object"}}]))
        }
    };
    let mut body = body;
    body["tools"] = tools;
    body[list] = match endpoint {
        ChatEndpoint::Chat => messages.into(),
        ChatEndpoint::Messages => messages.iter().map(of_messages).collect(),
        ChatEndpoint::Responses => messages.iter().flat_map(of_responses).collect(),
    };
    body
}

fn calls(message: &Value) -> impl Iterator<Item = &Value> {
    message["tool_calls"].as_array().into_iter().flatten()
}

fn of_messages(message: &Value) -> Value {
    let block = |text: &Value| json!({"type": "text", "text": text, "cache_control": {"type": "ephemeral"}});
    if message["role"] == "tool" {
        let result =
            json!({"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": message["content"]});
        return json!({"role": "user", "content": [result]});
    }
    let thought =
        message["reasoning"].as_str().map(|text| json!({"type": "thinking", "thinking": text, "signature": "s"}));
    let said = match &message["content"] {
        Value::Array(parts) => parts.iter().map(|part| block(&part["text"])).collect(),
        Value::String(text) => vec![block(&json!(text))],
        _ => Vec::new(),
    };
    let calls = calls(message).map(|call| {
        let input: Value = serde_json::from_str(call["function"]["arguments"].as_str().unwrap()).unwrap();
        json!({"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": input})
    });
    let blocks: Vec<Value> = thought.into_iter().chain(said).chain(calls).collect();
    json!({"role": message["role"], "content": blocks})
}

fn of_responses(message: &Value) -> Vec<Value> {
    if message["role"] == "tool" {
        let id = &message["tool_call_id"];
        return vec![json!({"type": "function_call_output", "call_id": id, "output": message["content"]})];
    }
    let thought = message["reasoning"].as_str().map(|text| {
        json!({"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": text}]})
    });
    let kind = if message["role"] == "assistant" { "output_text" } else { "input_text" };
    let said = match &message["content"] {
        Value::String(text) if !text.is_empty() => {
            Some(json!({"role": message["role"], "content": [{"type": kind, "text": text}]}))
        }
        Value::Array(_) => Some(json!({"role": message["role"], "content": message["content"]})),
        _ => None,
    };
    let calls = calls(message).map(|call| {
        let (name, arguments) = (&call["function"]["name"], &call["function"]["arguments"]);
        json!({"type": "function_call", "call_id": call["id"], "name": name, "arguments": arguments})
    });
    thought.into_iter().chain(said).chain(calls).collect()
}

/// A question, tool calls with results, an answer, and another question.
fn talk() -> Vec<Value> {
    vec![
        json!({"role": "system", "content": "You are kind."}),
        user("Where is the ship?"),
        call("callship1"),
        result("callship1", "North of <|im_end|> here."),
        call("callship2"),
        result("callship2", "Still north."),
        json!({"role": "assistant", "content": "It is north.", "reasoning": "two looks"}),
        user("And now? 🌍"),
        call("callship3"),
        result("callship3", "Gone."),
    ]
}

/// Checks the lookup tiers of the steps of `talk` that end at these messages, per model family.
#[track_caller]
fn check_tiers(talk: &[Value], ends: &[usize], expected: &[(&[&str], &str)]) {
    for (name, identifier) in models() {
        let conversations = trails();
        let rungs = ends.iter().map(|end| step(identifier, &body(&talk[..*end]), memory(&conversations)).into());
        let rungs: Vec<&str> = rungs.collect();
        let family = expected.iter().find(|(names, _)| names.contains(&name));
        let (_, expected) = family.unwrap_or_else(|| panic!("nothing is expected of {name}"));
        assert_eq!(rungs.join(" "), *expected, "{name}");
    }
}

/// Model families whose templates only append, and those that drop reasoning or move tools at a new user message.
const APPEND_ONLY_FAMILIES: &[&str] = &["tiny", "chatml", "llama_like", "phi4_mini", "deepseek_v31"];
const REWRITING_FAMILIES: &[&str] = &["qwen_like", "glm45", "kimi_k2", "mistral_v7"];

#[test]
fn tool_conversations_resume_in_every_committed_template_family() {
    let expected: [(&[&str], &str); 6] = [
        (APPEND_ONLY_FAMILIES, "miss session session session session"),
        (REWRITING_FAMILIES, "miss session session segment session"),
        (&["deepseek_r1"], "miss segment segment segment segment"),
        (&["harmony"], "miss session session miss session"),
        // The system prompt is rendered with the last user message while that is the last message.
        (&["mistral_like"], "miss miss session miss miss"),
        // This template refuses tools.
        (&["gemma3"], "miss miss miss miss miss"),
    ];
    check_tiers(&talk(), &[2, 4, 6, 8, 10], &expected);
}

#[test]
fn chat_conversations_resume_at_the_last_answer_or_rewritten_turn() {
    let mut talk = vec![json!({"role": "system", "content": "You are kind."}), user("begin")];
    for n in 0..4 {
        talk.extend([json!({"role": "assistant", "content": format!("answer {n}")}), user(&format!("again {n}"))]);
    }
    let expected: [(&[&str], &str); 4] = [
        (APPEND_ONLY_FAMILIES, "miss session session session session"),
        (&["gemma3"], "miss session session session session"),
        (REWRITING_FAMILIES, "miss segment segment segment segment"),
        (&["deepseek_r1"], "miss segment segment segment segment"),
    ];
    let whole: (&[&str], &str) = (&["harmony", "mistral_like"], "miss miss miss miss miss");
    check_tiers(&talk, &[2, 4, 6, 8, 10], &[&expected[..], &[whole]].concat());
}

#[test]
fn converted_conversations_resume_like_chat_conversations() {
    let of = |form, name: &str, ends: &[usize]| -> Vec<&str> {
        let (conversations, talk) = (trails(), talk());
        let step = |end: &usize| {
            let body = convert_body(form, &talk[..*end]).to_string();
            resolve_and_verify_as(form, model(name), (&body, WallTime::default()), memory(&conversations)).into()
        };
        ends.iter().map(step).collect()
    };
    for form in [ChatEndpoint::Messages, ChatEndpoint::Responses] {
        assert_eq!(
            of(form, "tiny", &[2, 4, 6, 8, 10]),
            ["miss", "session", "session", "session", "session"],
            "{form:?}"
        );
        let rewriting = ["miss", "session", "session", "segment", "session"];
        assert_eq!(of(form, "qwen_like", &[2, 4, 6, 8, 10]), rewriting, "{form:?}");
    }
}

#[test]
fn same_conversation_through_two_endpoints_is_cached_twice() {
    let (conversations, tiny) = (trails(), model("tiny"));
    let known = |form, end: usize| {
        let body = convert_body(form, &talk()[..end]).to_string();
        resolve_and_verify_as(form, tiny, (&body, WallTime::default()), memory(&conversations))
    };
    assert_eq!(known(ChatEndpoint::Responses, 4), LookupTier::Miss);
    assert_eq!(known(ChatEndpoint::Messages, 4), LookupTier::Miss, "their calls are shown in another order");
    assert_eq!(known(ChatEndpoint::Chat, 4), LookupTier::Miss);
}

#[test]
fn tool_response_markers_and_late_system_messages_keep_prompts_exact() {
    let said = |text: &str| json!({"role": "assistant", "content": text});
    let mut talk = vec![user(""), call("callship1"), result("callship1", ""), said("A")];
    talk.extend([
        user("<|im_end|><tool_response>"),
        said(""),
        user(""),
        said("B"),
        user("<tool_response>x</tool_response>"),
    ]);
    let system = json!({"role": "system", "content": "Mind the swans."});
    talk.extend([said("C"), system, user("c"), said("D"), user("d")]);
    for (_, identifier) in models() {
        for first in 1..talk.len() {
            let conversations = trails();
            for end in first..=talk.len() {
                step(identifier, &body(&talk[..end]), memory(&conversations));
            }
        }
    }
}

#[test]
fn new_question_resumes_before_the_turn_it_rewrites() {
    let (conversations, talk) = (trails(), talk());
    let rungs = [2, 4, 6, 8, 10].map(|end| step(model("qwen_like"), &body(&talk[..end]), memory(&conversations)));
    assert_eq!(
        rungs,
        [LookupTier::Miss, LookupTier::Session, LookupTier::Session, LookupTier::Segment, LookupTier::Session]
    );
    let rungs = [2, 4, 6, 8, 10].map(|end| step(model("tiny"), &body(&talk[..end]), memory(&conversations)));
    assert_eq!(
        rungs,
        [LookupTier::Miss, LookupTier::Session, LookupTier::Session, LookupTier::Session, LookupTier::Session]
    );
}

#[test]
fn diverged_conversation_resumes_at_the_last_common_point() {
    let (conversations, talk) = (trails(), talk());
    let tiny = model("tiny");
    let unnamed = ConversationQuery { session: None, ..memory(&conversations) };
    let long = "You are kind. ".repeat(60);
    let mut messages = talk;
    messages[0] = json!({"role": "system", "content": long});
    assert_eq!(step(tiny, &body(&messages[..2]), unnamed), LookupTier::Miss);
    assert_eq!(step(tiny, &body(&messages[..4]), unnamed), LookupTier::Leading);
    assert_eq!(step(tiny, &body(&messages[..8]), unnamed), LookupTier::Leading);
    assert_eq!(step(tiny, &body(&messages[..8]), unnamed), LookupTier::Leading, "asked again");
    assert_eq!(step(tiny, &body(&messages[..6]), unnamed), LookupTier::Segment, "shortened");
    messages[4] = user("no, wait");
    assert_eq!(step(tiny, &body(&messages[..5]), unnamed), LookupTier::Segment, "forked");
    messages[1] = user("another question");
    assert_eq!(step(tiny, &body(&messages[..2]), unnamed), LookupTier::Segment, "begins alike");
    messages[0] = json!({"role": "system", "content": long.replacen("kind", "rude", 1)});
    assert_eq!(step(tiny, &body(&messages[..2]), unnamed), LookupTier::Miss, "begins otherwise");
}

#[test]
fn equally_long_conversations_diverging_before_a_lead_stay_distinct() {
    let (conversations, tiny) = (trails(), model("tiny"));
    let unnamed = ConversationQuery { session: None, ..memory(&conversations) };
    let talk = |letter: &str| -> Vec<Value> {
        let turn = |role: &str, length| json!({"role": role, "content": letter.repeat(length)});
        let system = json!({"role": "system", "content": "s".repeat(600)});
        vec![system, turn("user", 60), turn("assistant", 60), turn("user", 300), turn("assistant", 9), turn("user", 9)]
    };
    let (one, other) = (talk("a"), talk("b"));
    for (messages, end) in [(&one, 2), (&one, 4), (&other, 4), (&one, 6), (&other, 6)] {
        step(tiny, &body(&messages[..end]), unnamed);
    }
}

#[test]
fn conversations_are_not_shared_across_tenants_salts_or_models() {
    let (conversations, tiny) = (trails(), model("tiny"));
    let text = body(&talk()[..4]).to_string();
    assert_eq!(resolve_and_verify(tiny, &text, memory(&conversations), WallTime::default()), LookupTier::Miss);
    let layout = ChatBodyLayout::read(text.as_bytes()).unwrap();
    let other = ConversationQuery { tenant: "u", ..memory(&conversations) };
    assert!(tiny.extend(layout, ExtraPromptInputs::default(), other).is_none());
    let keys = RequestNamespace { salt: Some("s"), ..RequestNamespace::default() };
    assert!(
        tiny.extend(layout, ExtraPromptInputs { keys, now: WallTime::default() }, memory(&conversations)).is_none()
    );
    assert!(model("qwen_like").extend(layout, ExtraPromptInputs::default(), memory(&conversations)).is_none());
    assert!(tiny.extend(layout, ExtraPromptInputs::default(), memory(&conversations)).is_some());
}

#[test]
fn only_prompt_relevant_settings_invalidate_a_cached_conversation() {
    let (conversations, tiny) = (trails(), model("tiny"));
    let messages = format!("{},{}", user(&"hi ".repeat(200)), json!({"role": "assistant", "content": "ho"}));
    let mut said = 0;
    let mut ask = |before: &str, after: &str| {
        said += 1;
        let body = format!(r#"{{{before}"messages":[{messages},{}]{after}}}"#, user(&format!("ha {said}")));
        resolve_and_verify(tiny, &body, memory(&conversations), WallTime::default())
    };
    let tools = tools();
    let (first, last) = (format!(r#""tools":{tools},"#), format!(r#","tools":{tools}"#));
    assert_eq!(ask("", ""), LookupTier::Miss);
    assert_eq!(ask(r#""max_tokens":7,"model":"m","#, r#","stream":true"#), LookupTier::Segment);
    assert_eq!(ask("", &last), LookupTier::Miss);
    assert_eq!(ask(&first, r#","n":1"#), LookupTier::Segment, "at another place");
    assert_eq!(ask(&first, r#","add_generation_prompt":false"#), LookupTier::Miss);
    assert_eq!(ask(&first, &last), LookupTier::Miss, "twice: refused as a whole");
    assert_eq!(ask(&first, r#","messages":[]"#), LookupTier::Miss, "twice: refused as a whole");
    assert_eq!(ask("", r#","chat_template_kwargs":null"#), LookupTier::Miss);
    assert_eq!(ask("", ""), LookupTier::Segment, "still known");
}

#[test]
fn very_long_new_messages_are_computed_in_full() {
    let (conversations, tiny) = (trails(), model("tiny"));
    let long = |kilobytes: usize| user(&"hello there ".repeat(kilobytes * 1024 / 12));
    let message = json!({"role": "assistant", "content": "ho"});
    assert_eq!(step(tiny, &body(&[user("hi")]), memory(&conversations)), LookupTier::Miss);
    assert_eq!(
        step(tiny, &body(&[user("hi"), message.clone(), long(100)]), memory(&conversations)),
        LookupTier::Session
    );
    assert_eq!(
        step(tiny, &body(&[user("hi"), message, long(100), long(300)]), memory(&conversations)),
        LookupTier::Miss
    );
}

#[test]
fn dated_prompt_is_reused_only_on_the_same_day() {
    let (conversations, llama) = (trails(), model("llama_like"));
    let at = |hours: i64| WallTime { unix_seconds: 1_700_000_000 / 86_400 * 86_400 + hours * 3600 };
    let talk = talk();
    let ask = |end: usize, hours| {
        resolve_and_verify(llama, &body(&talk[..end]).to_string(), memory(&conversations), at(hours))
    };
    assert_eq!([ask(2, 1), ask(4, 23), ask(6, 24)], [LookupTier::Miss, LookupTier::Session, LookupTier::Miss]);
}

#[test]
fn prompt_with_a_time_requested_by_the_client_is_not_cached() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs/models/tiny");
    let list = "{% for m in messages %}<|im_start|>{{ m.role }}{{ m.content }}<|im_end|>{% endfor %}";
    let asked = load(&folder, Some(&format!("{{{{ strftime_now(format or '%d') }}}}{list}")));
    for (format, expected) in [("%d", LookupTier::Session), ("%H", LookupTier::Miss), ("%M", LookupTier::Miss)] {
        let conversations = trails();
        let ask = |end: usize, minutes: i64| {
            let mut body = body(&talk()[..end]);
            body["chat_template_kwargs"] = json!({"format": format});
            resolve_and_verify(
                &asked,
                &body.to_string(),
                memory(&conversations),
                WallTime { unix_seconds: 60 * minutes },
            )
        };
        assert_eq!((ask(2, 1), ask(4, 75)), (LookupTier::Miss, expected), "{format}");
    }
}

#[test]
fn templates_that_count_or_print_the_time_disable_incremental_rendering() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs/models/tiny");
    let list = "{% for m in messages %}<|im_start|>{{ m.role }}{{ m.content }}<|im_end|>{% endfor %}";
    let incremental = |template: &str| load(&folder, Some(template)).text().unwrap().incremental_rendering().is_some();
    assert!(incremental(list));
    assert!(incremental(&format!("{{{{ strftime_now('%d %b') }}}}{list}")));
    assert!(!incremental(&format!("{{{{ strftime_now('%d %H') }}}}{list}")));
    assert!(!incremental(&format!("{{{{ strftime_now('%' ~ 'H') }}}}{list}")));
    assert!(!incremental(&format!("{{{{ messages | length }}}}{list}")));
    assert!(!incremental(&list.replace("m.content", "m.content }}{{ loop.index")), "numbers its messages");
    assert!(!incremental(&list.replace("<|im_end|>", ".").replace("<|im_start|>", ":")), "nowhere to cut");
}

#[test]
fn template_step_limit_applies_to_incremental_rendering() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs/models/tiny");
    let limits = PromptWorkLimits { template_steps: 4000, ..PromptWorkLimits::default() };
    let text = ModelTokenizer::load_with_limits(ModelTokenizerSource::Folder(folder), limits).unwrap();
    let namespace = ModelNamespace { model: "m".into(), revision: "".into(), tokenizer: "".into() };
    let text = Some(text.into());
    let few = PromptResolver::new(PromptResolverOptions {
        namespace,
        seed: HashSeed(7),
        block_size: Tokens(4),
        text,
        limits,
    });
    let (conversations, mut messages) = (trails(), vec![user("begin")]);
    let (mut grown, mut refused) = (0, 0);
    while refused < 3 {
        messages.extend([json!({"role": "assistant", "content": "so"}), user("on")]);
        let tier = step(&few, &body(&messages), memory(&conversations));
        let whole = few.resolve_chat(body(&messages).to_string().as_bytes(), ExtraPromptInputs::default());
        grown += u32::from(tier == LookupTier::Session);
        refused += u32::from(whole.identity != PromptIdentity::Exact);
    }
    assert!(grown > 10, "{grown} were gone on with before");
}

#[test]
fn very_long_tool_definitions_are_rendered_in_full() {
    let tiny = model("tiny");
    let long = |kilobytes: usize| {
        let mut one = body(&talk()[..2]);
        one["tools"][0]["function"]["description"] = "Looks far. ".repeat(kilobytes * 1024 / 11).into();
        one
    };
    let is_shown = |kilobytes: usize| {
        let text = long(kilobytes).to_string();
        let layout = ChatBodyLayout::read(text.as_bytes()).unwrap();
        let step = tiny.extend_request(layout, ExtraPromptInputs::default()).unwrap();
        let scan = MessageScan::from_offset(layout.message_list(), 0, &[]).unwrap();
        let frame = ConversationSetup::of(&step, &ChatBody::parse(text.as_bytes()).unwrap(), &scan).unwrap();
        let before = HistorySummary {
            leading_roles: [].into(),
            question: message_scan::QuestionState::Never,
            last_role: MessageRole::System,
        };
        let new = &layout.message_list()[scan.messages[0].end..scan.end - 1];
        step.cut(&frame, (&before, TurnContinuation::Next), new, &layout.message_list()[scan.end..]).is_some()
    };
    assert_eq!((is_shown(200), is_shown(300)), (true, false));
}

#[test]
fn forgotten_conversation_is_computed_in_full_and_cached_again() {
    let (conversations, tiny) = (trails(), model("tiny"));
    let text = |end: usize| body(&talk()[..end]).to_string();
    let at = |end: usize| resolve_and_verify(tiny, &text(end), memory(&conversations), WallTime::default());
    assert_eq!((at(2), at(4)), (LookupTier::Miss, LookupTier::Session));
    tiny.forget(
        ChatBodyLayout::read(text(4).as_bytes()).unwrap(),
        ExtraPromptInputs::default(),
        memory(&conversations),
    );
    assert!(conversations.is_empty());
    assert_eq!((at(6), at(8)), (LookupTier::Miss, LookupTier::Session));
}

#[test]
fn least_recently_used_conversations_are_evicted_at_the_byte_limit() {
    let tiny = model("tiny");
    let conversations = ConversationCache::new(Bytes(40_000));
    let ask = |n: u128| {
        let text = body(&[user(&format!("{n} {}", "and on ".repeat(200)))]);
        step(tiny, &text, ConversationQuery { cache: &conversations, tenant: "t", session: Some(n) })
    };
    for n in 0..40 {
        assert_eq!(ask(n), LookupTier::Miss);
        assert_eq!(ask(0), LookupTier::Session, "used all the time");
        assert!(conversations.memory_bytes() <= Bytes(40_000));
    }
    assert!((2..30).contains(&conversations.len()), "{}", conversations.len());
    assert_eq!(ask(1), LookupTier::Miss);
    conversations.clear();
    assert!(conversations.is_empty() && conversations.memory_bytes() == Bytes(0));
}

#[test]
fn long_conversation_needs_little_memory_beyond_its_blocks() {
    let (conversations, tiny) = (trails(), model("tiny"));
    let mut messages = vec![user("begin")];
    for n in 0..150 {
        messages.extend([json!({"role": "assistant", "content": format!("answer {n}")}), user(&format!("again {n}"))]);
        let tier = step(tiny, &body(&messages), memory(&conversations));
        assert_eq!(tier, if n == 0 { LookupTier::Miss } else { LookupTier::Session });
    }
    let whole = tiny.resolve_chat(body(&messages).to_string().as_bytes(), ExtraPromptInputs::default());
    assert_eq!(conversations.len(), 1);
    assert!(
        conversations.memory_bytes().0 < 16 * whole.chain.blocks().0 + (16 << 10),
        "{:?}",
        conversations.memory_bytes()
    );
}

#[derive(Clone, Debug)]
enum ConversationEdit {
    Extend(Vec<Value>),
    Shorten(usize),
    Rewrite(usize, Value),
    Settings(usize),
}

fn text() -> impl Strategy<Value = String> {
    "\\PC{0,20}|(<\\|im_end\\|>|<think>|</think>|</?tool_response>|tool_response|/nothink|\\[/INST\\]|<\\|eot_id\\|>|\\s|[a-z]{1,8} |\"|\\\\){0,6}"
}

fn message() -> impl Strategy<Value = Value> {
    let roles = prop::sample::select(vec!["user", "user", "assistant", "tool", "system"]);
    (roles, text(), 0..8u8).prop_map(|(role, text, kind)| match (role, kind) {
        ("assistant", 0..3) => call("callship1"),
        ("assistant", 3) => json!({"role": role, "content": text, "reasoning": "hm"}),
        ("tool", _) => result("callship1", &text),
        (_, 4) => json!({"role": role, "content": [{"type": "text", "text": text}, {"type": "text", "text": "b"}]}),
        (_, 5) => json!({"role": role, "content": text, "name": "n"}),
        (_, 6) => json!({"role": role, "content": Value::Null}),
        (_, 7) => json!({"role": role, "content": [{"type": "text", "text": text}]}),
        _ => json!({"role": role, "content": text}),
    })
}

fn turn() -> impl Strategy<Value = Vec<Value>> {
    let said = |text: String| json!({"role": "assistant", "content": text});
    prop_oneof![
        4 => (text(), text()).prop_map(move |(a, b)| vec![said(a), user(&b)]),
        4 => text().prop_map(|a| vec![call("callship1"), result("callship1", &a)]),
        1 => prop::collection::vec(message(), 0..3),
    ]
}

fn change() -> impl Strategy<Value = ConversationEdit> {
    prop_oneof![
        8 => turn().prop_map(ConversationEdit::Extend),
        1 => (1..4usize).prop_map(ConversationEdit::Shorten),
        1 => (0..12usize, message()).prop_map(|(at, message)| ConversationEdit::Rewrite(at, message)),
        1 => (0..4usize).prop_map(ConversationEdit::Settings),
    ]
}

/// Formats a body with differences between clients: position of settings, white space, escapes.
fn vary_formatting(messages: &[Value], settings: usize) -> String {
    let list: Vec<String> = messages.iter().map(Value::to_string).collect();
    let (list, tools) = (list.join(if settings.is_multiple_of(2) { "," } else { " ,\n " }), tools());
    match settings {
        0 => format!(r#"{{"messages":[{list}]}}"#),
        1 => format!(r#"{{ "tools" : {tools} , "messages" : [ {list} ] , "temperature": 1 }}"#),
        2 => format!(r#"{{"messages":[{list}],"tools":{tools},"chat_template_kwargs":{{"enable_thinking":false}}}}"#),
        _ => format!(r#"{{"messages":[{list}],"add_generation_prompt":false}}"#),
    }
}

fn all_variants_agree(endpoint: ChatEndpoint, first: Vec<Value>, changes: &[ConversationEdit]) {
    let written = |messages: &[Value], settings| match endpoint {
        ChatEndpoint::Chat => vary_formatting(messages, settings),
        _ => {
            let mut body = convert_body(endpoint, messages);
            if settings == 2 {
                body["chat_template_kwargs"] = json!({"enable_thinking": false});
            }
            body.to_string()
        }
    };
    for (_, identifier) in models() {
        let conversations = trails();
        let step = |body: &str| {
            resolve_and_verify_as(endpoint, identifier, (body, WallTime::default()), memory(&conversations))
        };
        let (mut messages, mut settings) = (first.clone(), 0);
        for change in changes {
            step(&written(&messages, settings));
            match change.clone() {
                ConversationEdit::Extend(more) => messages.extend(more),
                ConversationEdit::Shorten(by) => messages.truncate(messages.len().saturating_sub(by).max(1)),
                ConversationEdit::Rewrite(at, message) if at < messages.len() => messages[at] = message,
                ConversationEdit::Rewrite(..) => {}
                ConversationEdit::Settings(other) => settings = other,
            }
            step(&written(&messages, settings));
        }
    }
}

/// Number of cases: `PROPTEST_CASES`, or 96 for a quick run.
fn cases() -> u32 {
    std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(96)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(cases()))]

    #[test]
    fn incremental_prompts_equal_full_prompts(
        system in prop::option::of(text()),
        question in text(),
        changes in prop::collection::vec(change(), 1..10),
        form in prop::sample::select(vec![ChatEndpoint::Chat, ChatEndpoint::Chat, ChatEndpoint::Messages, ChatEndpoint::Responses]),
    ) {
        let system = system.map(|text| json!({"role": "system", "content": text}));
        all_variants_agree(form, system.into_iter().chain([user(&question)]).collect(), &changes);
    }
}
