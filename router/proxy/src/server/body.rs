//! Reads a request's body: within limits of size and time, decompressed, into one allocation.

use std::io::Read as _;
use std::time::Duration;

use axum::body::Body;
use bytes::Bytes;
use futures::future::Either;
use http::HeaderMap;
use http::header::{CONTENT_ENCODING, EXPECT};
use http_body_util::BodyExt as _;
use hyper::body::Body as _;
use tokio::time::{Instant, timeout, timeout_at};
use vocabulary::RequestId;

use super::ProxyConfig;
use crate::error::ApiError;
use crate::memory_budget::MemoryReservation;
use crate::offload_pool::OffloadPool;
use crate::request_body_cache::MIN_BODY;
use vocabulary::truncated;

/// Maximum ratio of a body's inflated size to its compressed size: conversations reach 10.
const MAX_INFLATION_RATIO: usize = 32;
/// Inflated size that a body of any size may have.
const MIN_INFLATED_LIMIT: usize = 1 << 20;
/// Bytes inflated per step.
const INFLATE_CHUNK_BYTES: usize = 64 << 10;

/// Limits for a body.
#[derive(Clone, Copy, Debug)]
pub struct BodyLimits {
    /// Maximum size after decompression, in bytes.
    pub bytes: usize,
    /// Longest time between two chunks.
    pub pause: Duration,
    /// Timeout for the whole body.
    pub total: Duration,
}

impl From<&ProxyConfig> for BodyLimits {
    fn from(config: &ProxyConfig) -> Self {
        Self { bytes: config.body_limit.0, pause: config.body_idle_timeout.0, total: config.body_timeout.0 }
    }
}

/// Supported content encodings.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum ContentEncoding {
    Plain,
    Gzip,
    Deflate,
}

/// Reads all of `body`. Frames are copied once into one allocation; only a small body of one frame is not copied. Each
/// byte, received or inflated, is reserved in `memory` before it is stored.
pub async fn read_body(
    headers: &HeaderMap,
    body: Body,
    (limits, memory, aside): (BodyLimits, &mut MemoryReservation, (&OffloadPool, RequestId)),
) -> Result<Bytes, ApiError> {
    let too_large = ApiError::BodyTooLarge { limit: limits.bytes };
    let encoding = match encoding(headers) {
        Ok(encoding) => encoding,
        Err(error) => return Err(drain_rejected(headers, body, limits, error)),
    };
    if body.size_hint().lower() > limits.bytes as u64 {
        return Err(drain_rejected(headers, body, limits, too_large));
    }
    let bytes = match receive(body, (limits, &mut *memory)).await? {
        Either::Left(bytes) => bytes,
        Either::Right((rest, error)) => return Err(drain_rejected(headers, rest, limits, error)),
    };
    if encoding == ContentEncoding::Plain {
        return Ok(bytes);
    }
    let mut inflated = memory.sibling();
    let received = std::mem::replace(memory, memory.sibling());
    // Inflating up to the body limit takes too long for an async thread.
    let work = move || {
        let plain = decompress(encoding, &bytes, (limits.bytes, &mut inflated))?;
        drop((bytes, received));
        Ok::<_, ApiError>((plain, inflated))
    };
    let (aside, request) = aside;
    let (plain, inflated) = aside.run((memory.tenant(), request), work).await??;
    *memory = inflated;
    Ok(plain)
}

/// Receives the whole body; returns the rest of one that became too large, with the error.
async fn receive(
    mut body: Body,
    (limits, memory): (BodyLimits, &mut MemoryReservation),
) -> Result<Either<Bytes, (Body, ApiError)>, ApiError> {
    let deadline = Instant::now() + limits.total;
    let expected = usize::try_from(body.size_hint().lower()).unwrap_or(limits.bytes).min(limits.bytes);
    let mut first = Bytes::new();
    let mut whole = memory.body_buffer(0);
    loop {
        let next = timeout(limits.pause, timeout_at(deadline, body.frame())).await;
        let frame = match next.map_err(|_| ApiError::BodyTimeout)?.map_err(|_| ApiError::BodyTimeout)? {
            None => break,
            Some(frame) => frame.map_err(|_| ApiError::BodyBroken)?,
        };
        let Ok(data) = frame.into_data() else { continue };
        if first.len() + whole.len() + data.len() > limits.bytes {
            return Ok(Either::Right((body, ApiError::BodyTooLarge { limit: limits.bytes })));
        }
        if let Err(error) = memory.grow(data.len()) {
            return Ok(Either::Right((body, error)));
        }
        if first.is_empty() && whole.is_empty() {
            first = data;
            continue;
        }
        if whole.is_empty() {
            whole = memory.body_buffer(expected.max(first.len() + data.len()));
            whole.extend(&std::mem::take(&mut first));
        }
        whole.extend(&data);
    }
    if whole.is_empty() && first.len() < MIN_BODY {
        return Ok(Either::Left(first));
    }
    if whole.is_empty() {
        // A frame is a part of the connection's read buffer, all of which a body that is kept would keep.
        whole = memory.body_buffer(first.len());
        whole.extend(&first);
    }
    Ok(Either::Left(whole.into_bytes()))
}

