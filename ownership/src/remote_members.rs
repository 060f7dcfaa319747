//! Cache of members' addresses, as other members report them.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::sync::Mutex;
use tokio::time::Instant;
use vocabulary::NodeId;

/// How long such an answer is cached.
const CACHE_TTL: Duration = Duration::from_secs(10);

/// Minimum time between two rounds of questions, whatever the call rate.
const MIN_FETCH_INTERVAL: Duration = Duration::from_secs(1);

/// Cache of members' addresses, as other members report them.
#[derive(Debug, Default)]
pub(crate) struct MemberAddressCache(Mutex<Option<FetchedMembers>>);

#[derive(Debug)]
struct FetchedMembers {
    fetched_at: Instant,
    members: BTreeMap<NodeId, String>,
}

impl MemberAddressCache {
    /// Returns a node's address as other members report it; `None` if none of them knows the node. `fetch` asks them;
    /// it is awaited only if the cached answer is too old.
    pub(crate) async fn address(
        &self,
        node: NodeId,
        fetch: impl Future<Output = BTreeMap<NodeId, String>>,
    ) -> Option<String> {
        let mut cache = self.0.lock().await;
        if let Some(FetchedMembers { fetched_at: at, members }) = &*cache {
            match members.get(&node) {
                Some(address) if at.elapsed() < CACHE_TTL => return Some(address.clone()),
                None if at.elapsed() < MIN_FETCH_INTERVAL => return None,
                _ => {}
            }
        }
        let members = fetch.await;
        let address = members.get(&node).cloned();
        *cache = Some(FetchedMembers { fetched_at: Instant::now(), members });
        address
    }
}
