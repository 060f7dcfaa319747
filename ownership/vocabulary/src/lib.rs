//! Types that all crates share: ids, units, epochs, the block-hash chain, the network of an address, and the router's
//! view of a worker.
//!
//! No IO, no clock, no randomness: everything here is a value or a pure function of values.

mod chain;
mod epoch;
mod hex;
mod host_network;
mod ids;
mod namespace;
mod settings_units;
mod units;
mod worker_view;

pub use chain::{BlockHash, HashSeed, PrefixChain, PrefixId};
pub use epoch::Epoch;
pub use host_network::network_of;
pub use ids::{
    ArtifactId, ClientId, ClientSerial, DpRank, GroupId, Incarnation, ModelId, NodeId, Owner, ParseIdError, RequestId,
    SessionId, TenantId, WorkerId,
};
pub use namespace::{ChainNamespace, RootKeys};
pub use settings_units::{
    ByteCount, ByteCountError, TimeSpan, TimeSpanError, bandwidth_with_unit, bytes_with_unit, micros_f64_with_unit,
    micros_with_unit, optional_micros_with_unit, transfer_time,
};
pub use units::{Blocks, Bytes, LedgerTime, Micros, Tokens};
pub use worker_view::{
    EngineSpeed, KvIndexState, KvLink, KvLinkMode, Overlap, Tier, WorkerCapacity, WorkerHealth, WorkerLoad, WorkerRole,
    WorkerView,
};
