//! Entry point for fuzz targets: processes a caller's bytes as a node would, without a socket or a ledger.
//!
//! The bytes are a greeting, then frames, then the requests in them. Anything may be refused, but nothing may panic or
//! allocate more memory than the bytes account for.

use bytes::Bytes;
use consensus::SupportedLevels;
use futures::FutureExt;
use ledger::Submission;
use openraft::raft::{AppendEntriesRequest, TransferLeaderRequest, VoteRequest};
use serde::de::DeserializeOwned;
use vocabulary::{Incarnation, NodeId, WorkerId};

use crate::joining::JoinRequest;
use crate::members::{EnrolRequest, MemberChange};
use crate::node_folder::ClusterId;
use crate::peers::frame::{self, PeerFrame};
use crate::peers::handshake::{
    Hello, HelloCheckInputs, RemovalStatus, Welcome, check_hello, receive_message, send_message,
};
use crate::peers::{self, PeerError, PeerMethod};
use crate::raft::TokioTypeConfig;
use crate::snapshot_stream::SnapshotStreamHeader;
use crate::terms::{self, MAX_TERM_JUMP, MessagePositions};

/// Term of the called node.
const OWN_TERM: u64 = 7;
const LEVELS: SupportedLevels = SupportedLevels { lowest: 1, highest: 2 };
const OWN: Welcome = Welcome { cluster: ClusterId(7), node: NodeId(1), levels: LEVELS };

/// Reads what a caller sends. Panics if an invariant is violated.
pub fn fuzz_connection(bytes: &[u8]) {
    let mut from = bytes;
    match receive_message::<Hello, _>(&mut from).now_or_never() {
        Some(Ok(hello)) => admit_hello(&hello),
        Some(Err(_)) => from = bytes,
        None => panic!("what is there already is waited for"),
    }
    loop {
        let before = from;
        let Some(read) = frame::read(&mut from).now_or_never() else { panic!("what is there already is waited for") };
        let Ok(Some(frame)) = read else { return };
        let consumed = &before[..before.len() - from.len()];
        assert!(frame.payload.len() <= consumed.len(), "bytes account for all");
        let mut again = Vec::new();
        let written = frame::write(&mut again, &frame).now_or_never();
        assert!(matches!(written, Some(Ok(()))) && again == consumed, "a frame is written as it was read");
        // The reason of a refusal matters only to the sender.
        drop(check_frame(&frame));
    }
}

fn admit_hello(hello: &Hello) {
    let callee = HelloCheckInputs { welcome: &OWN, level: 2, is_retired: RemovalStatus::No };
    if check_hello(hello, callee).is_ok() {
        assert!(hello.node.is_none() || hello.cluster == Some(OWN.cluster), "it has not named its cluster");
        assert!(hello.node != Some(OWN.node), "it is this node itself");
    }
    let mut wire = Vec::new();
    let response = send_message(&mut wire, hello).now_or_never();
    assert!(matches!(response, Some(Ok(()))));
    // The re-encoded greeting may be longer than allowed.
    if let Some(Ok(again)) = receive_message::<Hello, _>(&mut wire.as_slice()).now_or_never() {
        assert_eq!(again, *hello);
    }
}

/// Decodes the request in a frame as its handler does.
fn check_frame(PeerFrame { method, payload, .. }: &PeerFrame) -> Result<(), PeerError> {
    let Some(method) = PeerMethod::from_repr(*method) else { return Ok(()) };
    match method {
        PeerMethod::Append | PeerMethod::AppendStream => {
            check_message::<AppendEntriesRequest<TokioTypeConfig>>(payload)
        }
        PeerMethod::Vote | PeerMethod::PreVote => check_message::<VoteRequest<TokioTypeConfig>>(payload),
        PeerMethod::TransferLeader => check_message::<TransferLeaderRequest<TokioTypeConfig>>(payload),
        PeerMethod::Snapshot => {
            let SnapshotStreamHeader { vote, meta, .. } = peers::decode(payload)?;
            check_terms(&(vote, meta.last_log_id));
            Ok(())
        }
        PeerMethod::Submit => check_decodes::<Vec<Submission>>(payload),
        PeerMethod::Alive => check_decodes::<Vec<(WorkerId, Incarnation)>>(payload),
        PeerMethod::Admit => check_decodes::<JoinRequest>(payload),
        PeerMethod::Enrol => check_decodes::<EnrolRequest>(payload),
        PeerMethod::Change => check_decodes::<MemberChange>(payload),
        PeerMethod::ReadIndex
        | PeerMethod::Members
        | PeerMethod::Exchange
        | PeerMethod::Residency
        | PeerMethod::Prompts => Ok(()),
    }
}

fn check_decodes<M: DeserializeOwned>(payload: &Bytes) -> Result<(), PeerError> {
    peers::decode::<M>(payload).map(drop)
}

fn check_message<M: DeserializeOwned + MessagePositions>(payload: &Bytes) -> Result<(), PeerError> {
    check_terms(&peers::decode::<M>(payload)?);
    Ok(())
}

