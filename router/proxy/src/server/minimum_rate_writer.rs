//! Disconnects clients that take their answers too slowly: a stalled one keeps a worker's answer, and its place in the
//! worker's load, for as long as it likes.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep, sleep};

/// Bytes per second that a client must take while more wait for it.
const MIN_BYTES_PER_SECOND: f64 = 256.0;

/// A stream whose writes fail once, during a whole period in which bytes waited to be written, fewer than the minimum
/// rate allows were taken. A write that is taken whole ends the period: nothing waits then.
#[derive(Debug)]
pub(super) struct MinimumRateWriter<S> {
    stream: S,
    period: Duration,
    /// End of the running period; None while nothing waits.
    timer: Option<Pin<Box<Sleep>>>,
    /// Bytes that were taken in it.
    written: usize,
}

impl<S> MinimumRateWriter<S> {
    pub(super) fn new(stream: S, period: Duration) -> Self {
        Self { stream, period, timer: None, written: 0 }
    }

    /// Notes a write of `offered` bytes, and returns its result unless the client is too slow.
    fn note(
        &mut self,
        cx: &mut Context<'_>,
        offered: usize,
        result: Poll<io::Result<usize>>,
    ) -> Poll<io::Result<usize>> {
        let taken = match result {
            Poll::Ready(Ok(taken)) => taken,
            Poll::Ready(Err(_)) => return result,
            Poll::Pending => 0,
        };
        if result.is_ready() && taken >= offered {
            (self.timer, self.written) = (None, 0);
            return result;
        }
        self.written += taken;
        let period = self.period;
        let timer = self.timer.get_or_insert_with(|| Box::pin(sleep(period)));
        while timer.as_mut().poll(cx).is_ready() {
            if (self.written as f64) < MIN_BYTES_PER_SECOND * period.as_secs_f64() {
                return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
            }
            self.written = 0;
            timer.as_mut().reset(Instant::now() + period);
        }
        result
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for MinimumRateWriter<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.note(cx, bytes.len(), result)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        pieces: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.stream).poll_write_vectored(cx, pieces);
        self.note(cx, pieces.iter().map(|piece| piece.len()).sum(), result)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for MinimumRateWriter<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    /// In it a client has to take 128 bytes.
    const PERIOD: Duration = Duration::from_millis(500);

    /// Writes 2,000 bytes to a client that takes `bytes` every `pause`. Returns the error.
    async fn write_to_reader(bytes: usize, pause: Duration) -> Option<io::ErrorKind> {
        let (near, mut far) = tokio::io::duplex(64);
        let mut writer = MinimumRateWriter::new(near, PERIOD);
        let reader = tokio::spawn(async move {
            let mut taken = vec![0; bytes];
            loop {
                tokio::time::sleep(pause).await;
                far.read_exact(&mut taken).await.unwrap();
            }
        });
        let written = tokio::time::timeout(Duration::from_secs(30), writer.write_all(&[0; 2000])).await;
        reader.abort();
        written.expect("an end").err().map(|error| error.kind())
    }

    #[tokio::test]
    async fn a_client_that_takes_a_little_now_and_then_is_cut_like_one_that_takes_nothing() {
        assert_eq!(write_to_reader(1, Duration::from_secs(60)).await, Some(io::ErrorKind::TimedOut));
        assert_eq!(write_to_reader(1, PERIOD / 10).await, Some(io::ErrorKind::TimedOut));
        assert_eq!(write_to_reader(64, Duration::ZERO).await, None);
    }

    #[tokio::test]
    async fn an_answer_with_long_pauses_is_not_taken_for_a_slow_client() {
        let (near, mut far) = tokio::io::duplex(64);
        let mut writer = MinimumRateWriter::new(near, PERIOD);
        let reader = tokio::spawn(async move {
            let mut taken = Vec::new();
            far.read_to_end(&mut taken).await.unwrap();
            taken.len()
        });
        for _ in 0..4 {
            // More than the buffer holds, so that a part of each write waits.
            writer.write_all(&[0; 100]).await.unwrap();
            tokio::time::sleep(PERIOD * 6 / 5).await;
        }
        drop(writer);
        assert_eq!(reader.await.unwrap(), 400);
    }
}
