//! Many paced streams at once: CPU time, throughput, errors, and memory of an idle stream.

use std::time::{Duration, Instant};

use futures::stream::{self, StreamExt as _, TryStreamExt as _};
use serde::Serialize;

use crate::ProxyBenchError;
use crate::bodies::{AnswerShape, StepBodies};
use crate::client::BenchClient;
use crate::process::{BenchTarget, BenchTargets};
use crate::report;

/// Streamed answer at the pace of an engine: 50 tokens in a second.
const PACED_ANSWER: AnswerShape = AnswerShape { events: 50, pause_us: 20_000 };
/// Streamed answer that sends nothing for a while after its first event.
const IDLE_ANSWER: AnswerShape = AnswerShape { events: 2, pause_us: 20_000_000 };
const BODY: usize = 1 << 10;
/// Clients start one after the other over the length of an answer, as independent ones do.
const START_SPREAD: Duration = Duration::from_millis(1_000);
/// Streams that are open before and beside those whose memory is measured.
const IDLE_STREAMS: (usize, usize) = (200, 1_000);
const OPENED_AT_ONCE: usize = 100;
/// More streams than are measured at once.
const MAX_STREAMS: usize = 100_000;

/// Cost of many streams at once.
#[derive(Serialize)]
pub(crate) struct PacedStreamCost {
    /// Name of the target.
    pub(crate) target: &'static str,
    /// Simultaneous streams.
    pub(crate) streams: usize,
    /// Whole answers per second.
    pub(crate) per_second: f64,
    /// CPU time of an answer in microseconds.
    pub(crate) cpu_us: Option<f64>,
    /// Requests that failed.
    pub(crate) errors: usize,
    /// Resident memory in bytes that an idle stream adds.
    pub(crate) idle_bytes: Option<f64>,
}

/// Measures each target with each number of streams.
pub(crate) async fn all(
    targets: &BenchTargets,
    (counts, length): (&[usize], Duration),
) -> Result<Vec<PacedStreamCost>, ProxyBenchError> {
    let mut costs = Vec::new();
    for target in targets.all.iter().filter(|_| !counts.is_empty()) {
        report::progress(&format!("memory of idle streams: {}", target.name));
        let idle_bytes = idle_bytes(target).await?;
        for streams in counts {
            report::progress(&format!("{streams} paced streams: {}", target.name));
            costs.push(PacedStreamCost { idle_bytes, ..paced(target, *streams, length).await });
        }
    }
    Ok(costs)
}

/// Keeps `streams` answers running for a while.
async fn paced(target: &BenchTarget, streams: usize, length: Duration) -> PacedStreamCost {
    let (start, before) = (Instant::now(), target.cpu_seconds());
    let mut clients = tokio::task::JoinSet::new();
    for client in 0..streams {
        let begin = start + START_SPREAD.mul_f64(client as f64 / streams as f64);
        // Each number of streams has sessions of its own.
        let client = MAX_STREAMS * streams + client;
        clients.spawn(stream_until((target.name, target.address(client)), client, (begin, start + length)));
    }
    let (mut answers, mut errors) = (0, 0);
    while let Some(done) = clients.join_next().await {
        let (answered, failed) = done.expect("a client does not panic");
        (answers, errors) = (answers + answered, errors + failed);
    }
    let seconds = start.elapsed().as_secs_f64();
    let cpu =
        target.cpu_seconds().zip(before).map(|(after, before)| (after - before) * 1e6 / f64::from(answers.max(1)));
    PacedStreamCost {
        target: target.name,
        streams,
        per_second: f64::from(answers) / seconds,
        cpu_us: cpu,
        errors,
        idle_bytes: None,
    }
}

/// Sends one client's requests, at least one. Returns the numbers of whole answers and of failed requests.
async fn stream_until(
    (name, address): (&'static str, std::net::SocketAddr),
    client: usize,
    (begin, end): (Instant, Instant),
) -> (u32, usize) {
    tokio::time::sleep_until(begin.into()).await;
    let mut steps = StepBodies::new(client, BODY, PACED_ANSWER);
    let Ok(mut connection) = BenchClient::connect(name, address).await else { return (0, 1) };
    let mut answers = 0;
    loop {
        let body = steps.next_body();
        if connection.chat(&steps.session(), &body).await.is_err() {
            return (answers, 1);
        }
        answers += 1;
        if Instant::now() >= end {
            return (answers, 0);
        }
    }
}

/// Returns the memory that an idle stream adds, `None` without a process of its own.
async fn idle_bytes(target: &BenchTarget) -> Result<Option<f64>, ProxyBenchError> {
    if target.resident_bytes().is_none() {
        return Ok(None);
    }
    let (before, measured) = IDLE_STREAMS;
    let mut open = open_streams(target, 0..before).await?;
    let start = target.resident_bytes();
    open.extend(open_streams(target, before..before + measured).await?);
    let end = target.resident_bytes();
    drop(open);
    let grown = |(end, start): (u64, u64)| end.saturating_sub(start) as f64 / measured as f64;
    Ok(end.zip(start).map(grown))
}

/// Opens streams and returns when each has sent its first event. HAProxy holds an event back for 200 ms when it expects
/// more, so that one after the other would take minutes.
async fn open_streams(
    target: &BenchTarget,
    clients: std::ops::Range<usize>,
) -> Result<Vec<BenchClient>, ProxyBenchError> {
    let (name, address) = (target.name, target.address(0));
    let opened = stream::iter(clients).map(|client| async move {
        let mut steps = StepBodies::new(client, BODY, IDLE_ANSWER);
        let mut connection = BenchClient::connect(name, address).await?;
        let body = steps.next_body();
        connection.open(&steps.session(), &body).await?;
        Ok(connection)
    });
    opened.buffer_unordered(OPENED_AT_ONCE).try_collect().await
}
