//! What nodes ask each other. The numbers go over the wire and never change their meaning.

use strum::VariantArray as _;

use crate::peers::Topic;

#[derive(Clone, Copy, PartialEq, Eq, Debug, strum::FromRepr)]
#[repr(u8)]
pub(crate) enum PeerMethod {
    /// Log entries, or a heartbeat, one request.
    Append = 1,
    /// Log entries, request after request on one exchange.
    AppendStream = 2,
    Vote = 3,
    PreVote = 4,
    /// A snapshot: its head, then its bytes.
    Snapshot = 5,
    TransferLeader = 6,
    /// Commands for the leader.
    Submit = 16,
    /// How far one must have applied for a linearizable read.
    ReadIndex = 17,
    /// Lives of workers that were reached.
    Alive = 18,
    /// A new node asks for an id.
    Admit = 19,
    /// A new node that has written its id down asks to be added; a known one tells its new address.
    Enrol = 20,
    Change = 21,
    /// Who belongs to the cluster, as the leader knows it.
    Members = 22,
    /// `Topic::Exchange`.
    Exchange = 32,
    /// `Topic::Residency`.
    Residency = 33,
    /// `Topic::PromptStore`.
    Prompts = 34,
}

impl PeerMethod {
    /// Whether only a member whose Raft runs answers this: one that has stopped counts as one that does not answer.
    pub(crate) fn needs_raft(self) -> bool {
        use PeerMethod::{Append, AppendStream, Members, PreVote, Snapshot, TransferLeader, Vote};
        matches!(self, Append | AppendStream | Vote | PreVote | Snapshot | TransferLeader | Members)
    }

    pub(crate) fn of_topic(topic: Topic) -> Self {
        match topic {
            Topic::Exchange => PeerMethod::Exchange,
            Topic::Residency => PeerMethod::Residency,
            Topic::Prompts => PeerMethod::Prompts,
        }
    }

    /// The topic of a call between routers.
    pub(crate) fn topic(self) -> Option<Topic> {
        Topic::VARIANTS.iter().copied().find(|topic| Self::of_topic(*topic) == self)
    }
}
