//! Properties that must hold, one per file. Each check takes facts and decides whether they are allowed.

pub(crate) mod agreement;
pub(crate) mod durability;
pub(crate) mod fencing_tokens;
pub(crate) mod joint_configs;
pub(crate) mod leases;
pub(crate) mod levels;
pub(crate) mod lock;
pub(crate) mod log_order;
pub(crate) mod node_ids;
pub(crate) mod serials;
pub(crate) mod shortages;
pub(crate) mod staleness;
pub(crate) mod watches;
