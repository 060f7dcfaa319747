//! Reading a request's body: within size and time, decompressed, as one piece of memory.

use std::io::Read as _;
use std::time::Duration;

use axum::body::Body;
use bytes::{Bytes, BytesMut};
use futures::future::Either;
use http::HeaderMap;
use http::header::{CONTENT_ENCODING, EXPECT};
use http_body_util::BodyExt as _;
use hyper::body::Body as _;
use tokio::time::{Instant, timeout, timeout_at};

use super::ProxyConfig;
use crate::error::{ApiError, shortened};

/// What a body may take.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BodyLimits {
    /// Most bytes, decompressed.
    pub(crate) bytes: usize,
    pub(crate) pause: Duration,
    /// Longest time altogether.
    pub(crate) total: Duration,
}

impl From<&ProxyConfig> for BodyLimits {
    fn from(config: &ProxyConfig) -> Self {
        Self { bytes: config.body_limit.0, pause: config.body_pause.0, total: config.body_timeout.0 }
    }
}

/// The ways a body may be compressed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Encoding {
    Plain,
    Gzip,
    Deflate,
}

/// Reads all of `body`. Frames are copied once into one allocation; a body of one frame is not copied at all.
pub(crate) async fn read_body(headers: &HeaderMap, body: Body, limits: BodyLimits) -> Result<Bytes, ApiError> {
    let too_large = ApiError::BodyTooLarge { limit: limits.bytes };
    let encoding = match encoding(headers) {
        Ok(encoding) => encoding,
        Err(error) => return Err(refuse(headers, body, limits, error)),
    };
    if body.size_hint().lower() > limits.bytes as u64 {
        return Err(refuse(headers, body, limits, too_large));
    }
    let received = receive(body, limits).await;
    let bytes = match received {
        Ok(Either::Left(bytes)) => bytes,
        Ok(Either::Right(rest)) => return Err(refuse(headers, rest, limits, too_large)),
        Err(error) => return Err(error),
    };
    match encoding {
        Encoding::Plain => Ok(bytes),
        // Up to the body limit has to be inflated: too long for a thread that serves others.
        packed => tokio::task::spawn_blocking(move || unpack(packed, &bytes, limits.bytes))
            .await
            .map_err(|_| ApiError::BodyBroken)?,
    }
}

/// The whole body, or what is left of one that became too large.
async fn receive(mut body: Body, limits: BodyLimits) -> Result<Either<Bytes, Body>, ApiError> {
    let deadline = Instant::now() + limits.total;
    let expected = usize::try_from(body.size_hint().lower()).unwrap_or(limits.bytes).min(limits.bytes);
    let mut first = Bytes::new();
    let mut whole = BytesMut::new();
    loop {
        let next = timeout(limits.pause, timeout_at(deadline, body.frame())).await;
        let frame = match next.map_err(|_| ApiError::BodyTimeout)?.map_err(|_| ApiError::BodyTimeout)? {
            None => break,
            Some(frame) => frame.map_err(|_| ApiError::BodyBroken)?,
        };
        let Ok(data) = frame.into_data() else { continue };
        if first.len() + whole.len() + data.len() > limits.bytes {
            return Ok(Either::Right(body));
        }
        if first.is_empty() && whole.is_empty() {
            first = data;
            continue;
        }
        if whole.is_empty() {
            whole.reserve(expected.max(first.len() + data.len()));
            whole.extend_from_slice(&std::mem::take(&mut first));
        }
        whole.extend_from_slice(&data);
    }
    Ok(Either::Left(if whole.is_empty() { first } else { whole.freeze() }))
}

