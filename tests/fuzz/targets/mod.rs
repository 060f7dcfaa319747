//! What is done with made-up bytes: everything that reads what an engine, a client or another node sends, and what must hold then.
//!
//! libFuzzer calls these with what it makes up, the test suite with the corpus beside this folder. Anything may be
//! refused; nothing may panic, take long, or take memory that the bytes do not account for.

pub mod nodes;
pub mod peers;
pub mod text;

use std::sync::Arc;

use bytes::Bytes;
use residency::{
    ApplyProgress, BlockMappingRules, DecodeLimits, KvCacheEvent, ResidencyFeed, ResidencyIndex,
    ResidencySnapshotReader, decode,
};
use vocabulary::{DpRank, HashSeed, Incarnation, ModelNamespace, Tokens, WorkerId};
use workers_shim::engine_api::{
    AnswerSummary, AnswerTokenIdsMode, Api, ClientRequestBody, ClientTokenIdVisibility, KvConnector, KvTransfer,
    LegOptions, ScannedJson, SseFilter, StrippedFieldCounts, TextTiming, TokenTranscript, UsageEventMode,
};

const WORKER: WorkerId = WorkerId(1);

fn rules() -> BlockMappingRules {
    let namespace = ModelNamespace { model: "m".into(), revision: "".into(), tokenizer: "t".into() };
    BlockMappingRules { max_blocks: 4096, max_orphans: 64, ..BlockMappingRules::new(Tokens(4), HashSeed(1), namespace) }
}

/// A message of an engine's: decoded, applied, looked up, written down, taken over, forgotten.
pub fn events(bytes: &[u8]) {
    let Ok(batch) = decode(bytes, &DecodeLimits::default()) else { return };
    let (mut feed, mut index) = (ResidencyFeed::new(WORKER, DpRank(0), rules()), ResidencyIndex::new());
    for event in &batch.events {
        if let KvCacheEvent::Stored(stored) = event {
            assert!(
                stored.hashes.len() + stored.tokens.len() + stored.extra.len() <= bytes.len(),
                "bytes account for all"
            );
        }
    }
    feed.ingest_all(&batch.events);
    settle(&mut feed, &mut index);
    assert!(feed.blocks() <= rules().max_blocks);
    let written: Vec<Vec<u8>> = feed.snapshot(Incarnation(1), 1).collect();
    let mut reader = ResidencySnapshotReader::new((WORKER, DpRank(0)), Incarnation(1), rules());
    let mut adopted = None;
    for chunk in &written {
        // A block with more tokens than a chunk holds makes a chunk that nobody takes.
        match reader.take(chunk) {
            Ok(residency::ReadProgress::More(next)) => reader = next,
            Ok(residency::ReadProgress::Complete(imprint)) => {
                adopted = Some(imprint);
                break;
            }
            Err(error) => {
                assert_eq!(error, residency::ResidencySnapshotError::TooMuch);
                break;
            }
        }
    }
    if let Some(imprint) = adopted {
        let (mut other, mut copy) = (ResidencyFeed::new(WORKER, DpRank(0), rules()), ResidencyIndex::new());
        other.adopt(imprint);
        settle(&mut other, &mut copy);
        assert_eq!((other.blocks(), copy.blocks()), (feed.blocks(), index.blocks()));
    }
    feed.reset();
    settle(&mut feed, &mut index);
    assert_eq!((feed.blocks(), index.blocks()), (0, 0));
}

fn settle(feed: &mut ResidencyFeed, index: &mut ResidencyIndex) {
    while feed.settle(index, 7).is_ok_and(|settled| settled == ApplyProgress::More) {}
}

fn nixl() -> KvTransfer {
    KvTransfer { connector: KvConnector::Nixl, ..KvTransfer::default() }
}

/// A client's body: every leg that is made of it is JSON again, and says nothing that only routers may say.
pub fn bodies(bytes: &[u8]) {
    let Ok(body) = ClientRequestBody::read(Bytes::copy_from_slice(bytes)) else { return };
    let apis = [Api::Chat, Api::Completions, Api::Responses, Api::Messages];
    for (api, salt) in apis.into_iter().flat_map(|api| [(api, None), (api, Some("s".into()))]) {
        let options = LegOptions { api, salt, usage: UsageEventMode::Always, ids: AnswerTokenIdsMode::Always };
        let plain = body.plain(&options).into_bytes();
        assert!(plain.len() <= bytes.len() + 200, "little is added");
        let again = ClientRequestBody::read(plain.clone()).expect("what was read can be read again");
        let left = again.stripped(&options);
        assert_eq!(
            left,
            StrippedFieldCounts { salt: u32::from(options.salt.is_some()), ..StrippedFieldCounts::default() },
            "nothing is left to remove"
        );
        assert_eq!(again.plain(&options).into_bytes(), plain, "what is clean stays as it is");
        let prefill =
            ClientRequestBody::read(body.prefill(&options, (&nixl(), None)).into_bytes()).expect("a leg is JSON");
        assert!(!prefill.streams());
    }
}

