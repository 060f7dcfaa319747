//! `ctl worker drain`: drains workers before they stop, one worker, or several in turn (rolling).

use std::time::{Duration, Instant};

use clap::Args;
use http::Method;
use indicatif::ProgressBar;
use serde_json::{Value, json};
use vocabulary::{ByteCount, TimeSpan};

use super::args::WorkerArg;
use super::client::OperatorClient;
use super::error::{CtlError, StuckSessions};
use super::output::bar;
use super::output::{OutputFormat, note, print_text};
use super::table::cell_text;
use super::writes::{self, put};
use vocabulary::flags;

/// Interval between two polls.
const POLL_INTERVAL: Duration = Duration::from_millis(300);

/// Drains a worker: it takes no new sessions at any router, and its sessions move to other workers. Waits until they have.
#[derive(Clone, Debug, Args)]
pub(crate) struct DrainArgs {
    /// The worker, by id or URL; with --rolling all workers, in the order of their upgrade.
    #[arg(required = true)]
    workers: Vec<WorkerArg>,
    /// Drains the workers one after the other: each is drained, waited for until it was restarted, and taken back into
    /// service. Its sessions go to workers that are not listed or were restarted already, and if there are none to the
    /// last one. No session moves twice.
    #[arg(long)]
    rolling: bool,
    /// Leaves the sessions at the worker, which only takes no new ones.
    #[arg(long)]
    keep_sessions: bool,
    /// Returns as soon as the drain has begun.
    #[arg(long, conflicts_with_all = ["rolling", "deadline"])]
    no_wait: bool,
    /// Maximum KV bandwidth of moved sessions per second, as 1GiB; when left out, drain.bandwidth of the router.
    #[arg(long, value_name = "SIZE", value_parser = flags::bandwidth)]
    bandwidth: Option<ByteCount>,
    /// Maximum wait for one worker: until its sessions have moved, and until it was restarted.
    #[arg(long, value_name = "DURATION", default_value = "1h", value_parser = flags::duration)]
    deadline: TimeSpan,
}

/// Drains one worker, or all given workers in turn. Fails at the end if sessions could not be moved.
pub(crate) async fn drain(client: &OperatorClient, args: &DrainArgs, output: OutputFormat) -> Result<(), CtlError> {
    let all = resolve_workers(client, args).await?;
    let upgrade = super::unix_ms();
    let (mut told, mut stayed) = (Vec::new(), Vec::new());
    for (at, (worker, endpoint)) in all.iter().enumerate() {
        let next: Vec<String> = args.workers[at + 1..].iter().map(WorkerArg::to_string).collect();
        let sessions = if args.keep_sessions { "keep" } else { "move" };
        let mut body = json!({"draining": true, "sessions": sessions, "avoid_workers": next});
        if args.rolling {
            body["upgrade_id"] = json!(format!("rolling-{upgrade}"));
        }
        if let Some(bandwidth) = args.bandwidth {
            body["bandwidth"] = json!(bandwidth.to_string());
        }
        if args.no_wait {
            return writes::run(client, put(format!("workers/{worker}/drain"), body), output).await;
        }
        let one = WorkerDrain { client, worker: *worker, endpoint, deadline: Instant::now() + args.deadline.0 };
        let life = one.fetch_worker().await?["incarnation"].clone();
        let progress = one.move_sessions(&body).await?;
        if output == OutputFormat::Table {
            print_text(&format!("{endpoint}: {}\n", progress_text(&progress)));
        }
        let here = stuck_sessions(endpoint, &progress).filter(|_| !args.keep_sessions);
        let along =
            here.as_ref().map_or_else(String::new, |here| format!("; {} sessions lose their KV", here.sessions));
        stayed.extend(here);
        told.push(json!({"worker": worker.to_string(), "endpoint": endpoint, "progress": progress}));
        if args.rolling {
            note(&format!("{endpoint} is drained: restart it upgraded{along}"));
            one.wait_until_restarted(&life).await?;
        }
    }
    if output == OutputFormat::Json {
        print_text(&format!("{}\n", json!({"drained": told})));
    }
    if stayed.is_empty() { Ok(()) } else { Err(CtlError::SessionsStuck { workers: stayed }) }
}

/// Resolves all workers to their endpoints before the first is drained.
async fn resolve_workers(client: &OperatorClient, args: &DrainArgs) -> Result<Vec<(WorkerArg, String)>, CtlError> {
    if args.workers.len() > 1 && !args.rolling {
        let what = "several workers: drain them one after the other with --rolling, in the order of their upgrade";
        return Err(CtlError::Usage(what.into()));
    }
    let mut all: Vec<(WorkerArg, String)> = Vec::new();
    for worker in &args.workers {
        let record = client.get(&format!("workers/{worker}")).await?.json;
        let endpoint = record["worker"]["endpoint"].as_str().map_or_else(|| worker.to_string(), str::to_owned);
        if all.iter().any(|(other, _)| other == worker) {
            return Err(CtlError::Usage(format!(
                "{endpoint} is given twice; nothing was drained. Give each worker once"
            )));
        }
        all.push((*worker, endpoint));
    }
    Ok(all)
}

/// Returns the sessions that could not be moved; `None` if there are none.
fn stuck_sessions(endpoint: &str, progress: &Value) -> Option<StuckSessions> {
    let sessions = progress["unmovable_sessions"].as_u64().filter(|count| *count > 0)?;
    Some(StuckSessions { endpoint: endpoint.into(), sessions, reason: cell_text(progress.get("reason")) })
}

