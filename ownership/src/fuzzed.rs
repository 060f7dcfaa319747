//! What a node makes of bytes that a caller sends, without a socket and without a ledger: the greeting, then frames, then what
//! is asked in them. For fuzz targets. Anything may be refused; nothing may panic, or take memory that the bytes do not
//! account for.

use bytes::Bytes;
use consensus::Levels;
use futures::FutureExt;
use ledger::Submission;
use openraft::raft::{AppendEntriesRequest, TransferLeaderRequest, VoteRequest};
use serde::de::DeserializeOwned;
use vocabulary::{Incarnation, NodeId, WorkerId};

use crate::joining::{Application, Enrolment};
use crate::members::MemberChange;
use crate::node_folder::ClusterId;
use crate::peers::frame::{self, Frame};
use crate::peers::handshake::{Callee, Hello, Retired, Welcome, hear, judge, say};
use crate::peers::{self, Method, PeerError};
use crate::raft::Types;
use crate::snapshot_stream::SnapshotHead;
use crate::terms::{self, MAX_JUMP, Names};

/// The node that is called: its term, and what it says of itself.
const OWN_TERM: u64 = 7;
const LEVELS: Levels = Levels { lowest: 1, highest: 2 };
const OWN: Welcome = Welcome { cluster: ClusterId(7), node: NodeId(1), levels: LEVELS };

/// Reads what a caller sends. Panics where something that must hold does not.
pub fn take_caller(bytes: &[u8]) {
    let mut from = bytes;
    match hear::<Hello, _>(&mut from).now_or_never() {
        Some(Ok(hello)) => greeted(&hello),
        Some(Err(_)) => from = bytes,
        None => panic!("what is there already is waited for"),
    }
    loop {
        let before = from;
        let Some(read) = frame::read(&mut from).now_or_never() else { panic!("what is there already is waited for") };
        let Ok(Some(frame)) = read else { return };
        let taken = &before[..before.len() - from.len()];
        assert!(frame.payload.len() <= taken.len(), "bytes account for all");
        let mut again = Vec::new();
        let written = frame::write(&mut again, &frame).now_or_never();
        assert!(matches!(written, Some(Ok(()))) && again == taken, "a frame is written as it was read");
        // Why it is refused is for whoever sent it.
        drop(understood(&frame));
    }
}

fn greeted(hello: &Hello) {
    let callee = Callee { welcome: &OWN, level: 2, is_retired: Retired::No };
    if judge(hello, callee).is_ok() {
        assert!(hello.node.is_none() || hello.cluster == Some(OWN.cluster), "it has not named its cluster");
        assert!(hello.node != Some(OWN.node), "it is this node itself");
    }
    let mut wire = Vec::new();
    let said = say(&mut wire, hello).now_or_never();
    assert!(matches!(said, Some(Ok(()))));
    // Longer than it came, it may be longer than a greeting may be.
    if let Some(Ok(again)) = hear::<Hello, _>(&mut wire.as_slice()).now_or_never() {
        assert_eq!(again, *hello);
    }
}

/// Reads what a frame asks, as who answers it does.
fn understood(Frame { method, payload, .. }: &Frame) -> Result<(), PeerError> {
    let Some(method) = Method::from_repr(*method) else { return Ok(()) };
    match method {
        Method::Append | Method::AppendStream => plausible::<AppendEntriesRequest<Types>>(payload),
        Method::Vote | Method::PreVote => plausible::<VoteRequest<Types>>(payload),
        Method::TransferLeader => plausible::<TransferLeaderRequest<Types>>(payload),
        Method::Snapshot => {
            let SnapshotHead { vote, meta, .. } = peers::read(payload)?;
            believed(&(vote, meta.last_log_id));
            Ok(())
        }
        Method::Submit => known::<Vec<Submission>>(payload),
        Method::Alive => known::<Vec<(WorkerId, Incarnation)>>(payload),
        Method::Admit => known::<Application>(payload),
        Method::Enrol => known::<Enrolment>(payload),
        Method::Change => known::<MemberChange>(payload),
        Method::ReadIndex | Method::Members | Method::Exchange | Method::Residency | Method::Prompts => Ok(()),
    }
}

fn known<M: DeserializeOwned>(payload: &Bytes) -> Result<(), PeerError> {
    peers::read::<M>(payload).map(drop)
}

fn plausible<M: DeserializeOwned + Names>(payload: &Bytes) -> Result<(), PeerError> {
    believed(&peers::read::<M>(payload)?);
    Ok(())
}