/// Two bodies of one session: the second one is read from where it has grown on, and that finds what reading all of it
/// finds. The first four bytes are two numbers: the length of the first body, and how much of it begins the second one.
pub fn growth(bytes: &[u8]) {
    let Some((&[a, b, c, d], rest)) = bytes.split_first_chunk::<4>() else { return };
    let within = |number: [u8; 2], length: usize| usize::from(u16::from_le_bytes(number)) % (length + 1);
    let (known, more) = rest.split_at(within([a, b], rest.len()));
    let grown = Bytes::from([&known[..within([c, d], known.len())], more].concat());
    let Ok(known) = ScannedJson::scan(Bytes::copy_from_slice(known), &[]).map(Arc::new) else { return };
    for body in [&grown, known.body()] {
        if let Some(growth) = known.growth_to(body, "messages") {
            let found = ScannedJson::scan_growth(body.clone(), &growth, &["n"]);
            assert_eq!(found, ScannedJson::scan(body.clone(), &["n"]));
        }
    }
}

/// An engine's answer, whole or as a stream: in chunks of any size it says the same, and nothing is lost.
pub fn answers(bytes: &[u8]) {
    let Some((size, bytes)) = bytes.split_first() else { return };
    let whole = Bytes::copy_from_slice(bytes);
    if let Ok(answer) = AnswerSummary::read(&whole)
        && let Some(handoff) = answer.handoff
        && let Ok(body) = ClientRequestBody::read(Bytes::from_static(br#"{"prompt":"a"}"#))
    {
        let leg = body.decode(&LegOptions::default(), (&nixl(), Some(handoff)));
        ClientRequestBody::read(leg.into_bytes()).expect("a leg is JSON");
    }
    let scan = |size: usize, mut scanner: SseFilter| {
        let mut out = Vec::new();
        for chunk in whole.chunks(size) {
            scanner.push(whole.slice_ref(chunk), &mut out).expect("short events are accepted");
        }
        out.extend(scanner.finish());
        (scanner.facts().clone(), out.concat())
    };
    let at_once = scan(whole.len().max(1), SseFilter::new());
    assert_eq!(scan(usize::from(*size).max(1), SseFilter::new()), at_once);
    check_redaction(&whole, &at_once.1);
    let hiding = scan(whole.len().max(1), SseFilter::hiding_usage());
    assert_eq!(scan(usize::from(*size).max(1), SseFilter::hiding_usage()), hiding);
    assert_eq!(hiding.0, at_once.0);
    let keeping = || {
        SseFilter::new().with_transcript(TokenTranscript::new(
            Api::Chat,
            ClientTokenIdVisibility::None,
            TextTiming::WithIds,
        ))
    };
    assert_eq!(scan(usize::from(*size).max(1), keeping()), scan(whole.len().max(1), keeping()));
}

/// Only JSON in data lines may change, only in a stream that names transfer parameters, and only once.
fn check_redaction(stream: &Bytes, shown: &[u8]) {
    const NAME: &[u8] = b"\"kv_transfer_params\"";
    if shown == stream {
        return;
    }
    assert!(stream.windows(NAME.len()).any(|window| window == NAME), "nothing is to be hidden");
    let lines = |text: &[u8]| text.split(|byte| *byte == b'\n').map(<[u8]>::to_vec).collect::<Vec<_>>();
    let (before, after) = (lines(&stream[..]), lines(shown));
    assert_eq!(before.len(), after.len());
    for (before, after) in before.iter().zip(&after).filter(|(before, after)| before != after) {
        assert!(before.starts_with(b"data:") && after.starts_with(b"data:"), "only data is read");
        assert_ne!(before.trim_ascii(), after.trim_ascii(), "spaces and line ends stay as they are");
    }
    let (mut scanner, mut again) = (SseFilter::new(), Vec::new());
    scanner.push(Bytes::copy_from_slice(shown), &mut again).expect("short events are accepted");
    again.extend(scanner.finish());
    assert_eq!(again.concat(), shown, "nothing is left to hide");
}
