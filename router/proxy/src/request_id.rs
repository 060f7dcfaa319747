//! Ids of requests, as the router gives them and as headers carry them.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher as _;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};

use http::{HeaderName, HeaderValue};
use vocabulary::RequestId;

/// Header of the request id.
pub(crate) const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// Returns an id as a header value.
pub(crate) fn id_value(id: RequestId) -> HeaderValue {
    HeaderValue::try_from(id.to_string()).expect("ids are plain text")
}

/// Returns a new request id: unique across processes and restarts, and not guessable.
pub fn new_request_id() -> RequestId {
    static BOOT: LazyLock<(RandomState, RandomState)> = LazyLock::new(Default::default);
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let n = NEXT.fetch_add(1, Ordering::Relaxed);
    RequestId((u128::from(BOOT.0.hash_one(n)) << 64) | u128::from(BOOT.1.hash_one(n)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn request_ids_are_unique() {
        let ids: std::collections::HashSet<_> = (0..1000).map(|_| new_request_id()).collect();
        assert_eq!(ids.len(), 1000);
    }
}