/// Gives `error` back, and in the background reads what the client still sends, within the limits: a connection that
/// is closed under unread data is reset, and the client would see that instead of the answer.
pub(crate) fn refuse(headers: &HeaderMap, mut body: Body, limits: BodyLimits, error: ApiError) -> ApiError {
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

fn encoding(headers: &HeaderMap) -> Result<Encoding, ApiError> {
    let mut encoding = Encoding::Plain;
    for value in headers.get_all(CONTENT_ENCODING) {
        let text = String::from_utf8_lossy(value.as_bytes());
        let unknown = || ApiError::UnknownEncoding { encoding: shortened(&text) };
        let next = match text.trim().to_ascii_lowercase().as_str() {
            "identity" | "" => Encoding::Plain,
            "gzip" | "x-gzip" => Encoding::Gzip,
            "deflate" => Encoding::Deflate,
            _ => return Err(unknown()),
        };
        if encoding != Encoding::Plain && next != Encoding::Plain {
            return Err(unknown());
        }
        encoding = if next == Encoding::Plain { encoding } else { next };
    }
    Ok(encoding)
}

/// The decompressed body; a bomb is an error at `limit` bytes, not a full memory.
fn unpack(encoding: Encoding, packed: &[u8], limit: usize) -> Result<Bytes, ApiError> {
    let mut plain = Vec::new();
    let most = limit as u64 + 1;
    let (read, name) = match encoding {
        Encoding::Plain => return Ok(Bytes::copy_from_slice(packed)),
        Encoding::Gzip => (flate2::read::MultiGzDecoder::new(packed).take(most).read_to_end(&mut plain), "gzip"),
        Encoding::Deflate => (flate2::read::ZlibDecoder::new(packed).take(most).read_to_end(&mut plain), "deflate"),
    };
    match read {
        Err(_) => Err(ApiError::BrokenEncoding { encoding: name }),
        Ok(_) if plain.len() > limit => Err(ApiError::BodyTooLarge { limit }),
        Ok(_) => Ok(plain.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    const LIMITS: BodyLimits =
        BodyLimits { bytes: 1000, pause: Duration::from_millis(50), total: Duration::from_millis(200) };

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
    async fn a_body_in_pieces_becomes_one_and_one_of_one_piece_is_not_copied() {
        let body = read_body(&HeaderMap::new(), chunks(vec![(0, b"ab"), (1, b"cd"), (1, b"ef")]), LIMITS).await;
        assert_eq!(body.unwrap(), "abcdef");
        let sent = Bytes::from(vec![7u8; 500]);
        let body = read_body(&HeaderMap::new(), Body::from(sent.clone()), LIMITS).await.unwrap();
        assert_eq!(body.as_ptr(), sent.as_ptr());
    }

    #[tokio::test]
    async fn long_pauses_and_endless_trickles_time_out() {
        // Much longer than the limit: a machine that is late with both timers would see the piece first.
        let pause = read_body(&HeaderMap::new(), chunks(vec![(0, b"ab"), (60_000, b"cd")]), LIMITS).await;
        assert_eq!(pause, Err(ApiError::BodyTimeout));
        let trickle = read_body(&HeaderMap::new(), chunks(vec![(40, b"x"); 10]), LIMITS).await;
        assert_eq!(trickle, Err(ApiError::BodyTimeout));
    }

    #[tokio::test]
    async fn too_much_is_refused_whether_announced_chunked_or_packed() {
        let limit = Err(ApiError::BodyTooLarge { limit: 1000 });
        assert_eq!(read_body(&HeaderMap::new(), Body::from(vec![0; 1001]), LIMITS).await, limit);
        assert_eq!(read_body(&HeaderMap::new(), chunks(vec![(0, &[1; 600]), (0, &[1; 600])]), LIMITS).await, limit);
        let bomb = gzip(&vec![0; 1_000_000]);
        assert!(bomb.len() < 1100);
        let bomb = BodyLimits { bytes: 2000, ..LIMITS };
        let packed = Body::from(gzip(&vec![0; 1_000_000]));
        assert_eq!(read_body(&headers("gzip"), packed, bomb).await, Err(ApiError::BodyTooLarge { limit: 2000 }));
    }

    #[tokio::test]
    async fn known_encodings_are_unpacked_and_others_named() {
        let body = read_body(&headers("GZIP"), Body::from(gzip(b"hello")), LIMITS).await;
        assert_eq!(body.unwrap(), "hello");
        let broken = read_body(&headers("deflate"), Body::from("hello"), LIMITS).await;
        assert_eq!(broken, Err(ApiError::BrokenEncoding { encoding: "deflate" }));
        let unknown = read_body(&headers("br"), Body::from("x"), LIMITS).await;
        assert_eq!(unknown, Err(ApiError::UnknownEncoding { encoding: "br".into() }));
        assert!(read_body(&headers("gzip, gzip"), Body::from("x"), LIMITS).await.is_err());
    }
}
