//! A caller that implements the nodes' protocol by hand, to send what no node would.

use std::io;

use consensus::{LogEntry, LogId, SupportedLevels, Vote};
use openraft::entry::RaftEntry as _;
use openraft::impls::TokioRuntime;
use openraft::raft::{AppendEntriesRequest, VoteRequest};
use openraft::type_config::alias::LeaderIdOf;
use openraft::vote::RaftLeaderIdExt;
use ownership::{ClusterId, PeerError};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;

pub(crate) const APPEND: u8 = 1;
pub(crate) const VOTE: u8 = 3;
pub(crate) const TRANSFER_LEADER: u8 = 6;
pub(crate) const ENROL: u8 = 20;
pub(crate) const MEMBERS: u8 = 22;

const MAGIC: &[u8; 8] = b"OWNPEER\x01";
const ASK: u8 = 9;
const REPLY: u8 = 4;
const FAIL: u8 = 6;

pub(crate) type WireTypeConfig = consensus::TypeConfig<TokioRuntime>;

/// Greeting of a caller.
#[derive(Serialize)]
struct RawHello {
    protocol: u32,
    cluster: Option<ClusterId>,
    node: Option<u64>,
    to: Option<u64>,
    levels: SupportedLevels,
    lane: &'static str,
}

/// The part of the answer that the tests need.
#[derive(Deserialize, Debug)]
pub(crate) struct RawWelcome {
    pub(crate) cluster: ClusterId,
}

pub(crate) struct RawConnection<S> {
    stream: S,
    next: u64,
}

/// Answer of a node to a greeting.
pub(crate) type RawHandshakeResult = Result<RawWelcome, ownership::HandshakeRefusal>;

impl RawConnection<TcpStream> {
    /// Connects and greets as a node of a cluster; both ids are optional.
    pub(crate) async fn greet(
        address: &str,
        cluster: Option<ClusterId>,
        node: Option<u64>,
    ) -> io::Result<(Self, RawHandshakeResult)> {
        RawConnection::greet_over(TcpStream::connect(address).await?, cluster, node).await
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> RawConnection<S> {
    pub(crate) async fn greet_over(
        mut stream: S,
        cluster: Option<ClusterId>,
        node: Option<u64>,
    ) -> io::Result<(Self, RawHandshakeResult)> {
        let levels = SupportedLevels { lowest: 1, highest: ledger::NEXT_LEVEL };
        let hello = RawHello { protocol: 1, cluster, node, to: None, levels, lane: "Call" };
        let body = rmp_serde::to_vec_named(&hello).unwrap();
        stream.write_all(MAGIC).await?;
        stream.write_all(&(body.len() as u32).to_le_bytes()).await?;
        stream.write_all(&body).await?;
        let mut head = [0; 12];
        stream.read_exact(&mut head).await?;
        let mut body = vec![0; u32::from_le_bytes(head[8..].try_into().unwrap()) as usize];
        stream.read_exact(&mut body).await?;
        let greeted = rmp_serde::from_slice(&body).map_err(io::Error::other)?;
        Ok((Self { stream, next: 0 }, greeted))
    }

    pub(crate) fn into_stream(self) -> S {
        self.stream
    }

    /// Sends one request and reads its answer.
    pub(crate) async fn ask<A: DeserializeOwned>(
        &mut self,
        method: u8,
        question: &impl Serialize,
    ) -> io::Result<Result<A, PeerError>> {
        let payload = rmp_serde::to_vec(question).unwrap();
        self.next += 1;
        self.stream.write_all(&(payload.len() as u32).to_le_bytes()).await?;
        self.stream.write_all(&[ASK, method]).await?;
        self.stream.write_all(&self.next.to_le_bytes()).await?;
        self.stream.write_all(&payload).await?;
        loop {
            let mut head = [0; 14];
            self.stream.read_exact(&mut head).await?;
            let mut payload = vec![0; u32::from_le_bytes(head[..4].try_into().unwrap()) as usize];
            self.stream.read_exact(&mut payload).await?;
            match head[4] {
                REPLY => return rmp_serde::from_slice(&payload).map(Ok).map_err(io::Error::other),
                FAIL => return rmp_serde::from_slice(&payload).map(Err).map_err(io::Error::other),
                _ => {}
            }
        }
    }
}

/// Builds a vote request of a node whose log ends at `index`, which claims that the leader named it as successor.
pub(crate) fn vote(term: u64, node: u64, index: u64) -> VoteRequest<WireTypeConfig> {
    let last = LogId::new(LeaderIdOf::<WireTypeConfig>::new_committed(term.saturating_sub(1), node), index);
    VoteRequest { leadership_transfer: true, ..VoteRequest::new(Vote::new(term, node), Some(last)) }
}

/// Builds a message in which a node that says it leads term `leader_term` appends one entry to an empty log.
pub(crate) fn append(leader_term: u64, node: u64, (term, index): (u64, u64)) -> AppendEntriesRequest<WireTypeConfig> {
    let at = LogId::new(LeaderIdOf::<WireTypeConfig>::new_committed(term, node), index);
    AppendEntriesRequest {
        vote: Vote::new_committed(leader_term, node),
        prev_log_id: None,
        entries: vec![LogEntry::new_blank(at)],
        leader_commit: None,
    }
}
