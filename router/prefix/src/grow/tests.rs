use std::path::{Path, PathBuf};
use std::sync::{LazyLock, OnceLock};

use proptest::prelude::*;
use serde_json::{Value, json};
use vocabulary::{Bytes, Namespace, RootKeys, Seed};

use super::*;
use crate::{ChatForm, Converted, IdentifierOptions, Limits, ModelFiles, ModelTextSource};

/// Every committed model with a tokenizer and a template, each loaded when a test first asks for it: most need one.
static MODELS: LazyLock<Vec<(PathBuf, OnceLock<Identifier>)>> = LazyLock::new(|| {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folders = std::fs::read_dir(root.join("testdata/models")).unwrap().map(|entry| entry.unwrap().path());
    let mut folders: Vec<PathBuf> = folders
        .filter(|path| path.join("tokenizer.json").exists() && path.join("chat_template.jinja").exists())
        .collect();
    folders.push(root.join("../../configs/models/tiny"));
    folders.sort();
    folders.into_iter().map(|path| (path, OnceLock::new())).collect()
});

fn models() -> impl Iterator<Item = (&'static str, &'static Identifier)> {
    MODELS.iter().map(|(path, loaded)| (name(path), loaded.get_or_init(|| load(path, None))))
}

fn name(folder: &Path) -> &str {
    folder.file_name().unwrap().to_str().unwrap()
}

fn load(folder: &Path, template: Option<&str>) -> Identifier {
    let mut files = ModelFiles::read(folder).unwrap();
    if let Some(template) = template {
        files.chat_template = Some(template.as_bytes().to_vec().into());
    }
    let text = ModelText::load(ModelTextSource::Files(files)).unwrap();
    let namespace = Namespace { model: "m".into(), revision: "".into(), tokenizer: "".into() };
    let limits = Limits::default();
    Identifier::new(IdentifierOptions { namespace, seed: Seed(7), block: Tokens(4), text: Some(text.into()), limits })
}

fn model(name: &str) -> &'static Identifier {
    let (path, loaded) = MODELS.iter().find(|(path, _)| path.ends_with(name)).unwrap();
    loaded.get_or_init(|| load(path, None))
}

fn trails() -> Trails {
    Trails::new(Bytes(1 << 20))
}

fn memory(trails: &Trails) -> Memory<'_> {
    Memory { trails, tenant: "t", session: Some(1) }
}

/// As a request is identified: from what is remembered, else as a whole. Both ways are compared.
fn checked(identifier: &Identifier, body: &str, memory: Memory<'_>, now: WallTime) -> Rung {
    checked_as(ChatForm::Chat, identifier, (body, now), memory)
}

fn checked_as(form: ChatForm, identifier: &Identifier, (body, now): (&str, WallTime), memory: Memory<'_>) -> Rung {
    let asked = Asked { keys: RootKeys::default(), now };
    let whole = identifier.conversation(form, body.as_bytes(), (asked, None)).prompt;
    let converted = identifier.converted(form, body.as_bytes());
    let layout = match &converted {
        None => ChatLayout::read(body.as_bytes()),
        Some(converted) => converted.as_ref().ok().map(Converted::layout),
    };
    match layout.and_then(|layout| identifier.grow(layout, asked, memory)) {
        Some(Grown { prompt, known, rung }) => {
            assert_eq!((prompt.identity, &prompt.detail), (whole.identity, &whole.detail), "{body}");
            assert_eq!(prompt.chain, whole.chain, "{body}");
            assert_eq!(prompt.tail(), whole.tail(), "{body}");
            assert!(known <= whole.chain.tokens && rung != Rung::Cold);
            rung
        }
        None => {
            let begun = layout.map(|layout| identifier.begin(layout, asked, None, memory).prompt);
            assert!(begun.is_none_or(|begun| begun == whole));
            Rung::Cold
        }
    }
}

