//! Measurements: latency per request across the targets, CPU and throughput per window.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use serde::Serialize;

use crate::ProxyBenchError;
use crate::bodies::{AnswerShape, StepBodies};
use crate::client::BenchClient;
use crate::options::Options;
use crate::process::{BenchTarget, BenchTargets};
use crate::report;
use crate::streams::{self, PacedStreamCost};

/// Clients per window.
const CLIENTS: usize = 16;
/// Streamed response with pauses between events, which exposes proxies that wait for acknowledgements.
const PACED_ANSWER: AnswerShape = AnswerShape { events: 8, pause_us: 2_000 };
const IMMEDIATE_ANSWER: AnswerShape = AnswerShape { events: 8, pause_us: 0 };
/// Half of the 40 ms that delayed acknowledgements take: too much to be noise.
const STALL_THRESHOLD: Duration = Duration::from_millis(20);
const STALL_REQUESTS: usize = 40;

/// All measurements.
#[derive(Serialize)]
pub(crate) struct ProxyBenchResults {
    /// One entry per size and target, grouped by size.
    pub(crate) costs: Vec<RequestCost>,
    /// One entry per target.
    pub(crate) streams: Vec<StreamCost>,
    /// One entry per number of streams and target.
    pub(crate) paced: Vec<PacedStreamCost>,
}

impl ProxyBenchResults {
    /// Describes the streams that stall behind OwnerServe.
    pub(crate) fn stalls(&self) -> Vec<String> {
        let stalled = self.streams.iter().filter(|stream| stream.added_us > STALL_THRESHOLD.as_secs_f64() * 1e6);
        stalled
            .filter(|stream| stream.target.starts_with("ownerserve"))
            .map(|stream| format!("a streamed answer stalls behind {}", stream.target))
            .collect()
    }
}

/// Cost of requests of one size at one target.
#[derive(Clone, Serialize)]
pub(crate) struct RequestCost {
    /// Name of the target.
    pub(crate) target: &'static str,
    /// Body size in bytes.
    pub(crate) size: usize,
    /// Median time to the first byte with one client, in microseconds.
    pub(crate) first_byte_us: f64,
    /// Median difference to the direct request sent next to it, in microseconds.
    pub(crate) added_us: f64,
    /// CPU time per request with 16 clients, in microseconds.
    pub(crate) cpu_us: Option<f64>,
    /// Requests per second with 16 clients that share the machine with the target.
    pub(crate) per_second: f64,
}

/// Cost of a streamed response over an ordinary keep-alive connection.
#[derive(Serialize)]
pub(crate) struct StreamCost {
    /// Name of the target.
    pub(crate) target: &'static str,
    /// Median time of the whole response, in microseconds.
    pub(crate) whole_us: f64,
    /// Median difference to the direct request sent next to it, in microseconds.
    pub(crate) added_us: f64,
}

/// Runs all measurements.
pub(crate) async fn all(targets: &BenchTargets, options: &Options) -> Result<ProxyBenchResults, ProxyBenchError> {
    let mut results = ProxyBenchResults {
        costs: Vec::new(),
        streams: stalls(targets).await?,
        paced: streams::all(targets, (&options.streams, options.window * 2)).await?,
    };
    for size in options.sizes.iter().copied() {
        report::progress(&format!("bodies of {} KB", size >> 10));
        let latencies = latencies(targets, StepBodies::new(0, size, IMMEDIATE_ANSWER), options.requests).await?;
        let direct: Vec<f64> = latencies[0].iter().map(|timing| timing.0).collect();
        let mut windows = vec![Vec::new(); targets.all.len()];
        for turn in 0..options.windows {
            for at in 0..targets.all.len() {
                let at = (at + turn) % targets.all.len();
                windows[at].push(window(&targets.all[at], size, (options.window, turn)).await?);
            }
        }
        for (at, target) in targets.all.iter().enumerate() {
            let first: Vec<f64> = latencies[at].iter().map(|timing| timing.0).collect();
            let cpu: Vec<f64> = windows[at].iter().filter_map(|window| window.cpu_us).collect();
            results.costs.push(RequestCost {
                target: target.name,
                size,
                added_us: median(first.iter().zip(&direct).map(|(own, direct)| own - direct)),
                first_byte_us: median(first),
                cpu_us: (!cpu.is_empty()).then(|| median(cpu)),
                per_second: median(windows[at].iter().map(|window| window.per_second)),
            });
        }
    }
    Ok(results)
}

async fn stalls(targets: &BenchTargets) -> Result<Vec<StreamCost>, ProxyBenchError> {
    let timings = latencies(targets, StepBodies::new(0, 1 << 10, PACED_ANSWER), STALL_REQUESTS).await?;
    let whole = |at: usize| timings[at].iter().map(|timing| timing.1).collect::<Vec<f64>>();
    let direct = whole(0);
    let stream = |(at, target): (usize, &BenchTarget)| StreamCost {
        target: target.name,
        added_us: median(whole(at).iter().zip(&direct).map(|(own, direct)| own - direct)),
        whole_us: median(whole(at)),
    };
    Ok(targets.all.iter().enumerate().map(stream).collect())
}

/// Returns first-byte and total times of the same requests at every target, in microseconds. The order of the targets
/// rotates with each request.
async fn latencies(
    targets: &BenchTargets,
    mut steps: StepBodies,
    requests: usize,
) -> Result<Vec<Vec<(f64, f64)>>, ProxyBenchError> {
    let mut clients = Vec::new();
    for target in &targets.all {
        clients.push(BenchClient::connect(target.name, target.address(0)).await?);
    }
    let mut timings = vec![Vec::with_capacity(requests); clients.len()];
    for turn in 0..requests {
        let body = steps.next_body();
        let session = steps.session();
        for at in 0..clients.len() {
            let at = (at + turn) % clients.len();
            let timing = clients[at].chat(&session, &body).await?;
            timings[at].push((timing.first_byte.as_secs_f64() * 1e6, timing.whole.as_secs_f64() * 1e6));
        }
    }
    Ok(timings)
}

#[derive(Clone)]
struct WindowSample {
    cpu_us: Option<f64>,
    per_second: f64,
}

/// Measures one target for a while; each turn has sessions of its own.
async fn window(
    target: &BenchTarget,
    size: usize,
    (length, turn): (Duration, usize),
) -> Result<WindowSample, ProxyBenchError> {
    let start = Instant::now();
    let before = target.cpu_seconds();
    let mut clients = tokio::task::JoinSet::new();
    for client in (1..=CLIENTS).map(|client| turn * CLIENTS + client) {
        let steps = StepBodies::new(client, size, IMMEDIATE_ANSWER);
        clients.spawn(request_until((target.name, target.address(client)), steps, start + length));
    }
    let mut requests = 0;
    while let Some(asked) = clients.join_next().await {
        requests += asked.expect("a client does not panic")?;
    }
    let seconds = start.elapsed().as_secs_f64();
    let used = target.cpu_seconds().zip(before).map(|(after, before)| (after - before) * 1e6 / f64::from(requests));
    Ok(WindowSample { cpu_us: used, per_second: f64::from(requests) / seconds })
}

/// Sends one client's requests one after the other and returns their number.
async fn request_until(
    (name, address): (&'static str, SocketAddr),
    mut steps: StepBodies,
    end: Instant,
) -> Result<u32, ProxyBenchError> {
    let mut client = BenchClient::connect(name, address).await?;
    let mut requests = 0;
    while Instant::now() < end {
        let body = steps.next_body();
        client.chat(&steps.session(), &body).await?;
        requests += 1;
    }
    Ok(requests)
}

fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}
