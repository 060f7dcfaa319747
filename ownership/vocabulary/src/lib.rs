//! Types that all crates share: ids, units, epochs, the block-hash chain, the network of an address, the router's view of
//! a worker, and values of settings, flags and the operator API.
//!
//! No IO, no clock, no randomness: everything here is a value or a pure function of values.

mod chain;
mod epoch;
pub mod flags;
mod hex;
mod host_network;
mod ids;
mod namespace;
mod routing_mode;
mod secret;
mod settings_units;
mod time_text;
mod units;
mod untrusted_text;
mod visited_bytes;
mod worker_url;
mod worker_view;

pub use chain::{BlockHash, HashSeed, PrefixChain, PrefixId};
pub use epoch::Epoch;
pub use host_network::network_of;
pub use ids::{
    ArtifactGroupId, ArtifactId, ClientId, ClientSerial, DpRank, Incarnation, ModelId, NodeId, Owner, ParseIdError,
    RequestId, SessionId, TenantId, WorkerId,
};
pub use namespace::{ModelNamespace, RequestNamespace};
pub use routing_mode::RoutingMode;
pub use secret::Secret;
pub use settings_units::{
    ByteCount, ByteCountError, TimeSpan, TimeSpanError, bandwidth_with_unit, bytes_with_unit, micros_f64_with_unit,
    micros_with_unit, optional_micros_with_unit, transfer_time,
};
pub use time_text::{UtcTime, UtcTimeError};
pub use units::{Blocks, Bytes, LedgerTime, Micros, Tokens};
pub use untrusted_text::truncated;
pub use visited_bytes::count_visited;
#[cfg(feature = "count-bytes")]
pub use visited_bytes::visited_bytes;
pub use worker_url::{WorkerUrl, WorkerUrlError};
pub use worker_view::{
    EngineSpeed, KvIndexState, KvLink, KvLinkCapability, Overlap, Tier, WorkerCapacity, WorkerHealth, WorkerLoad,
    WorkerRole, WorkerView,
};