/// Checks that Raft would get no term that makes further elections impossible.
fn check_terms(message: &impl MessagePositions) {
    if terms::check(OWN_TERM, message).is_ok() {
        assert!(message.log_positions().iter().all(|(term, _)| *term <= OWN_TERM + MAX_TERM_JUMP));
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use consensus::{LogId, SharedLedgerEntry, Vote};
    use ledger::{Command, LedgerEntry};
    use openraft::type_config::alias::LeaderIdOf;
    use openraft::vote::RaftLeaderIdExt;
    use serde::Serialize;
    use vocabulary::{ClientId, ClientSerial, LedgerTime, SessionId};

    use super::*;
    use crate::peers::Lane;
    use crate::peers::frame::FrameKind;
    use crate::peers::handshake::PROTOCOL;
    use crate::raft::LogEntry;

    fn at(term: u64, index: u64) -> LogId {
        LogId::new(LeaderIdOf::<TokioTypeConfig>::new_committed(term, 2), index)
    }

    /// Builds the bytes of a greeting and one request.
    fn connection_asking(method: PeerMethod, question: &impl Serialize) -> Vec<u8> {
        let (cluster, node, to) = (Some(OWN.cluster), Some(NodeId(2)), Some(OWN.node));
        let hello = Hello { protocol: PROTOCOL, cluster, node, to, levels: LEVELS, lane: Lane::Raft };
        let payload = Bytes::from(rmp_serde::to_vec(question).unwrap());
        let frame = PeerFrame { kind: FrameKind::Ask, method: method as u8, exchange: 1, payload };
        let mut wire = Vec::new();
        send_message(&mut wire, &hello).now_or_never().unwrap().unwrap();
        frame::write(&mut wire, &frame).now_or_never().unwrap().unwrap();
        wire
    }

    fn submission(command: Command) -> Submission {
        Submission { client: ClientId(1), serial: ClientSerial(1), command }
    }

    fn corpus() -> Vec<(&'static str, Vec<u8>)> {
        let vote = |term, index| VoteRequest::<TokioTypeConfig> {
            leadership_transfer: true,
            ..VoteRequest::new(Vote::new(term, 2), Some(at(term - 1, index)))
        };
        let entry =
            LedgerEntry { time: LedgerTime(1), submissions: vec![submission(Command::CloseSession(SessionId(1)))] };
        let entry = openraft::EntryPayload::Normal(SharedLedgerEntry(std::sync::Arc::new(entry)));
        let entries = vec![openraft::entry::RaftEntry::new(at(7, 2), entry)];
        let append = |entries: Vec<LogEntry>| AppendEntriesRequest::<TokioTypeConfig> {
            vote: Vote::new_committed(7, 2),
            prev_log_id: Some(at(7, 1)),
            entries,
            leader_commit: Some(at(7, 1)),
        };
        let deep = (0..200).fold(Command::Barrier, |inner, _| Command::Batch(vec![inner]));
        let enrolment = EnrolRequest { node: NodeId(2), address: "127.0.0.1:7400".into(), levels: LEVELS };
        vec![
            ("the_audits_brick", connection_asking(PeerMethod::Vote, &vote(u64::MAX, 1 << 62))),
            ("vote", connection_asking(PeerMethod::Vote, &vote(8, 1))),
            ("pre_vote", connection_asking(PeerMethod::PreVote, &vote(8, 1))),
            ("append", connection_asking(PeerMethod::Append, &append(entries))),
            ("heartbeat", connection_asking(PeerMethod::AppendStream, &append(Vec::new()))),
            ("deep_batch", connection_asking(PeerMethod::Submit, &vec![submission(deep)])),
            ("alive", connection_asking(PeerMethod::Alive, &vec![(WorkerId(1), Incarnation(2))])),
            ("enrol", connection_asking(PeerMethod::Enrol, &enrolment)),
            ("only_a_length", vec![0xff; 14]),
            ("http", b"GET / HTTP/1.1\r\n\r\n".to_vec()),
        ]
    }

    #[test]
    fn every_corpus_connection_is_read_or_refused() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fuzz/corpus/nodes");
        for (name, bytes) in corpus() {
            if std::env::var_os("WRITE_CORPUS").is_some() {
                std::fs::create_dir_all(&folder).unwrap();
                std::fs::write(folder.join(name), &bytes).unwrap();
            }
            assert_eq!(std::fs::read(folder.join(name)).unwrap(), bytes, "{name}; WRITE_CORPUS=1 writes it anew");
        }
        for path in std::fs::read_dir(folder).unwrap() {
            fuzz_connection(&std::fs::read(path.unwrap().path()).unwrap());
        }
    }

    #[test]
    fn every_truncated_or_changed_connection_is_read_or_refused() {
        for (_, bytes) in corpus() {
            for at in 0..bytes.len() {
                fuzz_connection(&bytes[..at]);
                for change in [0x00, 0x7f, 0x80, 0xc1, 0xdd, 0xff] {
                    let mut changed = bytes.clone();
                    changed[at] = change;
                    fuzz_connection(&changed);
                }
            }
        }
    }
}
