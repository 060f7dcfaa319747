use proptest::prelude::*;

use super::*;
use crate::engine_api::answer::tests::recorded;
use vocabulary::Tokens;

/// Feeds `chunks`; returns everything forwarded, and the scanner.
fn read(mut scanner: SseFilter, chunks: &[&[u8]]) -> (Vec<u8>, SseFilter) {
    let mut out = Vec::new();
    for chunk in chunks {
        scanner.push(Bytes::copy_from_slice(chunk), &mut out).unwrap();
    }
    out.extend(scanner.finish());
    (out.concat(), scanner)
}

/// Returns whether no incomplete event is buffered and none was refused.
fn is_at_boundary(scanner: &SseFilter) -> bool {
    scanner.tail.is_empty() && scanner.refusal.is_none()
}

#[test]
fn recorded_stream_is_parsed() {
    let stream = recorded("D chat stream");
    let (out, scanner) = read(SseFilter::new(), &[&stream]);
    assert_eq!(out, stream);
    let facts = scanner.facts();
    assert_eq!(facts.id.as_deref(), Some("chatcmpl-b7f778f69d40dc66"));
    assert_eq!((facts.finish.as_deref(), facts.done, facts.unread_events), (Some("length"), true, 0));
    let usage = TokenUsage { prompt: Tokens(218), completion: Tokens(16), cached: Some(Tokens(0)) };
    assert_eq!(facts.usage, Some(usage));
    assert!((14..=16).contains(&facts.outputs), "{} outputs", facts.outputs);
    assert!(facts.ended() && is_at_boundary(&scanner));
}

#[test]
fn only_the_usage_event_is_hidden() {
    let stream = recorded("D chat stream");
    let (out, scanner) = read(SseFilter::hiding_usage(), &[&stream]);
    let text = std::str::from_utf8(&stream).unwrap();
    let kept: String = text.split_inclusive("\n\n").filter(|event| !event.contains("\"choices\":[]")).collect();
    assert!(kept.len() < text.len());
    assert_eq!(String::from_utf8(out).unwrap(), kept);
    assert!(scanner.facts().usage.is_some());
}

#[test]
fn whole_chunks_are_forwarded_without_a_copy() {
    let stream = recorded("D chat stream");
    for mut scanner in [SseFilter::new(), SseFilter::hiding_usage()] {
        let mut out = Vec::new();
        scanner.push(stream.clone(), &mut out).unwrap();
        assert!(out.iter().all(|slice| stream.as_ptr_range().contains(&slice.as_ptr())));
        assert!(out.len() <= 2, "neighbours are one slice");
    }
}

#[test]
fn partial_event_is_buffered_until_complete() {
    for mut scanner in [SseFilter::new(), SseFilter::hiding_usage()] {
        let mut out = Vec::new();
        scanner.push(Bytes::from("data: {\"choices\":[]}\n\ndata: {\"cho"), &mut out).unwrap();
        assert_eq!(out.concat(), b"data: {\"choices\":[]}\n\n");
        assert_eq!(scanner.finish().as_deref(), Some(&b"data: {\"cho"[..]));
        assert!(is_at_boundary(&scanner));
    }
}

#[test]
fn boundaries_lie_only_between_events() {
    let mut scanner = SseFilter::new();
    let mut out = Vec::new();
    for (chunk, at_boundary) in
        [("data: {}\n", false), ("\n", true), (": comment\r\n", false), ("\r\n", true), ("data: [DO", false)]
    {
        scanner.push(Bytes::from(chunk), &mut out).unwrap();
        assert_eq!(is_at_boundary(&scanner), at_boundary, "after {chunk:?}");
    }
    assert!(!scanner.facts().ended());
}

#[test]
fn engine_errors_and_broken_events_are_distinguished() {
    let stream = b"data: {\"error\":{\"message\":\"out of blocks\",\"code\":500}}\n\ndata: {broken\n\nevent: ping\n\n";
    let (_, scanner) = read(SseFilter::new(), &[stream]);
    assert_eq!((scanner.facts().error.as_deref(), scanner.facts().unread_events), (Some("out of blocks"), 1));
    assert!(scanner.facts().ended() && !scanner.facts().done);
}

