//! Tests of KV events as subscribers receive them.

use std::collections::HashMap;

use serde::Deserialize;

use super::*;
use crate::sim::EventFault;
use crate::zmtp::{SocketType, ZmtpConnection};

#[derive(Deserialize, Debug, PartialEq, Clone)]
#[serde(tag = "type")]
enum DecodedEvent {
    BlockStored {
        block_hashes: Vec<u64>,
        parent_block_hash: Option<u64>,
        token_ids: Vec<u32>,
        block_size: u32,
        medium: String,
        lora_id: Option<u32>,
        lora_name: Option<String>,
        extra_keys: Vec<Option<Vec<String>>>,
        group_idx: u32,
        kv_cache_spec_kind: String,
    },
    BlockRemoved {
        block_hashes: Vec<u64>,
    },
    AllBlocksCleared {},
}

type DecodedBatch = (f64, Vec<DecodedEvent>, u32);

struct EventSubscriber(ZmtpConnection);

impl EventSubscriber {
    /// Subscribes, and waits until the subscription is effective.
    async fn new(bench: &SimWorkerFixture) -> Self {
        let mut socket = ZmtpConnection::connect(bench.worker.events_endpoint(), SocketType::Sub).await.unwrap();
        socket.subscribe("").await.unwrap();
        tokio::time::sleep(Duration::from_millis(100)).await;
        Self(socket)
    }

    async fn next(&mut self) -> (String, i64, DecodedBatch) {
        let frames = tokio::time::timeout(Duration::from_secs(5), self.0.recv()).await.unwrap().unwrap();
        assert_eq!(frames.len(), 3);
        let sequence = i64::from_be_bytes(frames[1].as_ref().try_into().unwrap());
        (String::from_utf8(frames[0].to_vec()).unwrap(), sequence, rmp_serde::from_slice(&frames[2]).unwrap())
    }
}

/// Returns the messages of a replay from `start`, the end marker last.
async fn replay(bench: &SimWorkerFixture, start: u64) -> Vec<(i64, Vec<u8>)> {
    let mut socket = ZmtpConnection::connect(bench.worker.replay_endpoint(), SocketType::Dealer).await.unwrap();
    socket.send(&[bytes::Bytes::new(), bytes::Bytes::copy_from_slice(&start.to_be_bytes())]).await.unwrap();
    let mut answers = Vec::new();
    loop {
        let frames = tokio::time::timeout(Duration::from_secs(5), socket.recv()).await.unwrap().unwrap();
        assert_eq!((frames.len(), frames[0].len()), (4, 0), "an empty delimiter, topic, sequence, payload");
        let sequence = i64::from_be_bytes(frames[2].as_ref().try_into().unwrap());
        answers.push((sequence, frames[3].to_vec()));
        if sequence == -1 {
            return answers;
        }
    }
}

#[tokio::test]
async fn stored_blocks_are_published_in_vllms_format() {
    let bench = SimWorkerFixture::new().await;
    let mut listener = EventSubscriber::new(&bench).await;
    let prompt = words(1, 20);
    let mut ask = completion(&prompt, 1);
    ask["cache_salt"] = json!("tenant-a");
    bench.ask("/v1/completions", ask).await;
    let (topic, sequence, (time, events, rank)) = listener.next().await;
    assert_eq!(topic, format!("kv@{}@tiny", bench.worker.address()));
    assert_eq!((sequence, rank), (0, 0));
    assert!(time > 1.6e9);
    let DecodedEvent::BlockStored {
        block_hashes, parent_block_hash, token_ids, block_size, medium, extra_keys, ..
    } = &events[0]
    else {
        panic!("{events:?}")
    };
    assert_eq!((block_hashes.len(), parent_block_hash, *block_size), (2, &None, 8));
    assert_eq!((token_ids.as_slice(), medium.as_str()), (&prompt[..16], "GPU"));
    assert_eq!(extra_keys, &[Some(vec!["tenant-a".to_owned()]), None]);
}

