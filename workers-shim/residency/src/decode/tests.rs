use proptest::prelude::*;
use serde::Serialize;

use super::*;
use crate::tests::{SGLANG, VLLM_DIGESTS, VLLM_INTEGERS, payloads, recording};
use vocabulary::Tier;

fn only(event: KvEventBatch) -> KvCacheEvent {
    let [event] = <[KvCacheEvent; 1]>::try_from(event.events).unwrap();
    event
}

fn encoded(value: &impl Serialize) -> Vec<u8> {
    rmp_serde::to_vec(value).unwrap()
}

fn read(value: &impl Serialize) -> Result<KvEventBatch, DecodeError> {
    decode(&encoded(value), &DecodeLimits::default())
}

#[test]
fn vllm_batches_match_vllms_own_decoder() {
    let messages = recording(VLLM_INTEGERS);
    assert_eq!(messages.len(), 20);
    let (_, first) = &messages[0];
    assert!((first.timestamp - 1795225186.351284).abs() < 1e-5);
    assert_eq!(first.rank, Some(DpRank(0)));
    let KvCacheEvent::Stored(event) = only(first.clone()) else { panic!("a store") };
    let hashes = [14339975833291166648, 8406221621057943364, 8494982635092312429].map(EngineHash);
    assert_eq!((&*event.hashes, event.parent), (hashes.as_slice(), None));
    let tokens: Vec<u32> = (0..96).map(|n| 103 + 7 * n).collect();
    assert_eq!((event.tokens, event.block_size), (tokens, 32));
    assert_eq!((event.tier, event.group, event.kind), (Tier::Hbm, 0, KvCacheSpecKind::Full));
    assert_eq!((event.adapter, event.salt, event.extra), (None, None, vec![vec![]; 3]));
    let KvCacheEvent::Stored(salted) = only(messages[3].1.clone()) else { panic!("a store") };
    assert_eq!(salted.extra, [vec![ExtraKey::Text("tenant-a".into())], vec![], vec![]]);
    // Message 13 removes fourteen copies one by one before it stores again; message 19 clears first.
    let kinds = |batch: &KvEventBatch| {
        let removed = |event: &&KvCacheEvent| matches!(event, KvCacheEvent::Removed(_));
        (batch.events.iter().filter(removed).count(), batch.events.len())
    };
    assert_eq!(kinds(&messages[13].1), (14, 15));
    assert_eq!(messages[19].1.events[0], KvCacheEvent::Cleared);
}

#[test]
fn digest_hashes_are_accepted_like_numeric_ones() {
    let messages = recording(VLLM_DIGESTS);
    let hashes = |batch: &KvEventBatch| match &batch.events[0] {
        KvCacheEvent::Stored(event) => (event.hashes.clone(), event.parent),
        _ => panic!("a store"),
    };
    let (first, parent) = hashes(&messages[0].1);
    assert_eq!((first.len(), parent), (3, None));
    let (second, parent) = hashes(&messages[1].1);
    assert_eq!((second[0], parent), (first[2], Some(first[1])), "the last block again, on the same parent");
    assert_ne!(first[0], first[1]);
}

#[test]
fn sglang_hashes_are_signed_and_its_salt_is_a_separate_field() {
    let messages = recording(SGLANG);
    assert_eq!(only(messages[0].1.clone()), KvCacheEvent::Cleared);
    let KvCacheEvent::Stored(event) = only(messages[2].1.clone()) else { panic!("a store") };
    assert_eq!(event.hashes[2], EngineHash::signed(-8898976688262224645));
    let KvCacheEvent::Stored(salted) = only(messages[4].1.clone()) else { panic!("a store") };
    assert_eq!(salted.salt.as_deref(), Some("tenant-a"));
}