#[test]
fn every_kind_of_output_is_counted() {
    let output = |choice: &str| {
        let event = format!("data:{{\"choices\":[{choice}]}}\n\n");
        read(SseFilter::new(), &[event.as_bytes()]).1.facts().outputs
    };
    assert_eq!(output(r#"{"delta":{"role":"assistant","content":""},"finish_reason":null}"#), 0);
    for choice in [
        r#"{"delta":{"content":"x"}}"#,
        r#"{"text":" "}"#,
        r#"{"delta":{"tool_calls":[{"index":0}]}}"#,
        r#"{"delta":{"reasoning_content":"hm"}}"#,
        r#"{"delta":{"reasoning":"hm"}}"#,
    ] {
        assert_eq!(output(choice), 1, "{choice}");
    }
    let several = b"data:{\"choices\":[{\"text\":\"several tokens at once\"},{\"delta\":{\"content\":\"two\"}}]}\n\n";
    let facts = read(SseFilter::new(), &[several]).1.facts().clone();
    assert_eq!((facts.outputs, facts.text), (1, 25), "an event may hold many tokens");
}

/// A named event, as `/v1/messages` and `/v1/responses` write them.
fn named(name: &str, fields: &str) -> String {
    format!("event: {name}\ndata: {{\"type\":\"{name}\"{fields}}}\n\n")
}

#[test]
fn messages_and_responses_streams_are_parsed() {
    let usage = r#"{"input_tokens":20,"output_tokens":5,"cache_read_input_tokens":32}"#;
    let messages = [
        named("message_start", r#","message":{"id":"chatcmpl-1","usage":{"input_tokens":52,"output_tokens":0}}"#),
        named("content_block_delta", r#","index":0,"delta":{"type":"text_delta","text":"a"}"#),
        named("message_delta", &format!(r#","delta":{{"stop_reason":"end_turn"}},"usage":{usage}"#)),
        named("message_stop", ""),
    ];
    let usage = r#"{"input_tokens":52,"input_tokens_details":{"cached_tokens":32},"output_tokens":5}"#;
    let responses = [
        named("response.created", r#","response":{"id":"resp_1","usage":null,"error":null}"#),
        named("response.output_text.delta", r#","delta":"a""#),
        named("response.completed", &format!(r#","response":{{"id":"resp_1","usage":{usage},"error":null}}"#)),
    ];
    for (events, id) in [(&messages[..], "chatcmpl-1"), (&responses, "resp_1")] {
        let (last, before) = events.split_last().unwrap();
        let (_, cut) = read(SseFilter::new(), &[before.concat().as_bytes()]);
        assert!(!cut.facts().ended(), "the end is missing");
        let (out, scanner) = read(SseFilter::new(), &[before.concat().as_bytes(), last.as_bytes()]);
        assert_eq!(out, events.concat().as_bytes());
        let facts = scanner.facts();
        assert_eq!((facts.id.as_deref(), facts.outputs, facts.done, facts.unread_events), (Some(id), 1, true, 0));
        assert_eq!(facts.text, 1, "{id}");
        let usage = TokenUsage { prompt: Tokens(52), completion: Tokens(5), cached: Some(Tokens(32)) };
        assert_eq!((facts.usage, facts.error.as_deref()), (Some(usage), None));
    }
}

#[test]
fn messages_and_responses_failures_are_reported() {
    let failed = r#","response":{"id":"resp_1","error":{"message":"out of blocks"}}"#;
    let error = r#","error":{"type":"internal_error","message":"out of blocks"}"#;
    for event in [named("response.failed", failed), named("error", error)] {
        assert_eq!(read(SseFilter::new(), &[event.as_bytes()]).1.facts().error.as_deref(), Some("out of blocks"));
    }
    let bare = named("response.failed", r#","response":{"output":[]}"#);
    let (_, scanner) = read(SseFilter::new(), &[bare.as_bytes()]);
    assert!(scanner.facts().done && scanner.facts().error.is_some());
    let bare = named("error", r#","message":"out of blocks","code":null"#);
    assert!(read(SseFilter::new(), &[bare.as_bytes()]).1.facts().error.is_some());
}

#[test]
fn an_event_of_the_greatest_length_is_read_and_forwarded() {
    let named_end =
        |output: usize| named("response.completed", &format!(r#","response":{{"output":"{}"}}"#, "x".repeat(output)));
    let event = named_end(MAX_EVENT_BYTES - named_end(0).len());
    for size in [1 << 16, 1 << 23] {
        let chunks: Vec<&[u8]> = event.as_bytes().chunks(size).collect();
        let (out, scanner) = read(SseFilter::new(), &chunks);
        assert!(out == event.as_bytes() && scanner.facts().done);
        assert_eq!(scanner.facts().unread_events, 0);
    }
}

#[test]
fn a_longer_event_is_refused_whole_and_ends_the_stream() {
    let half = Bytes::from(vec![b'x'; MAX_EVENT_BYTES / 2]);
    for mut scanner in [SseFilter::new(), SseFilter::hiding_usage()] {
        let mut out = Vec::new();
        scanner.push(Bytes::from_static(b"data: {}\n\ndata: "), &mut out).unwrap();
        scanner.push(half.clone(), &mut out).unwrap();
        assert_eq!(scanner.push(half.clone(), &mut out), Err(EventRefusal::TooLong));
        assert_eq!(scanner.push(Bytes::from_static(b"\n\ndata: [DONE]\n\n"), &mut out), Err(EventRefusal::TooLong));
        assert_eq!((out.concat(), scanner.facts().done), (b"data: {}\n\n".to_vec(), false));
        assert_eq!((scanner.tail.capacity(), scanner.finish()), (0, None), "nothing of it is kept");
        scanner.switch_engine();
        scanner.push(Bytes::from_static(b"data: [DONE]\n\n"), &mut out).unwrap();
        assert!(scanner.facts().done, "another engine's events are read");
    }
}

fn cuts(stream: &[u8], at: &[prop::sample::Index]) -> Vec<Vec<u8>> {
    let mut at: Vec<usize> = at.iter().map(|at| at.index(stream.len())).collect();
    at.extend([0, stream.len()]);
    at.sort_unstable();
    at.windows(2).map(|pair| stream[pair[0]..pair[1]].to_vec()).collect()
}

proptest! {
    #[test]
    fn chunk_boundaries_do_not_matter(
        at in proptest::collection::vec(any::<prop::sample::Index>(), 0..60),
        crlf in any::<bool>(),
    ) {
        let mut stream = recorded("D chat stream").to_vec();
        if crlf {
            stream = String::from_utf8(stream).unwrap().replace('\n', "\r\n").into_bytes();
        }
        let pieces = cuts(&stream, &at);
        let pieces: Vec<&[u8]> = pieces.iter().map(Vec::as_slice).collect();
        for fresh in [SseFilter::new, SseFilter::hiding_usage] {
            let (whole, expected) = read(fresh(), &[&stream]);
            let (out, scanner) = read(fresh(), &pieces);
            prop_assert_eq!(scanner.facts(), expected.facts());
            prop_assert_eq!(out, whole);
        }
    }

    #[test]
    fn random_bytes_are_forwarded_unchanged(chunks in proptest::collection::vec(proptest::collection::vec(prop::sample::select(b"\r\nd:{ata\"".to_vec()), 0..20), 0..12)) {
        let chunks: Vec<&[u8]> = chunks.iter().map(Vec::as_slice).collect();
        for scanner in [SseFilter::new(), SseFilter::hiding_usage()] {
            let (out, _) = read(scanner, &chunks);
            prop_assert_eq!(out, chunks.concat());
        }
    }
}

#[test]
fn prompt_usage_comes_from_the_first_event_and_output_from_the_last() {
    let start = r#","message":{"usage":{"input_tokens":20,"cache_read_input_tokens":32,"output_tokens":1}}"#;
    let end = r#","delta":{"stop_reason":"end_turn"},"usage":{"output_tokens":5}"#;
    let events = [named("message_start", start), named("message_delta", end)].concat();
    let (_, scanner) = read(SseFilter::new(), &[events.as_bytes()]);
    let usage = TokenUsage { prompt: Tokens(52), completion: Tokens(5), cached: Some(Tokens(32)) };
    assert_eq!(scanner.facts().usage, Some(usage));
}