/// Returns `error`, and reads in the background what the client still sends, within the limits: closing a connection
/// with unread data resets it, and the client would see the reset instead of the answer.
pub fn drain_rejected(headers: &HeaderMap, mut body: Body, limits: BodyLimits, error: ApiError) -> ApiError {
    if body.is_end_stream() || headers.contains_key(EXPECT) {
        return error;
    }
    tokio::spawn(async move {
        let mut left = limits.bytes.saturating_mul(2);
        let drained = async {
            while let Ok(Some(Ok(frame))) = timeout(limits.pause, body.frame()).await {
                let size = frame.data_ref().map_or(0, Bytes::len);
                match left.checked_sub(size) {
                    Some(rest) => left = rest,
                    None => break,
                }
            }
        };
        let _ = timeout(limits.total, drained).await;
    });
    error
}

fn encoding(headers: &HeaderMap) -> Result<ContentEncoding, ApiError> {
    let mut encoding = ContentEncoding::Plain;
    for value in headers.get_all(CONTENT_ENCODING) {
        let text = String::from_utf8_lossy(value.as_bytes());
        let unknown = || ApiError::UnknownEncoding { encoding: truncated(&text) };
        let next = match text.trim().to_ascii_lowercase().as_str() {
            "identity" | "" => ContentEncoding::Plain,
            "gzip" | "x-gzip" => ContentEncoding::Gzip,
            "deflate" => ContentEncoding::Deflate,
            _ => return Err(unknown()),
        };
        if encoding != ContentEncoding::Plain && next != ContentEncoding::Plain {
            return Err(unknown());
        }
        encoding = if next == ContentEncoding::Plain { encoding } else { next };
    }
    Ok(encoding)
}

/// Decompresses the body; a decompression bomb fails at the limits before it fills the memory.
fn decompress(
    encoding: ContentEncoding,
    packed: &[u8],
    (limit, memory): (usize, &mut MemoryReservation),
) -> Result<Bytes, ApiError> {
    match encoding {
        ContentEncoding::Plain => Ok(Bytes::copy_from_slice(packed)),
        ContentEncoding::Gzip => {
            inflate(flate2::read::MultiGzDecoder::new(packed), (packed.len(), limit, "gzip"), memory)
        }
        ContentEncoding::Deflate => {
            inflate(flate2::read::ZlibDecoder::new(packed), (packed.len(), limit, "deflate"), memory)
        }
    }
}

