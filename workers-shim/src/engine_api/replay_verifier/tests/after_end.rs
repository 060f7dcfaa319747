//! Tests of events after an end that the client has, and of what is stored during a replay.

use super::super::buffer::MAX_BUFFERED_BYTES;
use super::*;

fn at(events: &[String], words: &[&str]) -> usize {
    events.iter().position(|event| words.iter().all(|word| event.contains(word))).unwrap()
}

#[test]
fn extra_text_in_a_finished_block_diverges() {
    let all = message("one", 3);
    let end = ["content_block_stop", "\"index\":1"];
    let more = json!({"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": " AND MORE"}});
    for told in [at(&all, &end), at(&all, &["look"]), all.len() - 1] {
        let mut second = message("two", 3);
        second.insert(at(&second, &end), data(more.clone()));
        let mut scanner = replaying_scanner(Api::Messages, ClientTokenIdVisibility::All, AnswerDeterminism::Always);
        forward(&mut scanner, &all[..=told]);
        scanner.switch_engine();
        let rest = forward(&mut scanner, &second);
        assert!(scanner.has_diverged() && !rest.contains("MORE") && !rest.contains("message_stop"), "{told} {rest}");
    }
}

#[test]
fn extra_text_in_a_finished_part_diverges() {
    for end in ["response.output_text.done", "response.content_part.done", "response.output_item.done"] {
        let make = |name: &str, size| {
            let ends = ["output_text.done", "content_part.done", "output_item.done"];
            // Engines may emit different sets of end events for a part.
            let is_left_out = |event: &String| ends.iter().any(|it| !end.ends_with(it) && event.contains(it));
            let mut all = response(name, size);
            let tail = all.split_off(at(&all, &["fc_"]));
            all.retain(|event| !is_left_out(event));
            [all, tail].concat()
        };
        let all = make("one", 3);
        let mut second = make("two", 3);
        let delta = json!({"type": "response.output_text.delta", "item_id": "msg_two", "output_index": 0, "content_index": 0, "delta": " AND MORE", "logprobs": []});
        second.insert(at(&second, &[end]), data(delta));
        let mut scanner = replaying_scanner(Api::Responses, ClientTokenIdVisibility::All, AnswerDeterminism::Always);
        forward(&mut scanner, &all[..=at(&all, &["look"])]);
        scanner.switch_engine();
        let rest = forward(&mut scanner, &second);
        assert!(scanner.has_diverged() && !rest.contains("MORE") && !rest.contains("completed"), "{end} {rest}");
    }
}

#[test]
fn sampled_answer_that_starts_on_the_second_engine_is_not_replayed() {
    for (api, make) in ALL {
        let all = make("one", 3);
        let mut scanner = replaying_scanner(api, ClientTokenIdVisibility::All, AnswerDeterminism::UntilFirstOutput);
        forward(&mut scanner, &all[..1]);
        if scanner.resume_ids().is_err() {
            // Its first event already has output.
            continue;
        }
        scanner.switch_engine();
        forward(&mut scanner, &all[..6]);
        assert_eq!(scanner.resume_ids(), Err(ContinuationBlocker::Sampled), "{api:?}");
        assert!(!scanner.has_diverged());
    }
}

#[test]
fn replay_buffer_is_bounded_and_the_rest_is_forwarded() {
    let said = |text: &str| {
        json!({"id": "c", "created": 1, "model": "m", "choices": [{"index": 0, "delta": {"content": text}}]})
            .to_string()
    };
    let long = "Q".repeat(MAX_BUFFERED_BYTES / 2);
    let mut verifier = ReplayVerifier::new(Api::Chat, ClientTokenIdVisibility::All, AnswerDeterminism::Always);
    verifier.rewrite_event(said("QQ").as_bytes(), true);
    verifier.switch_engine();
    let mut passed = 0;
    for text in ["QQQ"].into_iter().chain([long.as_str(); 6]) {
        let EventRewrite::Replaced(event) = verifier.rewrite_event(said(text).as_bytes(), true) else {
            panic!("{} of it is not passed", text.len())
        };
        passed += event.iter().filter(|byte| **byte == b'Q').count();
    }
    assert_eq!(passed, 1 + 6 * long.len());
    assert_eq!(verifier.check_replayable(), Err(ContinuationBlocker::TooLong));
    assert!(verifier.buffer.size() <= MAX_BUFFERED_BYTES + long.len() + 1024, "{}", verifier.buffer.size());
    assert_eq!(verifier.finish_stream(), Ok(()));
}
