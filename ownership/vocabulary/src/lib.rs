//! The words every room shares: ids, units, epochs, the block-hash chain, and how a worker looks from outside.
//!
//! No IO, no clock, no randomness: everything here is a value or a pure function of values.

mod chain;
mod epoch;
mod fleet;
mod hex;
mod ids;
mod namespace;
mod units;

pub use chain::{BlockHash, Chain, PrefixId, Seed};
pub use epoch::Epoch;
pub use fleet::{Capacity, Carries, Health, Knowledge, Link, Load, Overlap, Role, Speeds, Tier, WorkerView};
pub use ids::{
    ArtifactId, ClientId, ClientSerial, DpRank, GroupId, Incarnation, ModelId, NodeId, Owner, ParseIdError, RequestId,
    SessionId, TenantId, WorkerId,
};
pub use namespace::{Namespace, RootKeys};
pub use units::{Blocks, Bytes, LedgerTime, Micros, Tokens};
