//! What must hold, one property a file. Each takes facts and says whether they may be.

pub(crate) mod agreement;
pub(crate) mod durability;
pub(crate) mod ids;
pub(crate) mod joints;
pub(crate) mod leases;
pub(crate) mod levels;
pub(crate) mod lock;
pub(crate) mod order;
pub(crate) mod serials;
pub(crate) mod shortages;
pub(crate) mod staleness;
pub(crate) mod tokens;
pub(crate) mod watches;
