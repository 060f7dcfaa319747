//! The KV side channel: how a consumer reads a producer's blocks, process to process. Like RDMA it is one-sided, it
//! checks nothing but the engine's id. Frames: a 4-byte big-endian length and msgpack.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use engine_model::{BlockImage, Source};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

use super::driver::Driver;
use super::options::TransferFault;

/// Largest frame that is read.
const FRAME_LIMIT: u32 = 256 << 20;
/// A peer that takes longer for one exchange is taken for dead.
const PATIENCE: Duration = Duration::from_secs(10);
/// Readers at a time.
const READERS: usize = 256;

/// What a consumer asks.
#[derive(serde::Serialize, serde::Deserialize)]
enum Asked {
    /// Read the blocks of a request.
    Read { engine: Arc<str>, request: Arc<str>, blocks: Vec<u32> },
    /// The blocks of a request may be freed.
    Done { engine: Arc<str>, request: Arc<str> },
}

/// What a producer answers; none if it is another engine.
type Answered = Option<Vec<BlockImage>>;

/// Why blocks did not come.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PullError {
    /// The connection failed.
    #[error(transparent)]
    Io(#[from] std::io::Error),
    /// The peer did not answer in time.
    #[error("no answer")]
    Silent,
    /// The peer speaks something else.
    #[error("not a side channel")]
    Foreign,
    /// Another engine listens there now.
    #[error("another engine")]
    OtherEngine,
}

/// Read the blocks that `source` names.
pub(crate) async fn fetch(source: &Source) -> Result<Vec<BlockImage>, PullError> {
    let Source { engine, request, blocks, .. } = source.clone();
    exchange(source, &Asked::Read { engine, request, blocks }).await?.ok_or(PullError::OtherEngine)
}

/// Tell the producer that its blocks may go. If that fails, its lease ends by itself.
pub(crate) async fn release(source: Source) {
    let asked = Asked::Done { engine: source.engine.clone(), request: source.request.clone() };
    if let Err(error) = exchange(&source, &asked).await {
        tracing::debug!(%error, host = %source.host, port = source.port, "producer not told of the transfer's end");
    }
}

async fn exchange(source: &Source, asked: &Asked) -> Result<Answered, PullError> {
    let talk = async {
        let mut stream = TcpStream::connect((source.host.as_ref(), source.port)).await?;
        stream.set_nodelay(true)?;
        write_frame(&mut stream, asked).await?;
        read_frame(&mut stream).await
    };
    tokio::time::timeout(PATIENCE, talk).await.map_err(|_| PullError::Silent)?
}

/// A producer as its consumers reach it.
#[derive(Clone)]
pub(crate) struct Producer {
    pub(crate) engine: Arc<str>,
    pub(crate) driver: Driver,
    pub(crate) fault: TransferFault,
    /// Reads so far.
    pub(crate) reads: Arc<AtomicU64>,
}

impl Producer {
    fn read(&self, request: &str, blocks: &[u32]) -> Vec<BlockImage> {
        let images = self.driver.with(|engine, _| engine.export(request, blocks));
        let count = self.reads.fetch_add(1, Ordering::Relaxed) + 1;
        match self.fault.corrupt {
            Some(every) if count.is_multiple_of(every.get()) => images.into_iter().map(BlockImage::damaged).collect(),
            _ => images,
        }
    }
}

/// Answer consumers. Ends only by being aborted.
pub(crate) async fn serve(listener: TcpListener, producer: Producer) {
    let mut readers = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept(), if readers.len() < READERS => match accepted {
                Ok((stream, _)) => drop(readers.spawn(serve_one(stream, producer.clone()))),
                Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
            },
            Some(_) = readers.join_next() => {}
        }
    }
}

async fn serve_one(mut stream: TcpStream, producer: Producer) {
    let talk = async {
        let answer: Answered = match read_frame(&mut stream).await? {
            Asked::Read { engine, request, blocks } if engine == producer.engine => {
                Some(producer.read(&request, &blocks))
            }
            Asked::Done { engine, request } if engine == producer.engine => {
                producer.driver.with(|engine, _| engine.release(&request));
                Some(Vec::new())
            }
            _ => None,
        };
        write_frame(&mut stream, &answer).await
    };
    match tokio::time::timeout(PATIENCE, talk).await {
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
    if length > FRAME_LIMIT {
        return Err(PullError::Foreign);
    }
    let mut body = Vec::new();
    stream.take(u64::from(length)).read_to_end(&mut body).await?;
    rmp_serde::from_slice(&body).map_err(|_| PullError::Foreign)
}
