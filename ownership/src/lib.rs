//! The quorum that runs the ledger, and the view of it that this node reads.
//!
//! Nothing here decides who owns what; the ledger does. Nothing here waits on a client's request path.

mod view;

pub use ledger;
pub use view::{Quorum, View};