#[tokio::test]
async fn adapter_blocks_are_separate_and_name_their_adapter() {
    let bench = SimWorkerFixture::with(SimOptions { adapters: vec!["poet".into()], ..options() }).await;
    let mut listener = EventSubscriber::new(&bench).await;
    let prompt = words(1, 20);
    let mut told = Vec::new();
    for model in ["tiny", "poet", "poet"] {
        let mut ask = completion(&prompt, 1);
        ask["model"] = json!(model);
        ask["cache_salt"] = json!("s");
        let answer = bench.ask("/v1/completions", ask).await;
        assert_eq!(answer["model"], model);
        told.push(answer["usage"]["prompt_tokens_details"]["cached_tokens"].clone());
    }
    assert_eq!(told, [0, 0, 16], "a prompt is found under its own adapter only");
    let (_, _, (_, plain, _)) = listener.next().await;
    let (_, _, (_, adapted, _)) = listener.next().await;
    let DecodedEvent::BlockStored { block_hashes, lora_id, lora_name, extra_keys, .. } = &adapted[0] else {
        panic!("{adapted:?}")
    };
    let whose = |name: &[&str]| Some(name.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>());
    assert_eq!((lora_name.as_deref(), lora_id.is_some_and(|id| id > 0)), (Some("poet"), true));
    assert_eq!(extra_keys, &[whose(&["poet", "s"]), whose(&["poet"])]);
    let DecodedEvent::BlockStored { block_hashes: own, lora_id, lora_name, .. } = &plain[0] else {
        panic!("{plain:?}")
    };
    assert_eq!((lora_id, lora_name), (&None, &None));
    assert!(own.iter().all(|hash| !block_hashes.contains(hash)));
}

#[test]
fn published_batch_equals_vllms_bytes() {
    use engine_model::{PrefixCacheChange, StoredBlocks};
    // Captured from vLLM 0.32: one block of 32 tokens, without a parent.
    let captured = "93cb41dac03d9917ee59918ba474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657391cf557ec5768b\
        00bda7b1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f696473dc0020cd01f7cd01fecd0205cd020ccd0213cd021acd02\
        21cd0228cd022fcd0236cd023dcd0244cd024bcd0252cd0259cd0260cd0267cd026ecd0275cd027ccd0283cd028acd0291cd0298cd029f\
        cd02a6cd02adcd02b4cd02bbcd02c2cd02c9cd02d0aa626c6f636b5f73697a6520a76c6f72615f6964c0a66d656469756da3475055a96c\
        6f72615f6e616d65c0aa65787472615f6b65797391c0a967726f75705f69647800b26b765f63616368655f737065635f6b696e64ae6675\
        6c6c5f617474656e74696f6e00";
    let stored = StoredBlocks {
        hashes: vec![6160578453218311591],
        parent: None,
        tokens: (0..32).map(|at| 503 + 7 * at).collect(),
        salt: None,
        adapter: None,
    };
    let own = crate::sim::event_frames::encode(
        f64::from_bits(0x41da_c03d_9917_ee59),
        &[PrefixCacheChange::Stored(stored)],
        32,
    );
    let own: String = own.iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(own, captured.replace([' ', '\n'], ""));
}

#[tokio::test]
async fn subscriber_sees_stores_evictions_and_resets() {
    let small = EngineProfile { num_gpu_blocks: 40, max_model_len: 300, ..profile() };
    let bench = SimWorkerFixture::with(SimOptions { profile: small, ..options() }).await;
    let mut listener = EventSubscriber::new(&bench).await;
    for seed in 0..4 {
        bench.ask("/v1/completions", completion(&words(seed, 90), 20)).await;
    }
    assert!(bench.ask("/reset_prefix_cache", json!({})).await["success"].as_bool().unwrap());
    bench.ask("/v1/completions", completion(&words(9, 16), 1)).await;
    let (mut held, mut expected, mut removed) = (HashMap::new(), 0, 0);
    loop {
        let (_, sequence, (_, events, _)) = listener.next().await;
        assert_eq!(sequence, expected);
        expected += 1;
        let cleared = events.contains(&DecodedEvent::AllBlocksCleared {});
        for event in events {
            match event {
                DecodedEvent::BlockStored { block_hashes, parent_block_hash, .. } => {
                    assert!(parent_block_hash.is_none_or(|parent| held.contains_key(&parent)), "parents are known");
                    block_hashes.into_iter().for_each(|hash| *held.entry(hash).or_insert(0) += 1);
                }
                DecodedEvent::BlockRemoved { block_hashes } => {
                    removed += 1;
                    let count = held.get_mut(&block_hashes[0]).expect("what is removed was stored");
                    *count -= 1;
                    held.retain(|_, count| *count > 0);
                }
                DecodedEvent::AllBlocksCleared {} => held.clear(),
            }
        }
        if cleared {
            break;
        }
    }
    assert!(removed > 0);
    assert_eq!(held.len(), 2, "only the last prompt's blocks are left");
}