fn inflate(
    mut reader: impl std::io::Read,
    (packed, limit, encoding): (usize, usize, &'static str),
    memory: &mut MemoryReservation,
) -> Result<Bytes, ApiError> {
    let dense = packed.saturating_mul(MAX_INFLATION_RATIO).max(MIN_INFLATED_LIMIT);
    let mut plain = Vec::new();
    loop {
        if plain.len() == plain.capacity() {
            // Grows like a vector, but reserves the memory first.
            let more = plain.len().clamp(INFLATE_CHUNK_BYTES, limit.max(INFLATE_CHUNK_BYTES));
            memory.grow(more)?;
            plain.reserve_exact(more);
        }
        let (begun, room) = (plain.len(), plain.capacity() - plain.len());
        let read = reader.by_ref().take(room.min(INFLATE_CHUNK_BYTES) as u64).read_to_end(&mut plain);
        read.map_err(|_| ApiError::BrokenEncoding { encoding })?;
        if plain.len() > limit {
            return Err(ApiError::BodyTooLarge { limit });
        }
        if plain.len() > dense {
            return Err(ApiError::TooDense { most: MAX_INFLATION_RATIO });
        }
        if plain.len() == begun {
            plain.shrink_to_fit();
            return Ok(plain.into());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use vocabulary::TenantId;

    use super::*;
    use crate::memory_budget::{MemoryBudget, MemoryLimits};
    use crate::telemetry::metrics::Metrics;

    const LIMITS: BodyLimits =
        BodyLimits { bytes: 1000, pause: Duration::from_millis(50), total: Duration::from_millis(200) };

    async fn read(headers: &HeaderMap, body: Body, limits: BodyLimits) -> Result<Bytes, ApiError> {
        read_within(headers, body, (limits, 1 << 30)).await.0
    }

    /// Reads a body with a memory budget of this size. Returns the result, and how many bytes it has reserved.
    async fn read_within(
        headers: &HeaderMap,
        body: Body,
        (limits, memory): (BodyLimits, usize),
    ) -> (Result<Bytes, ApiError>, i64) {
        let metrics = Metrics::default().memory;
        let budget = MemoryBudget::new(MemoryLimits { total: memory, tenant: memory }, &metrics);
        let mut memory = budget.reservation(&TenantId::default());
        let aside = OffloadPool::new(1, 1);
        let read = read_body(headers, body, (limits, &mut memory, (&aside, RequestId(1)))).await;
        (read, metrics.reserved.get())
    }

    fn headers(encoding: &str) -> HeaderMap {
        HeaderMap::from_iter([(CONTENT_ENCODING, encoding.parse().unwrap())])
    }

    fn chunks(parts: Vec<(u64, &'static [u8])>) -> Body {
        Body::from_stream(futures::stream::unfold(parts.into_iter(), |mut parts| async {
            let (pause, data) = parts.next()?;
            tokio::time::sleep(Duration::from_millis(pause)).await;
            Some((Ok::<_, std::io::Error>(Bytes::from_static(data)), parts))
        }))
    }

    fn gzip(plain: &[u8]) -> Vec<u8> {
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
        encoder.write_all(plain).unwrap();
        encoder.finish().unwrap()
    }

    #[tokio::test]
    async fn body_frames_are_joined_and_a_single_frame_is_not_copied() {
        let body = read(&HeaderMap::new(), chunks(vec![(0, b"ab"), (1, b"cd"), (1, b"ef")]), LIMITS).await;
        assert_eq!(body.unwrap(), "abcdef");
        let sent = Bytes::from(vec![7u8; 500]);
        let body = read(&HeaderMap::new(), Body::from(sent.clone()), LIMITS).await.unwrap();
        assert_eq!(body.as_ptr(), sent.as_ptr());
    }

    #[tokio::test]
    async fn long_pauses_and_endless_trickles_time_out() {
        // Much longer than the limit: on a slow machine with both timers late, the chunk would otherwise come first.
        let pause = read(&HeaderMap::new(), chunks(vec![(0, b"ab"), (60_000, b"cd")]), LIMITS).await;
        assert_eq!(pause, Err(ApiError::BodyTimeout));
        let trickle = read(&HeaderMap::new(), chunks(vec![(40, b"x"); 10]), LIMITS).await;
        assert_eq!(trickle, Err(ApiError::BodyTimeout));
    }

    #[tokio::test]
    async fn oversized_bodies_are_rejected_announced_chunked_or_compressed() {
        let limit = Err(ApiError::BodyTooLarge { limit: 1000 });
        assert_eq!(read(&HeaderMap::new(), Body::from(vec![0; 1001]), LIMITS).await, limit);
        assert_eq!(read(&HeaderMap::new(), chunks(vec![(0, &[1; 600]), (0, &[1; 600])]), LIMITS).await, limit);
        let bomb = gzip(&vec![0; 1_000_000]);
        assert!(bomb.len() < 1100);
        let bomb = BodyLimits { bytes: 2000, ..LIMITS };
        let packed = Body::from(gzip(&vec![0; 1_000_000]));
        assert_eq!(read(&headers("gzip"), packed, bomb).await, Err(ApiError::BodyTooLarge { limit: 2000 }));
    }

    #[tokio::test]
    async fn known_encodings_are_decompressed_and_others_named() {
        let body = read(&headers("GZIP"), Body::from(gzip(b"hello")), LIMITS).await;
        assert_eq!(body.unwrap(), "hello");
        let broken = read(&headers("deflate"), Body::from("hello"), LIMITS).await;
        assert_eq!(broken, Err(ApiError::BrokenEncoding { encoding: "deflate" }));
        let unknown = read(&headers("br"), Body::from("x"), LIMITS).await;
        assert_eq!(unknown, Err(ApiError::UnknownEncoding { encoding: "br".into() }));
        assert!(read(&headers("gzip, gzip"), Body::from("x"), LIMITS).await.is_err());
    }

    #[tokio::test]
    async fn received_and_inflated_bytes_are_reserved_before_use() {
        let large = BodyLimits { bytes: 1 << 20, ..LIMITS };
        let (body, held) = read_within(&HeaderMap::new(), Body::from(vec![b'x'; 1000]), (large, 1000)).await;
        assert_eq!((body.unwrap().len(), held), (1000, 1000));
        let (refused, held) = read_within(&HeaderMap::new(), Body::from(vec![b'x'; 1001]), (large, 1000)).await;
        assert!(matches!(refused, Err(ApiError::TooMuchMemory { .. })));
        assert_eq!(held, 0);
        let packed = || Body::from(gzip(&[b'x'; 500_000]));
        let (body, held) = read_within(&headers("gzip"), packed(), (large, 2 << 20)).await;
        assert_eq!(body.unwrap().len(), 500_000);
        assert!((500_000..1_100_000).contains(&held), "what was allocated: {held}");
        let (refused, _) = read_within(&headers("gzip"), packed(), (large, 300_000)).await;
        assert!(matches!(refused, Err(ApiError::TooMuchMemory { .. })));
    }

    #[tokio::test]
    async fn body_above_the_inflation_ratio_limit_is_rejected() {
        let large = BodyLimits { bytes: 64 << 20, ..LIMITS };
        let bomb = read(&headers("gzip"), Body::from(gzip(&vec![b'0'; 8 << 20])), large).await;
        assert_eq!(bomb, Err(ApiError::TooDense { most: MAX_INFLATION_RATIO }));
        let text: String = (0..400_000).map(|n: u32| format!("{:x} ", n.wrapping_mul(2_654_435_761))).collect();
        let conversation = read(&headers("gzip"), Body::from(gzip(text.as_bytes())), large).await;
        assert_eq!(conversation.unwrap().len(), text.len());
    }
}
