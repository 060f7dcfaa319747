//! What must hold, one property a file. Each takes facts and says whether they may be.

pub mod agreement;
pub mod durability;
pub mod ids;
pub mod joints;
pub mod leases;
pub mod levels;
pub mod lock;
pub mod order;
pub mod serials;
pub mod staleness;
pub mod tokens;
pub mod watches;
