//! Methods of calls between nodes. The numbers are part of the wire format and never change their meaning.

use serde::{Deserialize, Serialize};
use strum::VariantArray as _;

/// Subject of calls between routers outside Raft.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize, strum::VariantArray)]
pub enum RouterTopic {
    /// Requests that routers dispatched and finished.
    Exchange,
    /// Which blocks routers believe to be where.
    Residency,
    /// Token ids of prompts, which engines need to move the prompts' blocks.
    Prompts,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, strum::FromRepr)]
#[repr(u8)]
pub(crate) enum PeerMethod {
    /// Log entries or a heartbeat; a single request.
    Append = 1,
    /// Log entries; a stream of requests on one exchange.
    AppendStream = 2,
    Vote = 3,
    PreVote = 4,
    /// A snapshot: its header, then its bytes.
    Snapshot = 5,
    TransferLeader = 6,
    /// Commands for the leader.
    Submit = 16,
    /// Read index for a linearizable read.
    ReadIndex = 17,
    /// Incarnations of workers that were reached.
    Alive = 18,
    /// Request of a new node for an id.
    Admit = 19,
    /// Request of a new node with an id to be added, or of a known one to update its address.
    Enrol = 20,
    Change = 21,
    /// Members of the cluster, as the leader knows them.
    Members = 22,
    /// `RouterTopic::Exchange`.
    Exchange = 32,
    /// `RouterTopic::Residency`.
    Residency = 33,
    /// `RouterTopic::Prompts`.
    Prompts = 34,
}

impl PeerMethod {
    /// Returns whether only a member with a running Raft answers this. A member that has stopped counts as unreachable.
    pub(crate) fn needs_raft(self) -> bool {
        use PeerMethod::{Append, AppendStream, Members, PreVote, Snapshot, TransferLeader, Vote};
        matches!(self, Append | AppendStream | Vote | PreVote | Snapshot | TransferLeader | Members)
    }

    pub(crate) fn of_topic(topic: RouterTopic) -> Self {
        match topic {
            RouterTopic::Exchange => PeerMethod::Exchange,
            RouterTopic::Residency => PeerMethod::Residency,
            RouterTopic::Prompts => PeerMethod::Prompts,
        }
    }

    /// Returns the topic of a call between routers.
    pub(crate) fn topic(self) -> Option<RouterTopic> {
        RouterTopic::VARIANTS.iter().copied().find(|topic| Self::of_topic(*topic) == self)
    }
}
