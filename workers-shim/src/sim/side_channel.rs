//! The KV side channel, by which a consumer reads a producer's blocks. One-sided like RDMA: only the engine's id is
//! checked. Frames: a 4-byte big-endian length and msgpack.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use engine_model::{BlockImage, RemoteBlocks};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

use super::driver::EngineDriver;
use super::sim_options::TransferFault;

/// Maximum size of a frame.
const MAX_FRAME_BYTES: u32 = 256 << 20;
/// Timeout of one exchange with a peer.
const EXCHANGE_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum number of concurrent readers.
const MAX_READERS: usize = 256;

/// A consumer's request.
#[derive(serde::Serialize, serde::Deserialize)]
enum KvPullRequest {
    /// Reads the blocks of a request.
    Read { engine: Arc<str>, request: Arc<str>, blocks: Vec<u32> },
    /// Allows the producer to free the blocks of a request.
    Done { engine: Arc<str>, request: Arc<str> },
}

/// A producer's reply; None if the request is for another engine.
type KvPullReply = Option<Vec<BlockImage>>;

/// Why blocks could not be read.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PullError {
    /// The connection failed.
    #[error(transparent)]
    Io(#[from] std::io::Error),
    /// The peer did not reply in time.
    #[error("no answer")]
    TimedOut,
    /// The peer violated the protocol.
    #[error("not a side channel")]
    Foreign,
    /// Another engine listens there now.
    #[error("another engine")]
    OtherEngine,
}

/// Reads the blocks that `source` names.
pub(crate) async fn fetch(source: &RemoteBlocks) -> Result<Vec<BlockImage>, PullError> {
    let RemoteBlocks { engine, request, blocks, .. } = source.clone();
    exchange(source, &KvPullRequest::Read { engine, request, blocks }).await?.ok_or(PullError::OtherEngine)
}

/// Tells the producer that its blocks may be freed. If that fails, its lease expires.
pub(crate) async fn release(source: RemoteBlocks) {
    let request = KvPullRequest::Done { engine: source.engine.clone(), request: source.request.clone() };
    if let Err(error) = exchange(&source, &request).await {
        tracing::debug!(%error, host = %source.host, port = source.port, "producer not told of the transfer's end");
    }
}

async fn exchange(source: &RemoteBlocks, request: &KvPullRequest) -> Result<KvPullReply, PullError> {
    let talk = async {
        let mut stream = TcpStream::connect((source.host.as_ref(), source.port)).await?;
        stream.set_nodelay(true)?;
        write_frame(&mut stream, request).await?;
        read_frame(&mut stream).await
    };
    tokio::time::timeout(EXCHANGE_TIMEOUT, talk).await.map_err(|_| PullError::TimedOut)?
}

/// A producer's side of the channel.
#[derive(Clone)]
pub(crate) struct KvProducer {
    pub(crate) engine: Arc<str>,
    pub(crate) driver: EngineDriver,
    pub(crate) fault: TransferFault,
    /// Number of reads so far.
    pub(crate) read_count: Arc<AtomicU64>,
}

impl KvProducer {
    fn read(&self, request: &str, blocks: &[u32]) -> Vec<BlockImage> {
        let images = self.driver.with_engine(|engine, _| engine.export(request, blocks));
        let count = self.read_count.fetch_add(1, Ordering::Relaxed) + 1;
        match self.fault.corrupt {
            Some(every) if count.is_multiple_of(every.get()) => images.into_iter().map(BlockImage::corrupted).collect(),
            _ => images,
        }
    }
}

/// Serves consumers until the task is aborted.
pub(crate) async fn serve(listener: TcpListener, producer: KvProducer) {
    let mut readers = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept(), if readers.len() < MAX_READERS => match accepted {
                Ok((stream, _)) => drop(readers.spawn(serve_one(stream, producer.clone()))),
                Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
            },
            Some(_) = readers.join_next() => {}
        }
    }
}

async fn serve_one(mut stream: TcpStream, producer: KvProducer) {
    let talk = async {
        let answer: KvPullReply = match read_frame(&mut stream).await? {
            KvPullRequest::Read { engine, request, blocks } if engine == producer.engine => {
                Some(producer.read(&request, &blocks))
            }
            KvPullRequest::Done { engine, request } if engine == producer.engine => {
                producer.driver.with_engine(|engine, _| engine.release(&request));
                Some(Vec::new())
            }
            _ => None,
        };
        write_frame(&mut stream, &answer).await
    };
    match tokio::time::timeout(EXCHANGE_TIMEOUT, talk).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::debug!(%error, "side channel"),
        Err(_) => tracing::debug!("side channel: a silent peer"),
    }
}

async fn write_frame(stream: &mut TcpStream, value: &impl Serialize) -> Result<(), PullError> {
    let body = rmp_serde::to_vec(value).map_err(|_| PullError::Foreign)?;
    let length = u32::try_from(body.len()).map_err(|_| PullError::Foreign)?;
    stream.write_all(&length.to_be_bytes()).await?;
    stream.write_all(&body).await?;
    Ok(stream.flush().await?)
}

async fn read_frame<T: DeserializeOwned>(stream: &mut TcpStream) -> Result<T, PullError> {
    let length = stream.read_u32().await?;
    if length > MAX_FRAME_BYTES {
        return Err(PullError::Foreign);
    }
    let mut body = Vec::new();
    stream.take(u64::from(length)).read_to_end(&mut body).await?;
    rmp_serde::from_slice(&body).map_err(|_| PullError::Foreign)
}