#[test]
fn positional_events_equal_tagged_ones() {
    let extra = [Some(["salt"]), None];
    let positional = (1.5, [("BlockStored", [7u64, 8], 6u64, [1u32, 2, 3, 4], 2, (), "CPU", "lora", extra, 1, "mla")]);
    let KvCacheEvent::Stored(event) = only(read(&positional).unwrap()) else { panic!("a store") };
    assert_eq!((event.hashes, event.parent), (vec![EngineHash(7), EngineHash(8)], Some(EngineHash(6))));
    assert_eq!((event.tokens, event.block_size, event.tier, event.group), (vec![1, 2, 3, 4], 2, Tier::Host, 1));
    assert_eq!((event.kind, event.adapter.as_deref()), (KvCacheSpecKind::Full, Some("lora")));
    assert_eq!(event.extra, [vec![ExtraKey::Text("salt".into())], vec![]]);
    // The oldest engines omit everything after the block size or after the medium.
    let KvCacheEvent::Stored(old) = only(read(&(1, [("BlockStored", [-7i64], (), [1u32], 1)])).unwrap()) else {
        panic!()
    };
    assert_eq!((old.hashes[0], old.parent, old.tier), (EngineHash::signed(-7), None, Tier::Hbm));
    let KvCacheEvent::Removed(event) = only(read(&(1, [("BlockRemoved", [7u64], "DISK")], 3)).unwrap()) else {
        panic!()
    };
    assert_eq!((event.tier, event.hashes), (Tier::Disk, vec![EngineHash(7)]));
    assert_eq!(only(read(&(1, [("AllBlocksCleared",)])).unwrap()), KvCacheEvent::Cleared);
}