#[tokio::test]
async fn replay_sends_everything_from_a_sequence_on() {
    let bench = SimWorkerFixture::new().await;
    for seed in 0..3 {
        bench.ask("/v1/completions", completion(&words(seed, 20), 1)).await;
    }
    let all = replay(&bench, 0).await;
    assert_eq!(all.iter().map(|(sequence, _)| *sequence).collect::<Vec<_>>(), [0, 1, 2, -1]);
    assert!(all[3].1.is_empty());
    assert_eq!(replay(&bench, 2).await, all[2..]);
    assert_eq!(replay(&bench, 77).await.len(), 1);
    let batch: DecodedBatch = rmp_serde::from_slice(&all[0].1).unwrap();
    assert!(matches!(&batch.1[0], DecodedEvent::BlockStored { token_ids, .. } if token_ids == &words(0, 20)[..16]));
}

#[tokio::test]
async fn full_buffer_makes_the_replay_start_later() {
    let mut options = options();
    options.events.buffer = 2;
    let bench = SimWorkerFixture::with(options).await;
    for seed in 0..5 {
        bench.ask("/v1/completions", completion(&words(seed, 20), 1)).await;
    }
    let kept: Vec<i64> = replay(&bench, 0).await.into_iter().map(|(sequence, _)| sequence).collect();
    assert_eq!(kept, [3, 4, -1]);
}

#[tokio::test]
async fn faults_affect_live_batches_and_spare_replayed_ones() {
    let mut options = options();
    options.events.fault = "duplicate=2,gap=3".parse().unwrap();
    let bench = SimWorkerFixture::with(options).await;
    let mut listener = EventSubscriber::new(&bench).await;
    for seed in 0..6 {
        bench.ask("/v1/completions", completion(&words(seed, 20), 1)).await;
    }
    let mut heard = Vec::new();
    for _ in 0..5 {
        heard.push(listener.next().await.1);
    }
    assert_eq!(heard, [0, 1, 1, 3, 3]);
    assert_eq!(replay(&bench, 0).await.len(), 7, "replay has all six");
}

#[test]
fn event_faults_are_parsed_or_refused() {
    let fault: EventFault = "gap=5".parse().unwrap();
    assert_eq!((fault.gap.map(u64::from), fault.duplicate), (Some(5), None));
    for wrong in ["", "gap", "gap=0", "gap=x", "lose=3", "gap=1;duplicate=2"] {
        assert!(wrong.parse::<EventFault>().is_err(), "{wrong}");
    }
}

#[tokio::test]
async fn consumer_publishes_received_blocks() {
    let (p, d) = (SimWorkerFixture::new().await, SimWorkerFixture::new().await);
    let mut listener = EventSubscriber::new(&d).await;
    let prompt = words(1, 75);
    let params = transfers::produce(&p, &prompt).await;
    let mut ask = completion(&prompt, 1);
    ask["kv_transfer_params"] = params;
    d.ask("/v1/completions", ask).await;
    let (_, _, (_, events, _)) = listener.next().await;
    assert!(
        matches!(&events[0], DecodedEvent::BlockStored { token_ids, .. } if token_ids == &prompt[..72]),
        "{events:?}"
    );
}

#[tokio::test]
async fn event_sources_are_listed_in_vllms_format() {
    let bench = SimWorkerFixture::new().await;
    let sources: Value = serde_json::from_str(&bench.get("/kv_event_sources").await.1).unwrap();
    let source = &sources["0"];
    assert_eq!(source["publisher"], "zmq");
    assert_eq!(source["endpoint"], bench.worker.events_endpoint());
    assert_eq!(source["replay_endpoint"], bench.worker.replay_endpoint());
}
