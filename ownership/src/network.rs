//! A quorum of one has nobody to talk to. Any attempt is answered as unreachable.

use std::fs::File;
use std::future::Future;
use std::io;

use openraft::errors::{RPCError, ReplicationClosed, StreamingError, Unreachable};
use openraft::network::{RPCOption, RaftNetworkFactory, RaftNetworkV2};
use openraft::raft::{AppendEntriesRequest, AppendEntriesResponse, SnapshotResponse, VoteRequest, VoteResponse};
use openraft::type_config::alias::{SnapshotOf, VoteOf};
use openraft::{BasicNode, OptionalSend};

use crate::raft::Types;

/// No peers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Alone;

fn nobody() -> Unreachable<Types> {
    Unreachable::new(&io::Error::new(io::ErrorKind::AddrNotAvailable, "a quorum of one has no peers"))
}

impl RaftNetworkFactory<Types> for Alone {
    type Network = Alone;

    async fn new_client(&mut self, _target: u64, _node: &BasicNode) -> Alone {
        Alone
    }
}

impl RaftNetworkV2<Types> for Alone {
    type SnapshotData = File;

    async fn append_entries(
        &mut self,
        _request: AppendEntriesRequest<Types>,
        _option: RPCOption,
    ) -> Result<AppendEntriesResponse<Types>, RPCError<Types>> {
        Err(RPCError::Unreachable(nobody()))
    }

    async fn vote(
        &mut self,
        _request: VoteRequest<Types>,
        _option: RPCOption,
    ) -> Result<VoteResponse<Types>, RPCError<Types>> {
        Err(RPCError::Unreachable(nobody()))
    }

    async fn full_snapshot(
        &mut self,
        _vote: VoteOf<Types>,
        _snapshot: SnapshotOf<Types, File>,
        _cancel: impl Future<Output = ReplicationClosed> + OptionalSend + 'static,
        _option: RPCOption,
    ) -> Result<SnapshotResponse<Types>, StreamingError<Types>> {
        Err(StreamingError::Unreachable(nobody()))
    }
}