/// Drain of one worker, with a deadline.
struct WorkerDrain<'a> {
    client: &'a OperatorClient,
    worker: WorkerArg,
    endpoint: &'a str,
    deadline: Instant,
}

impl WorkerDrain<'_> {
    async fn fetch_worker(&self) -> Result<Value, CtlError> {
        let path = format!("workers/{}", self.worker);
        Ok(self.client.get(&path).await?.json["worker"].clone())
    }

    async fn set_draining(&self, body: &Value) -> Result<(), CtlError> {
        let path = format!("workers/{}/drain", self.worker);
        self.client.write((Method::PUT, &path), body, None).await.map(drop)
    }

    /// Waits until nothing more can be moved. Requests the drain again if the router that moved the sessions has no
    /// record of it.
    async fn move_sessions(&self, body: &Value) -> Result<Value, CtlError> {
        self.set_draining(body).await?;
        let path = format!("workers/{}/drain", self.worker);
        let stays = body["sessions"] == "keep";
        let bar = bar("[{bar:30}] {msg}", 0);
        loop {
            let progress = self.client.get(&path).await?.json["progress"].clone();
            show_progress(&bar, &progress);
            match progress["state"].as_str() {
                Some("done") => break Ok(progress),
                Some("canceled") => {
                    return Err(CtlError::Refused(format!(
                        "{} was taken back into service during the drain; drain it again if it is to stop",
                        self.endpoint
                    )));
                }
                _ if stays => break Ok(progress),
                Some("not_started") => self.set_draining(body).await?,
                _ => {}
            }
            self.pause("not all sessions were moved").await?;
        }
    }

    /// Waits until the worker has restarted and is ready.
    async fn wait_until_restarted(&self, life: &Value) -> Result<(), CtlError> {
        let is_new = |now: &Value| now["incarnation"] != *life && now["health"] != "unreachable";
        while !is_new(&self.fetch_worker().await?) {
            self.pause("the worker was not restarted").await?;
        }
        self.set_draining(&json!({"draining": false})).await?;
        while self.fetch_worker().await?["health"] != "ready" {
            self.pause("the worker did not become ready").await?;
        }
        Ok(())
    }

    async fn pause(&self, what: &str) -> Result<(), CtlError> {
        if Instant::now() >= self.deadline {
            return Err(CtlError::Refused(format!(
                "{}: {what} within --deadline; it keeps draining. Repeat the command to go on waiting",
                self.endpoint
            )));
        }
        tokio::time::sleep(POLL_INTERVAL).await;
        Ok(())
    }
}

/// Formats the progress.
fn progress_text(progress: &Value) -> String {
    let count = |name: &str| progress[name].as_u64().unwrap_or_default();
    let (moved, owned) = (count("moved_sessions"), count("owned_sessions"));
    let mut text = format!("{moved} of {} sessions moved, {} MiB", moved + owned, count("moved_bytes") >> 20);
    for (name, what) in [
        ("in_flight_sessions", "in flight"),
        ("unmovable_sessions", "unmovable"),
        ("already_moved_sessions", "already moved"),
    ] {
        if count(name) > 0 {
            text.push_str(&format!(", {} {what}", count(name)));
        }
    }
    if count("unmovable_sessions") > 0 {
        text.push_str(&format!(" ({})", cell_text(progress.get("reason"))));
    }
    text
}

/// On a terminal, updates a bar that is full when nothing more can be moved.
fn show_progress(bar: &ProgressBar, progress: &Value) {
    let count = |name: &str| progress[name].as_u64().unwrap_or_default();
    bar.set_length((count("moved_sessions") + count("owned_sessions")).max(1));
    bar.set_position(count("moved_sessions") + count("unmovable_sessions") + count("already_moved_sessions"));
    bar.set_message(progress_text(progress));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stuck_sessions_are_an_error_with_worker_and_cause() {
        let progress = [("http://a:1", 2, "no fabric"), ("http://b:1", 0, ""), ("http://c:1", 3, "nobody")];
        let workers = progress
            .iter()
            .filter_map(|(at, stuck, why)| stuck_sessions(at, &json!({"unmovable_sessions": stuck, "reason": why})));
        let error = CtlError::SessionsStuck { workers: workers.collect() };
        assert_eq!((error.exit_code(), error.error_code()), (6, "partly_done"));
        let told =
            "sessions could not be moved from drained workers: 2 at http://a:1 (no fabric), 3 at http://c:1 (nobody); ";
        assert!(error.to_string().starts_with(told), "{error}");
    }

    #[test]
    fn progress_bar_is_full_when_nothing_more_can_move() {
        let shown = |progress: Value| {
            let bar = ProgressBar::hidden();
            show_progress(&bar, &progress);
            (bar.position(), bar.length(), bar.message())
        };
        let half = json!({"state": "moving", "owned_sessions": 5, "moved_sessions": 5, "moved_bytes": 3 << 20, "in_flight_sessions": 2, "unmovable_sessions": 0, "already_moved_sessions": 0});
        assert_eq!(shown(half), (5, Some(10), "5 of 10 sessions moved, 3 MiB, 2 in flight".into()));
        let done = json!({"owned_sessions": 2, "moved_sessions": 8, "moved_bytes": 0, "in_flight_sessions": 0, "unmovable_sessions": 1, "already_moved_sessions": 1, "reason": "no fabric"});
        let told = "8 of 10 sessions moved, 0 MiB, 1 unmovable, 1 already moved (no fabric)";
        assert_eq!(shown(done), (10, Some(10), told.into()));
        assert_eq!(shown(json!({"owned_sessions": 0, "moved_sessions": 0})).0, 0);
    }
}
