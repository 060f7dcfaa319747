//! What comes after an end that the client has, and what is kept of a repeat.

use super::super::tape::MOST_TOLD;
use super::*;

fn at(events: &[String], words: &[&str]) -> usize {
    events.iter().position(|event| words.iter().all(|word| event.contains(word))).unwrap()
}

#[test]
fn more_text_in_a_block_that_the_client_has_as_ended_is_another_answer() {
    let all = message("one", 3);
    let end = ["content_block_stop", "\"index\":1"];
    let more = json!({"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": " AND MORE"}});
    for told in [at(&all, &end), at(&all, &["look"]), all.len() - 1] {
        let mut second = message("two", 3);
        second.insert(at(&second, &end), data(more.clone()));
        let mut scanner = retelling(Api::Messages, ShownIds::All, Repeats::Always);
        pass(&mut scanner, &all[..=told]);
        scanner.go_on();
        let rest = pass(&mut scanner, &second);
        assert!(scanner.differs() && !rest.contains("MORE") && !rest.contains("message_stop"), "{told} {rest}");
    }
}

#[test]
fn more_text_in_a_part_that_the_client_has_as_done_is_another_answer() {
    for end in ["response.output_text.done", "response.content_part.done", "response.output_item.done"] {
        let make = |name: &str, size| {
            let ends = ["output_text.done", "content_part.done", "output_item.done"];
            // An engine may tell fewer ends of a part than another one.
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
        let mut scanner = retelling(Api::Responses, ShownIds::All, Repeats::Always);
        pass(&mut scanner, &all[..=at(&all, &["look"])]);
        scanner.go_on();
        let rest = pass(&mut scanner, &second);
        assert!(scanner.differs() && !rest.contains("MORE") && !rest.contains("completed"), "{end} {rest}");
    }
}

#[test]
fn a_drawn_answer_that_first_speaks_at_the_second_engine_is_not_made_again_by_a_third() {
    for (api, make) in ALL {
        let all = make("one", 3);
        let mut scanner = retelling(api, ShownIds::All, Repeats::UntilItSpeaks);
        pass(&mut scanner, &all[..1]);
        if scanner.so_far().is_err() {
            // Its first event speaks.
            continue;
        }
        scanner.go_on();
        pass(&mut scanner, &all[..6]);
        assert_eq!(scanner.so_far(), Err(Lost::Drawn), "{api:?}");
        assert!(!scanner.differs());
    }
}

#[test]
fn what_is_kept_of_a_repeat_is_bounded_and_the_rest_is_passed() {
    let said = |text: &str| {
        json!({"id": "c", "created": 1, "model": "m", "choices": [{"index": 0, "delta": {"content": text}}]})
            .to_string()
    };
    let long = "Q".repeat(MOST_TOLD / 2);
    let mut retold = Retold::new(Api::Chat, ShownIds::All, Repeats::Always);
    retold.take(said("QQ").as_bytes());
    retold.go_on();
    let mut passed = 0;
    for text in ["QQQ"].into_iter().chain([long.as_str(); 6]) {
        let Passage::As(event) = retold.take(said(text).as_bytes()) else {
            panic!("{} of it is not passed", text.len())
        };
        passed += event.iter().filter(|byte| **byte == b'Q').count();
    }
    assert_eq!(passed, 1 + 6 * long.len());
    assert_eq!(retold.repeatable(), Err(Lost::TooLong));
    assert!(retold.tape.size() <= MOST_TOLD + long.len() + 1024, "{}", retold.tape.size());
    assert_eq!(retold.over(), Ok(()));
}