#[derive(Serialize)]
struct TaggedEvent {
    #[serde(rename = "type")]
    tag: &'static str,
    unheard_of: (u8, [&'static str; 2]),
    block_hashes: Vec<u64>,
    lora_id: Option<u64>,
    kv_cache_spec_kind: &'static str,
    block_size: u64,
    remaining_copy_counts: Vec<u32>,
}

fn tagged(tag: &'static str) -> Vec<u8> {
    let event = TaggedEvent {
        tag,
        unheard_of: (1, ["a", "b"]),
        block_hashes: vec![1],
        lora_id: Some(4),
        kv_cache_spec_kind: "sliding_window",
        block_size: 4,
        remaining_copy_counts: vec![2],
    };
    rmp_serde::encode::to_vec_named(&(1.0, [event], 2, "more")).unwrap()
}

#[test]
fn unknown_fields_and_events_are_skipped() {
    let batch = decode(&tagged("BlockStored"), &DecodeLimits::default()).unwrap();
    assert_eq!(batch.rank, Some(DpRank(2)));
    let KvCacheEvent::Stored(event) = only(batch) else { panic!("a store") };
    assert_eq!((event.kind, event.adapter.as_deref(), event.block_size), (KvCacheSpecKind::Window, Some("#4"), 4));
    let removed = only(decode(&tagged("BlockRemoved"), &DecodeLimits::default()).unwrap());
    assert!(matches!(removed, KvCacheEvent::Removed(event) if event.remaining == [2]));
    assert_eq!(only(decode(&tagged("BlockPinned"), &DecodeLimits::default()).unwrap()), KvCacheEvent::Other);
}

#[test]
fn decode_limits_are_enforced() {
    let small = DecodeLimits { bytes: 40, events: 2, blocks: 3, text: 4 };
    let with = |value: &dyn Fn() -> Vec<u8>| decode(&value(), &small);
    let events = |count: usize| encoded(&(1, vec![("AllBlocksCleared",); count]));
    assert!(decode(&events(2), &small).is_ok());
    assert_eq!(decode(&events(2), &DecodeLimits { events: 1, ..small }), Err(DecodeError::TooMany("events")));
    assert_eq!(with(&|| events(3)), Err(DecodeError::TooMany("bytes")));
    let blocks = |count: usize| encoded(&(1, [("BlockRemoved", vec![1u8; count])]));
    assert!(with(&|| blocks(3)).is_ok());
    assert_eq!(with(&|| blocks(4)), Err(DecodeError::TooMany("block_hashes")));
    let medium = encoded(&(1, [("BlockRemoved", [1u8], "MEDIA")]));
    assert_eq!(decode(&medium, &small), Err(DecodeError::TooMany("characters")));
}

#[test]
fn invalid_batch_is_an_error() {
    use DecodeError::*;
    let cases: [(&[u8], DecodeError); 9] = [
        (b"", Truncated),
        (b"\x93", Truncated),
        (b"\x93\x01\xdd\xff\xff\xff\xff", Truncated),
        (b"\xc1", Malformed),
        (b"\x01", Type("batch")),
        (b"\x91\x01", Type("batch")),
        (b"\x92\xa1x\x90", Type("timestamp")),
        (b"\x92\x01\x90\x00", Trailing),
        (b"\x92\x01\x91\xa1x", Type("event")),
    ];
    for (bytes, error) in cases {
        assert_eq!(decode(bytes, &DecodeLimits::default()), Err(error), "{bytes:x?}");
    }
    assert_eq!(read(&(1, [("BlockStored", "no list")])), Err(Type("block_hashes")));
    assert_eq!(read(&(1, [("BlockStored", [1.5])])), Err(Type("block_hashes")));
    assert_eq!(read(&(1, [("BlockStored", [1], (), [-1])])), Err(Type("token_ids")));
    assert_eq!(read(&(1, [0u8; 0], 1 << 20)), Err(TooMany("ranks")));
    let mut deep = vec![0x92, 0x01, 0x91, 0x92, 0xa1, b'x'];
    deep.extend([0x91; 40]);
    deep.push(0);
    assert_eq!(decode(&deep, &DecodeLimits::default()), Err(TooDeep));
}

#[test]
fn every_truncated_message_is_an_error() {
    let (_, whole) = &payloads(VLLM_INTEGERS)[3];
    for end in 0..whole.len() {
        assert!(decode(&whole[..end], &DecodeLimits::default()).is_err(), "cut at {end}");
    }
}

proptest! {
    #[test]
    fn damaged_messages_never_panic(
        which in 0usize..20,
        damage in proptest::collection::vec((any::<proptest::sample::Index>(), any::<u8>()), 1..6),
    ) {
        let (_, mut bytes) = payloads(VLLM_INTEGERS).swap_remove(which);
        for (at, byte) in damage {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        let _ = decode(&bytes, &DecodeLimits::default());
    }

    #[test]
    fn random_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let _ = decode(&bytes, &DecodeLimits::default());
    }
}

/// Decodes an event that stores one block with tokens in the given encodings.
fn stored_with(tokens: &[&[u8]]) -> Result<KvEventBatch, DecodeError> {
    let head = b"\x92\x01\x91\x95\xabBlockStored\x91\x01\xc0";
    let bytes = [head, &[0x90 | tokens.len() as u8][..], &tokens.concat(), b"\x04"].concat();
    decode(&bytes, &DecodeLimits::default())
}

#[test]
fn tokens_of_every_integer_width_are_read() {
    let widths: [&[u8]; 6] = [
        b"\x7f",
        b"\xcc\xff",
        b"\xcd\x01\x02",
        b"\xce\x00\x02\x00\x01",
        b"\xcf\0\0\0\0\xff\xff\xff\xff",
        b"\xd2\0\0\0\x08",
    ];
    let KvCacheEvent::Stored(event) = only(stored_with(&widths).unwrap()) else { panic!("blocks are stored") };
    assert_eq!(event.tokens, [127, 255, 258, 131_073, u32::MAX, 8]);
    let none: [&[u8]; 4] = [b"\xff", b"\xcf\0\0\0\x01\0\0\0\0", b"\xc0", b"\xd0\x80"];
    for token in none {
        assert_eq!(stored_with(&[b"\x01", token]), Err(DecodeError::Type("token_ids")), "{token:x?}");
    }
    assert_eq!(stored_with(&[b"\xce\x01"]), Err(DecodeError::Truncated));
}

/// A token in any encoding, also longer ones than necessary, and values that are no tokens.
fn any_number() -> impl Strategy<Value = Vec<u8>> {
    fn wide<const N: usize>(head: u8, bytes: [u8; N]) -> Vec<u8> {
        [&[head][..], &bytes].concat()
    }
    prop_oneof![
        8 => (0u8..0x80).prop_map(|number| vec![number]),
        8 => any::<u8>().prop_map(|number| wide(0xcc, [number])),
        8 => any::<u16>().prop_map(|number| wide(0xcd, number.to_be_bytes())),
        8 => any::<u32>().prop_map(|number| wide(0xce, number.to_be_bytes())),
        1 => any::<u32>().prop_map(|number| wide(0xcf, u64::from(number).to_be_bytes())),
        1 => (0u8..100).prop_map(|number| wide(0xd0, [number])),
    ]
}

fn bad_number() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![Just(vec![0xc0]), Just(vec![0xff]), Just(vec![0xc1]), Just(vec![0xcf; 9]), Just(vec![0xcb; 9])]
}

proptest! {
    #[test]
    fn fast_token_reader_agrees_with_the_general_one(
        numbers in proptest::collection::vec(any_number(), 0..80),
        bad in proptest::option::weighted(0.3, (any::<prop::sample::Index>(), bad_number())),
        (missing, following) in (0usize..10, 0usize..10),
    ) {
        let mut numbers = numbers;
        if let Some((at, bad)) = bad {
            numbers.insert(at.index(numbers.len() + 1), bad);
        }
        let head = [&[0xdc][..], &(numbers.len() as u16).to_be_bytes()].concat();
        let whole = [head, numbers.concat()].concat();
        let message = [&whole[..whole.len() - missing.min(whole.len())], &vec![0xcc; following]].concat();
        let limits = DecodeLimits::default();
        let one_by_one = || {
            let mut cursor = MsgpackCursor::new(&message);
            let MsgpackItem::Array(count) = cursor.item()? else { return Err(DecodeError::Type("token_ids")) };
            let read = |_| match cursor.item()? {
                MsgpackItem::Unsigned(number) => u32::try_from(number).map_err(|_| DecodeError::Type("token_ids")),
                _ => Err(DecodeError::Type("token_ids")),
            };
            let tokens = (0..count).map(read).collect::<Result<Vec<_>, _>>()?;
            Ok((tokens, cursor.remaining()))
        };
        let mut reader = EventReader { cursor: MsgpackCursor::new(&message), limits: &limits };
        let at_once = reader.tokens().map(|tokens| (tokens, reader.cursor.remaining()));
        prop_assert_eq!(at_once, one_by_one());
    }
}

#[test]
fn block_hashes_of_every_integer_width_are_read() {
    let names = [7, 1 << 20, u64::MAX, 1 << 40, 0];
    let KvCacheEvent::Removed(event) = only(read(&(1, [("BlockRemoved", names, "GPU")])).unwrap()) else { panic!() };
    assert_eq!(event.hashes, names.map(EngineHash));
    let named = |name: &dyn Fn(&mut Vec<u8>)| {
        let mut bytes = vec![0x92, 1, 0x91, 0x92, 0xac];
        bytes.extend(b"BlockRemoved");
        bytes.extend([0x92, 0xcf, 0, 0, 0, 0, 0, 0, 0, 9]);
        name(&mut bytes);
        decode(&bytes, &DecodeLimits::default())
    };
    assert!(named(&|bytes| bytes.push(5)).is_ok());
    assert_eq!(named(&|bytes| bytes.push(0xc0)), Err(DecodeError::Type("block_hashes")));
    assert_eq!(named(&|bytes| bytes.extend([0xcf, 1])), Err(DecodeError::Truncated));
}
