//! Counts the bytes of bodies that are scanned, validated, compared or looked up, with the feature `count-bytes`. What
//! tokenizers, hashes and sockets read is not counted. A test holds the count to what is new in a body.

#[cfg(feature = "count-bytes")]
static VISITED: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);

/// Counts bytes that are visited. Does nothing without the feature.
#[inline]
pub fn count_visited(bytes: usize) {
    #[cfg(feature = "count-bytes")]
    VISITED.fetch_add(bytes as u64, std::sync::atomic::Ordering::Relaxed);
    #[cfg(not(feature = "count-bytes"))]
    let _ = bytes;
}

/// Returns how many bytes this process has visited.
#[cfg(feature = "count-bytes")]
pub fn visited_bytes() -> u64 {
    VISITED.load(std::sync::atomic::Ordering::Relaxed)
}