/// What Raft would hear names no term from which no election could be held any more.
fn believed(message: &impl Names) {
    if terms::check(OWN_TERM, message).is_ok() {
        assert!(message.named().iter().all(|(term, _)| *term <= OWN_TERM + MAX_JUMP));
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use consensus::{LogId, Proposal, Vote};
    use ledger::{Command, Entry};
    use openraft::type_config::alias::LeaderIdOf;
    use openraft::vote::RaftLeaderIdExt;
    use serde::Serialize;
    use vocabulary::{ClientId, ClientSerial, LedgerTime, SessionId};

    use super::*;
    use crate::peers::Lane;
    use crate::peers::frame::Kind;
    use crate::peers::handshake::PROTOCOL;
    use crate::raft::LogEntry;

    fn at(term: u64, index: u64) -> LogId {
        LogId::new(LeaderIdOf::<Types>::new_committed(term, 2), index)
    }

    /// A greeting, and one question.
    fn asks(method: Method, question: &impl Serialize) -> Vec<u8> {
        let (cluster, node, to) = (Some(OWN.cluster), Some(NodeId(2)), Some(OWN.node));
        let hello = Hello { protocol: PROTOCOL, cluster, node, to, levels: LEVELS, lane: Lane::Raft };
        let payload = Bytes::from(rmp_serde::to_vec(question).unwrap());
        let frame = Frame { kind: Kind::Ask, method: method as u8, exchange: 1, payload };
        let mut wire = Vec::new();
        say(&mut wire, &hello).now_or_never().unwrap().unwrap();
        frame::write(&mut wire, &frame).now_or_never().unwrap().unwrap();
        wire
    }

    fn submission(command: Command) -> Submission {
        Submission { client: ClientId(1), serial: ClientSerial(1), command }
    }

    fn corpus() -> Vec<(&'static str, Vec<u8>)> {
        let vote = |term, index| VoteRequest::<Types> {
            leadership_transfer: true,
            ..VoteRequest::new(Vote::new(term, 2), Some(at(term - 1, index)))
        };
        let entry = Entry { time: LedgerTime(1), submissions: vec![submission(Command::CloseSession(SessionId(1)))] };
        let entry = openraft::EntryPayload::Normal(Proposal(std::sync::Arc::new(entry)));
        let entries = vec![openraft::entry::RaftEntry::new(at(7, 2), entry)];
        let append = |entries: Vec<LogEntry>| AppendEntriesRequest::<Types> {
            vote: Vote::new_committed(7, 2),
            prev_log_id: Some(at(7, 1)),
            entries,
            leader_commit: Some(at(7, 1)),
        };
        let deep = (0..200).fold(Command::Barrier, |inner, _| Command::Batch(vec![inner]));
        let enrolment = Enrolment { node: NodeId(2), address: "127.0.0.1:7400".into(), levels: LEVELS };
        vec![
            ("the_audits_brick", asks(Method::Vote, &vote(u64::MAX, 1 << 62))),
            ("vote", asks(Method::Vote, &vote(8, 1))),
            ("pre_vote", asks(Method::PreVote, &vote(8, 1))),
            ("append", asks(Method::Append, &append(entries))),
            ("heartbeat", asks(Method::AppendStream, &append(Vec::new()))),
            ("deep_batch", asks(Method::Submit, &vec![submission(deep)])),
            ("alive", asks(Method::Alive, &vec![(WorkerId(1), Incarnation(2))])),
            ("enrol", asks(Method::Enrol, &enrolment)),
            ("only_a_length", vec![0xff; 14]),
            ("http", b"GET / HTTP/1.1\r\n\r\n".to_vec()),
        ]
    }

    #[test]
    fn the_corpus_is_what_nodes_say_and_is_read_or_refused() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fuzz/corpus/nodes");
        for (name, bytes) in corpus() {
            if std::env::var_os("WRITE_CORPUS").is_some() {
                std::fs::create_dir_all(&folder).unwrap();
                std::fs::write(folder.join(name), &bytes).unwrap();
            }
            assert_eq!(std::fs::read(folder.join(name)).unwrap(), bytes, "{name}; WRITE_CORPUS=1 writes it anew");
        }
        for path in std::fs::read_dir(folder).unwrap() {
            take_caller(&std::fs::read(path.unwrap().path()).unwrap());
        }
    }

    #[test]
    fn every_cut_and_every_changed_byte_is_read_or_refused() {
        for (_, bytes) in corpus() {
            for at in 0..bytes.len() {
                take_caller(&bytes[..at]);
                for change in [0x00, 0x7f, 0x80, 0xc1, 0xdd, 0xff] {
                    let mut changed = bytes.clone();
                    changed[at] = change;
                    take_caller(&changed);
                }
            }
        }
    }
}
