//! What engines and Redis send, on wires of their own, and an engine's answer together with the request that it answers.

use bytes::Bytes;
use prefix::TokenCheckpoint;
use workers_shim::engine_api::{
    AnswerContinuation, AnswerDeterminism, AnswerSummary, AnswerTokenIdsMode, Api, ClientRequestBody,
    ClientTokenIdVisibility, EventBufferBudget, LegOptions, ReplayVerifier, ScannedJson, SseFilter, TextTiming,
    TokenTranscript, UsageEventMode, redact_answer,
};
use workers_shim::frames_of;

/// Stands between a request and its answer, and between the answers of two engines.
const SEPARATOR: u8 = 0;

/// What a publisher sends after it was connected to: whole frames, whatever pieces they come in.
pub fn zmtp(bytes: &[u8]) {
    let Some((size, bytes)) = bytes.split_first() else { return };
    let at_once = frames_of(bytes, bytes.len().max(1));
    let in_pieces = frames_of(bytes, usize::from(*size).max(1));
    match (&at_once, &in_pieces) {
        (Ok(one), Ok(other)) => assert_eq!(one, other),
        (Err(one), Err(other)) => assert_eq!(one.to_string(), other.to_string()),
        _ => panic!("pieces decide: {at_once:?} and {in_pieces:?}"),
    }
    let frames = at_once.unwrap_or_default();
    assert!(frames.iter().map(Bytes::len).sum::<usize>() <= bytes.len(), "bytes account for all");
}

/// A value from Redis that was opened: a checkpoint or a transcript.
pub fn values(bytes: &[u8]) {
    if let Some(checkpoint) = TokenCheckpoint::from_bytes(bytes) {
        assert_eq!(checkpoint.to_bytes().as_deref(), Some(bytes), "read and written, it is the same");
        assert!(checkpoint.token_count().0 as usize <= bytes.len());
    }
    if let Ok(fields) = ScannedJson::scan(Bytes::copy_from_slice(bytes), &["previous", "items"]) {
        let items = fields.get("items").unwrap_or_default();
        assert!(items.len() <= bytes.len() && std::str::from_utf8(items).is_ok());
    }
}

/// A request, the answer that an engine gives it, and the one with which another goes on, between zeros: both sides at once.
/// The first byte chooses the size of pieces, the second the endpoint and what is kept.
pub fn exchanges(bytes: &[u8]) {
    let [size, choice, bytes @ ..] = bytes else { return };
    let mut parts = bytes.splitn(3, |byte| *byte == SEPARATOR);
    let request = Bytes::copy_from_slice(parts.next().unwrap_or_default());
    let first = Bytes::copy_from_slice(parts.next().unwrap_or_default());
    let second = Bytes::copy_from_slice(parts.next().unwrap_or_default());
    let Ok(body) = ClientRequestBody::read(request) else { return };
    let api = [Api::Chat, Api::Completions, Api::Responses, Api::Messages][usize::from(choice & 3)];
    let options =
        LegOptions { api, salt: Some("s".into()), usage: UsageEventMode::Always, ids: AnswerTokenIdsMode::Always };
    ClientRequestBody::read(body.plain(&options).into_bytes()).expect("a leg is JSON");
    if let Ok(answer) = AnswerSummary::read(&first) {
        drop(answer);
        for ids in [ClientTokenIdVisibility::All, ClientTokenIdVisibility::None] {
            drop(redact_answer(&first, ids));
        }
    }
    let budget = EventBufferBudget::of(1 << 20);
    let told = |size: usize| {
        let mut scanner = scanner(&body, (api, *choice)).with_budget(budget.clone());
        let mut out = Vec::new();
        push(&mut scanner, &first, size, &mut out);
        let going = match scanner.resume_ids() {
            Ok(Some((prompt, said))) => {
                body.continuation(api, AnswerContinuation { prompt, answer: said, context: None })
            }
            Ok(None) => Some(body.clone()),
            Err(_) => None,
        };
        if let Some(going) = going {
            let leg = going.plain(&LegOptions { api: Api::Completions, ..options.clone() }).into_bytes();
            ClientRequestBody::read(leg).expect("the rest is asked for in JSON");
            scanner.switch_engine();
            push(&mut scanner, &second, size, &mut out);
        }
        out.extend(scanner.closing_events());
        out.extend(scanner.finish());
        (scanner.facts().clone(), out.concat())
    };
    let at_once = told(usize::MAX);
    assert_eq!(told(usize::from(*size).max(1)), at_once, "pieces decide nothing");
    assert!(at_once.1.len() <= 4 * (bytes.len() + 4096), "little is added");
    assert_eq!(budget.held(), 0);
}

fn scanner(body: &ClientRequestBody, (api, choice): (Api, u8)) -> SseFilter {
    let scanner = if body.streams() { SseFilter::hiding_usage() } else { SseFilter::new() };
    let shown = if body.scanned_json().read("return_token_ids") == Some(true) {
        ClientTokenIdVisibility::All
    } else {
        ClientTokenIdVisibility::None
    };
    let scanner = match choice & 4 {
        0 => scanner,
        _ => scanner.with_transcript(TokenTranscript::new(api, shown, TextTiming::WithIds)),
    };
    match choice & 24 {
        0 => scanner,
        8 => scanner.with_replay_verifier(ReplayVerifier::new(api, shown, AnswerDeterminism::UntilFirstOutput)),
        _ => scanner.with_replay_verifier(ReplayVerifier::new(api, shown, AnswerDeterminism::Always)),
    }
}

fn push(scanner: &mut SseFilter, answer: &Bytes, size: usize, out: &mut Vec<Bytes>) {
    for piece in answer.chunks(size.min(answer.len().max(1))) {
        if scanner.push(answer.slice_ref(piece), out).is_err() {
            break;
        }
    }
}