fn step(identifier: &Identifier, body: &Value, memory: Memory<'_>) -> Rung {
    checked(identifier, &body.to_string(), memory, WallTime::default())
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

/// The same conversation in another endpoint's words.
fn worded(form: ChatForm, messages: &[Value]) -> Value {
    let body = json!({"model": "m", "max_tokens": 9});
    let (list, tools): (&str, Value) = match form {
        ChatForm::Chat => ("messages", tools()),
        ChatForm::Messages => ("messages", json!([{"name": "look", "description": "Looks", "input_schema": {}}])),
        ChatForm::Responses => {
            ("input", json!([{"type": "function", "name": "look", "parameters": {"type": "object"}}]))
        }
    };
    let mut body = body;
    body["tools"] = tools;
    body[list] = match form {
        ChatForm::Chat => messages.into(),
        ChatForm::Messages => messages.iter().map(of_messages).collect(),
        ChatForm::Responses => messages.iter().flat_map(of_responses).collect(),
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

/// Question, calls and their results, answer, question.
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

/// How the steps of `talk` up to these messages are known, by family.
#[track_caller]
fn check_rungs(talk: &[Value], ends: &[usize], expected: &[(&[&str], &str)]) {
    for (name, identifier) in models() {
        let trails = trails();
        let rungs = ends.iter().map(|end| step(identifier, &body(&talk[..*end]), memory(&trails)).into());
        let rungs: Vec<&str> = rungs.collect();
        let family = expected.iter().find(|(names, _)| names.contains(&name));
        let (_, expected) = family.unwrap_or_else(|| panic!("nothing is expected of {name}"));
        assert_eq!(rungs.join(" "), *expected, "{name}");
    }
}

/// Families that only append; Qwen's and others', which drop thoughts or move tools when a user speaks.
const APPENDING: &[&str] = &["tiny", "chatml", "llama_like", "phi4_mini", "deepseek_v31"];
const REWRITING: &[&str] = &["qwen_like", "glm45", "kimi_k2", "mistral_v7"];

#[test]
fn every_committed_family_is_gone_on_with_from_the_place_where_it_ended() {
    let expected: [(&[&str], &str); 6] = [
        (APPENDING, "cold session session session session"),
        (REWRITING, "cold session session segment session"),
        (&["deepseek_r1"], "cold segment segment segment segment"),
        (&["harmony"], "cold session session cold session"),
        // The system prompt is written with the newest question, for as long as it is the last message.
        (&["mistral_like"], "cold cold session cold cold"),
        // It refuses tools.
        (&["gemma3"], "cold cold cold cold cold"),
    ];
    check_rungs(&talk(), &[2, 4, 6, 8, 10], &expected);
}

#[test]
fn questions_and_answers_are_gone_on_with_from_the_last_answer_or_before_the_turn_that_is_rewritten() {
    let mut talk = vec![json!({"role": "system", "content": "You are kind."}), user("begin")];
    for n in 0..4 {
        talk.extend([json!({"role": "assistant", "content": format!("answer {n}")}), user(&format!("again {n}"))]);
    }
    let expected: [(&[&str], &str); 4] = [
        (APPENDING, "cold session session session session"),
        (&["gemma3"], "cold session session session session"),
        (REWRITING, "cold segment segment segment segment"),
        (&["deepseek_r1"], "cold segment segment segment segment"),
    ];
    let whole: (&[&str], &str) = (&["harmony", "mistral_like"], "cold cold cold cold cold");
    check_rungs(&talk, &[2, 4, 6, 8, 10], &[&expected[..], &[whole]].concat());
}

#[test]
fn conversations_in_the_words_of_other_endpoints_are_gone_on_with_as_well() {
    let of = |form, name: &str, ends: &[usize]| -> Vec<&str> {
        let (trails, talk) = (trails(), talk());
        let step = |end: &usize| {
            let body = worded(form, &talk[..*end]).to_string();
            checked_as(form, model(name), (&body, WallTime::default()), memory(&trails)).into()
        };
        ends.iter().map(step).collect()
    };
    for form in [ChatForm::Messages, ChatForm::Responses] {
        assert_eq!(
            of(form, "tiny", &[2, 4, 6, 8, 10]),
            ["cold", "session", "session", "session", "session"],
            "{form:?}"
        );
        let rewriting = ["cold", "session", "session", "segment", "session"];
        assert_eq!(of(form, "qwen_like", &[2, 4, 6, 8, 10]), rewriting, "{form:?}");
    }
}

#[test]
fn one_conversation_in_the_words_of_two_endpoints_is_two() {
    let (trails, tiny) = (trails(), model("tiny"));
    let known = |form, end: usize| {
        let body = worded(form, &talk()[..end]).to_string();
        checked_as(form, tiny, (&body, WallTime::default()), memory(&trails))
    };
    assert_eq!(known(ChatForm::Responses, 4), Rung::Cold);
    assert_eq!(known(ChatForm::Messages, 4), Rung::Cold, "their calls are shown in another order");
    assert_eq!(known(ChatForm::Chat, 4), Rung::Cold);
}

#[test]
fn what_a_template_takes_for_a_tools_answer_and_late_system_messages_change_nothing() {
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
            let trails = trails();
            for end in first..=talk.len() {
                step(identifier, &body(&talk[..end]), memory(&trails));
            }
        }
    }
}

#[test]
fn a_new_question_is_gone_on_with_before_the_turn_that_it_rewrites() {
    let (trails, talk) = (trails(), talk());
    let rungs = [2, 4, 6, 8, 10].map(|end| step(model("qwen_like"), &body(&talk[..end]), memory(&trails)));
    assert_eq!(rungs, [Rung::Cold, Rung::Session, Rung::Session, Rung::Segment, Rung::Session]);
    let rungs = [2, 4, 6, 8, 10].map(|end| step(model("tiny"), &body(&talk[..end]), memory(&trails)));
    assert_eq!(rungs, [Rung::Cold, Rung::Session, Rung::Session, Rung::Session, Rung::Session]);
}

#[test]
fn what_went_another_way_is_gone_on_with_where_it_was_the_same() {
    let (trails, talk) = (trails(), talk());
    let tiny = model("tiny");
    let unnamed = Memory { session: None, ..memory(&trails) };
    let long = "You are kind. ".repeat(60);
    let mut messages = talk;
    messages[0] = json!({"role": "system", "content": long});
    assert_eq!(step(tiny, &body(&messages[..2]), unnamed), Rung::Cold);
    assert_eq!(step(tiny, &body(&messages[..4]), unnamed), Rung::Leading);
    assert_eq!(step(tiny, &body(&messages[..8]), unnamed), Rung::Leading);
    assert_eq!(step(tiny, &body(&messages[..8]), unnamed), Rung::Leading, "asked again");
    assert_eq!(step(tiny, &body(&messages[..6]), unnamed), Rung::Segment, "shortened");
    messages[4] = user("no, wait");
    assert_eq!(step(tiny, &body(&messages[..5]), unnamed), Rung::Segment, "forked");
    messages[1] = user("another question");
    assert_eq!(step(tiny, &body(&messages[..2]), unnamed), Rung::Segment, "begins alike");
    messages[0] = json!({"role": "system", "content": long.replacen("kind", "rude", 1)});
    assert_eq!(step(tiny, &body(&messages[..2]), unnamed), Rung::Cold, "begins otherwise");
}

#[test]
fn conversations_that_part_before_a_lead_and_are_of_one_length_are_not_taken_for_each_other() {
    let (trails, tiny) = (trails(), model("tiny"));
    let unnamed = Memory { session: None, ..memory(&trails) };
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
fn whoever_may_not_share_a_conversation_does_not_find_it() {
    let (trails, tiny) = (trails(), model("tiny"));
    let text = body(&talk()[..4]).to_string();
    assert_eq!(checked(tiny, &text, memory(&trails), WallTime::default()), Rung::Cold);
    let layout = ChatLayout::read(text.as_bytes()).unwrap();
    let other = Memory { tenant: "u", ..memory(&trails) };
    assert!(tiny.grow(layout, Asked::default(), other).is_none());
    let keys = RootKeys { salt: Some("s"), ..RootKeys::default() };
    assert!(tiny.grow(layout, Asked { keys, now: WallTime::default() }, memory(&trails)).is_none());
    assert!(model("qwen_like").grow(layout, Asked::default(), memory(&trails)).is_none());
    assert!(tiny.grow(layout, Asked::default(), memory(&trails)).is_some());
}

#[test]
fn settings_that_decide_the_prompt_count_and_others_do_not_wherever_they_stand() {
    let (trails, tiny) = (trails(), model("tiny"));
    let messages = format!("{},{}", user(&"hi ".repeat(200)), json!({"role": "assistant", "content": "ho"}));
    let mut said = 0;
    let mut ask = |before: &str, after: &str| {
        said += 1;
        let body = format!(r#"{{{before}"messages":[{messages},{}]{after}}}"#, user(&format!("ha {said}")));
        checked(tiny, &body, memory(&trails), WallTime::default())
    };
    let tools = tools();
    let (first, last) = (format!(r#""tools":{tools},"#), format!(r#","tools":{tools}"#));
    assert_eq!(ask("", ""), Rung::Cold);
    assert_eq!(ask(r#""max_tokens":7,"model":"m","#, r#","stream":true"#), Rung::Segment);
    assert_eq!(ask("", &last), Rung::Cold);
    assert_eq!(ask(&first, r#","n":1"#), Rung::Segment, "at another place");
    assert_eq!(ask(&first, r#","add_generation_prompt":false"#), Rung::Cold);
    assert_eq!(ask(&first, &last), Rung::Cold, "twice: refused as a whole");
    assert_eq!(ask(&first, r#","messages":[]"#), Rung::Cold, "twice: refused as a whole");
    assert_eq!(ask("", r#","chat_template_kwargs":null"#), Rung::Cold);
    assert_eq!(ask("", ""), Rung::Segment, "still known");
}

#[test]
fn what_is_new_and_very_long_is_left_to_the_whole_way() {
    let (trails, tiny) = (trails(), model("tiny"));
    let long = |kilobytes: usize| user(&"hello there ".repeat(kilobytes * 1024 / 12));
    let said = json!({"role": "assistant", "content": "ho"});
    assert_eq!(step(tiny, &body(&[user("hi")]), memory(&trails)), Rung::Cold);
    assert_eq!(step(tiny, &body(&[user("hi"), said.clone(), long(100)]), memory(&trails)), Rung::Session);
    assert_eq!(step(tiny, &body(&[user("hi"), said, long(100), long(300)]), memory(&trails)), Rung::Cold);
}

#[test]
fn a_prompt_that_names_the_day_holds_for_that_day() {
    let (trails, llama) = (trails(), model("llama_like"));
    let at = |hours: i64| WallTime { unix_seconds: 1_700_000_000 / 86_400 * 86_400 + hours * 3600 };
    let talk = talk();
    let ask = |end: usize, hours| checked(llama, &body(&talk[..end]).to_string(), memory(&trails), at(hours));
    assert_eq!([ask(2, 1), ask(4, 23), ask(6, 24)], [Rung::Cold, Rung::Session, Rung::Cold]);
}

#[test]
fn a_prompt_that_tells_the_time_because_its_request_asks_for_it_leaves_nothing() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs/models/tiny");
    let list = "{% for m in messages %}<|im_start|>{{ m.role }}{{ m.content }}<|im_end|>{% endfor %}";
    let asked = load(&folder, Some(&format!("{{{{ strftime_now(format or '%d') }}}}{list}")));
    for (format, expected) in [("%d", Rung::Session), ("%H", Rung::Cold), ("%M", Rung::Cold)] {
        let trails = trails();
        let ask = |end: usize, minutes: i64| {
            let mut body = body(&talk()[..end]);
            body["chat_template_kwargs"] = json!({"format": format});
            checked(&asked, &body.to_string(), memory(&trails), WallTime { unix_seconds: 60 * minutes })
        };
        assert_eq!((ask(2, 1), ask(4, 75)), (Rung::Cold, expected), "{format}");
    }
}

#[test]
fn templates_that_count_look_back_or_tell_the_time_are_rendered_as_a_whole() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs/models/tiny");
    let list = "{% for m in messages %}<|im_start|>{{ m.role }}{{ m.content }}<|im_end|>{% endfor %}";
    let incremental = |template: &str| load(&folder, Some(template)).text().unwrap().windowing().is_some();
    assert!(incremental(list));
    assert!(incremental(&format!("{{{{ strftime_now('%d %b') }}}}{list}")));
    assert!(!incremental(&format!("{{{{ strftime_now('%d %H') }}}}{list}")));
    assert!(!incremental(&format!("{{{{ strftime_now('%' ~ 'H') }}}}{list}")));
    assert!(!incremental(&format!("{{{{ messages | length }}}}{list}")));
    assert!(!incremental(&list.replace("m.content", "m.content }}{{ loop.index")), "numbers its messages");
    assert!(!incremental(&list.replace("<|im_end|>", ".").replace("<|im_start|>", ":")), "nowhere to cut");
}

#[test]
fn a_conversation_that_takes_too_many_steps_of_the_template_is_refused_where_the_whole_is() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs/models/tiny");
    let limits = Limits { template_steps: 4000, ..Limits::default() };
    let text = ModelText::load_within(ModelTextSource::Folder(folder), limits).unwrap();
    let namespace = Namespace { model: "m".into(), revision: "".into(), tokenizer: "".into() };
    let text = Some(text.into());
    let few = Identifier::new(IdentifierOptions { namespace, seed: Seed(7), block: Tokens(4), text, limits });
    let (trails, mut messages) = (trails(), vec![user("begin")]);
    let (mut grown, mut refused) = (0, 0);
    while refused < 3 {
        messages.extend([json!({"role": "assistant", "content": "so"}), user("on")]);
        let rung = step(&few, &body(&messages), memory(&trails));
        let whole = few.chat(body(&messages).to_string().as_bytes(), Asked::default());
        grown += u32::from(rung == Rung::Session);
        refused += u32::from(whole.identity != Identity::Exact);
    }
    assert!(grown > 10, "{grown} were gone on with before");
}

#[test]
fn what_stands_before_the_messages_and_is_very_long_is_left_to_the_whole_way() {
    let tiny = model("tiny");
    let long = |kilobytes: usize| {
        let mut one = body(&talk()[..2]);
        one["tools"][0]["function"]["description"] = "Looks far. ".repeat(kilobytes * 1024 / 11).into();
        one
    };
    let is_shown = |kilobytes: usize| {
        let text = long(kilobytes).to_string();
        let layout = ChatLayout::read(text.as_bytes()).unwrap();
        let step = tiny.step(layout, Asked::default()).unwrap();
        let scan = Scan::from(layout.list(), 0, &[]).unwrap();
        let frame = Frame::of(&step, &ChatBody::parse(text.as_bytes()).unwrap(), &scan).unwrap();
        let before = Before { leads: [].into(), asked: scan::Asked::Never, last: Role::System };
        let new = &layout.list()[scan.messages[0].end..scan.end - 1];
        step.cut(&frame, (&before, Turn::Next), new, &layout.list()[scan.end..]).is_some()
    };
    assert_eq!((is_shown(200), is_shown(300)), (true, false));
}

#[test]
fn what_is_forgotten_is_computed_as_a_whole_and_remembered_anew() {
    let (trails, tiny) = (trails(), model("tiny"));
    let text = |end: usize| body(&talk()[..end]).to_string();
    let at = |end: usize| checked(tiny, &text(end), memory(&trails), WallTime::default());
    assert_eq!((at(2), at(4)), (Rung::Cold, Rung::Session));
    tiny.forget(ChatLayout::read(text(4).as_bytes()).unwrap(), Asked::default(), memory(&trails));
    assert!(trails.is_empty());
    assert_eq!((at(6), at(8)), (Rung::Cold, Rung::Session));
}

#[test]
fn the_least_used_go_when_there_are_too_many_bytes() {
    let tiny = model("tiny");
    let trails = Trails::new(Bytes(40_000));
    let ask = |n: u128| {
        let text = body(&[user(&format!("{n} {}", "and on ".repeat(200)))]);
        step(tiny, &text, Memory { trails: &trails, tenant: "t", session: Some(n) })
    };
    for n in 0..40 {
        assert_eq!(ask(n), Rung::Cold);
        assert_eq!(ask(0), Rung::Session, "used all the time");
        assert!(trails.bytes() <= Bytes(40_000));
    }
    assert!((2..30).contains(&trails.len()), "{}", trails.len());
    assert_eq!(ask(1), Rung::Cold);
    trails.clear();
    assert!(trails.is_empty() && trails.bytes() == Bytes(0));
}

#[test]
fn many_steps_take_little_memory_beside_the_blocks() {
    let (trails, tiny) = (trails(), model("tiny"));
    let mut messages = vec![user("begin")];
    for n in 0..150 {
        messages.extend([json!({"role": "assistant", "content": format!("answer {n}")}), user(&format!("again {n}"))]);
        let rung = step(tiny, &body(&messages), memory(&trails));
        assert_eq!(rung, if n == 0 { Rung::Cold } else { Rung::Session });
    }
    let whole = tiny.chat(body(&messages).to_string().as_bytes(), Asked::default());
    assert_eq!(trails.len(), 1);
    assert!(trails.bytes().0 < 16 * whole.chain.blocks().0 + (16 << 10), "{:?}", trails.bytes());
}

#[derive(Clone, Debug)]
enum Change {
    Grow(Vec<Value>),
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

fn change() -> impl Strategy<Value = Change> {
    prop_oneof![
        8 => turn().prop_map(Change::Grow),
        1 => (1..4usize).prop_map(Change::Shorten),
        1 => (0..12usize, message()).prop_map(|(at, message)| Change::Rewrite(at, message)),
        1 => (0..4usize).prop_map(Change::Settings),
    ]
}

/// Written with what clients differ in: where settings stand, white space, escapes.
fn written(messages: &[Value], settings: usize) -> String {
    let list: Vec<String> = messages.iter().map(Value::to_string).collect();
    let (list, tools) = (list.join(if settings.is_multiple_of(2) { "," } else { " ,\n " }), tools());
    match settings {
        0 => format!(r#"{{"messages":[{list}]}}"#),
        1 => format!(r#"{{ "tools" : {tools} , "messages" : [ {list} ] , "temperature": 1 }}"#),
        2 => format!(r#"{{"messages":[{list}],"tools":{tools},"chat_template_kwargs":{{"enable_thinking":false}}}}"#),
        _ => format!(r#"{{"messages":[{list}],"add_generation_prompt":false}}"#),
    }
}

fn differs_nowhere(form: ChatForm, first: Vec<Value>, changes: &[Change]) {
    let written = |messages: &[Value], settings| match form {
        ChatForm::Chat => written(messages, settings),
        _ => {
            let mut body = worded(form, messages);
            if settings == 2 {
                body["chat_template_kwargs"] = json!({"enable_thinking": false});
            }
            body.to_string()
        }
    };
    for (_, identifier) in models() {
        let trails = trails();
        let step = |body: &str| checked_as(form, identifier, (body, WallTime::default()), memory(&trails));
        let (mut messages, mut settings) = (first.clone(), 0);
        for change in changes {
            step(&written(&messages, settings));
            match change.clone() {
                Change::Grow(more) => messages.extend(more),
                Change::Shorten(by) => messages.truncate(messages.len().saturating_sub(by).max(1)),
                Change::Rewrite(at, message) if at < messages.len() => messages[at] = message,
                Change::Rewrite(..) => {}
                Change::Settings(other) => settings = other,
            }
            step(&written(&messages, settings));
        }
    }
}

/// As many as are asked for, else as many as a quick run has time for.
fn cases() -> u32 {
    std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(96)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(cases()))]

    #[test]
    fn incremental_prompts_equal_whole_ones(
        system in prop::option::of(text()),
        question in text(),
        changes in prop::collection::vec(change(), 1..10),
        form in prop::sample::select(vec![ChatForm::Chat, ChatForm::Chat, ChatForm::Messages, ChatForm::Responses]),
    ) {
        let system = system.map(|text| json!({"role": "system", "content": text}));
        differs_nowhere(form, system.into_iter().chain([user(&question)]).collect(), &changes);
    }
}
