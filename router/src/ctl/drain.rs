//! `ctl drain`: drains workers before they stop, one worker, or several in turn (rolling).

use std::time::{Duration, Instant, SystemTime};

use clap::Args;
use http::Method;
use indicatif::ProgressBar;
use serde_json::{Value, json};

use super::args::WorkerArg;
use super::client::OperatorClient;
use super::error::{CtlError, StuckSessions};
use super::output::{OutputFormat, note, print_text};
use super::table::cell_text;
use crate::config::units::TimeSpan;
use crate::simulate_command::bar;

/// Interval between two polls.
const POLL_INTERVAL: Duration = Duration::from_millis(300);
#[derive(Clone, Debug, Args)]
pub(crate) struct DrainArgs {
    /// The worker, by id or URL; with --rolling all of them, in the order in which they are upgraded.
    #[arg(required = true)]
    workers: Vec<WorkerArg>,
    /// One after the other: each is drained, waited for until it was started anew, and taken back into service. Its sessions go
    /// to those that are not listed or are upgraded already, and where there are none to the last one; none moves twice.
    #[arg(long)]
    rolling: bool,
    /// Its sessions stay where they are: it only takes no new ones.
    #[arg(long)]
    stay: bool,
    /// Most bytes of KV that are moved a second; drain.bandwidth of the router when left out.
    #[arg(long, value_name = "BYTES", value_parser = clap::value_parser!(u64).range(1..))]
    bytes_per_second: Option<u64>,
    /// Longest wait for one worker: until its sessions are moved, and until it was started anew.
    #[arg(long, value_name = "SPAN", default_value = "1h")]
    within: TimeSpan,
}

/// Drains one worker, or all given workers in turn. Fails at the end if sessions could not be moved.
pub(crate) async fn drain(client: &OperatorClient, args: &DrainArgs, output: OutputFormat) -> Result<(), CtlError> {
    let all = resolve_workers(client, args).await?;
    let upgrade = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_millis();
    let (mut told, mut stayed) = (Vec::new(), Vec::new());
    for (at, (worker, endpoint)) in all.iter().enumerate() {
        let next: Vec<String> = args.workers[at + 1..].iter().map(WorkerArg::to_string).collect();
        let mut body = json!({"draining": true, "sessions": if args.stay { "stay" } else { "move" }, "avoid": next});
        if args.rolling {
            body["upgrade"] = json!(format!("rolling-{upgrade}"));
        }
        if let Some(bytes) = args.bytes_per_second {
            body["bytes_per_second"] = json!(bytes);
        }
        let one = DrainingWorker { client, worker: *worker, endpoint, deadline: Instant::now() + args.within.0 };
        let life = one.fetch_worker().await?["incarnation"].clone();
        let progress = one.move_sessions(&body).await?;
        if output == OutputFormat::Table {
            print_text(&format!("{endpoint} drains: {}\n", progress_text(&progress)));
        }
        let here = stuck_sessions(endpoint, &progress).filter(|_| !args.stay);
        let along =
            here.as_ref().map_or_else(String::new, |here| format!(", which ends {} sessions' KV", here.sessions));
        stayed.extend(here);
        told.push(json!({"worker": worker.to_string(), "endpoint": endpoint, "progress": progress}));
        if args.rolling {
            note(&format!("{endpoint} can be stopped{along}: start it anew, upgraded"));
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
        let what =
            "several workers are drained one after the other: give --rolling, and the order in which they are upgraded";
        return Err(CtlError::Usage(what.into()));
    }
    let mut all: Vec<(WorkerArg, String)> = Vec::new();
    for worker in &args.workers {
        let got = client.get(&format!("workers/{worker}")).await?.json;
        let endpoint = got["worker"]["endpoint"].as_str().map_or_else(|| worker.to_string(), str::to_owned);
        if all.iter().any(|(other, _)| other == worker) {
            return Err(CtlError::Usage(format!("{endpoint} is named twice; nothing was drained")));
        }
        all.push((*worker, endpoint));
    }
    Ok(all)
}

/// Returns the sessions that could not be moved; `None` if there are none.
fn stuck_sessions(endpoint: &str, progress: &Value) -> Option<StuckSessions> {
    let sessions = progress["stuck"].as_u64().filter(|count| *count > 0)?;
    Some(StuckSessions { endpoint: endpoint.into(), sessions, reason: cell_text(progress.get("why")) })
}

/// Drain of one worker, with a deadline.
struct DrainingWorker<'a> {
    client: &'a OperatorClient,
    worker: WorkerArg,
    endpoint: &'a str,
    deadline: Instant,
}

impl DrainingWorker<'_> {
    async fn fetch_worker(&self) -> Result<Value, CtlError> {
        let path = format!("workers/{}", self.worker);
        Ok(self.client.get(&path).await?.json["worker"].clone())
    }

    async fn set_draining(&self, body: &Value) -> Result<(), CtlError> {
        let path = format!("workers/{}/draining", self.worker);
        self.client.write((Method::PUT, &path), body, None).await.map(drop)
    }

    /// Waits until nothing more can be moved. Requests the drain again if the router that moved the sessions has no
    /// record of it.
    async fn move_sessions(&self, body: &Value) -> Result<Value, CtlError> {
        self.set_draining(body).await?;
        let path = format!("workers/{}/draining", self.worker);
        let stays = body["sessions"] == "stay";
        let bar = bar("[{bar:30}] {msg}", 0);
        loop {
            let progress = self.client.get(&path).await?.json["progress"].clone();
            show_progress(&bar, &progress);
            match progress["state"].as_str() {
                Some("done") => break Ok(progress),
                Some("stopped") => {
                    return Err(CtlError::Refused(format!("{} was taken back into service meanwhile", self.endpoint)));
                }
                _ if stays => break Ok(progress),
                Some("none") => self.set_draining(body).await?,
                _ => {}
            }
            self.pause("its sessions are not moved").await?;
        }
    }

    /// Waits until the worker has restarted and is ready.
    async fn wait_until_restarted(&self, life: &Value) -> Result<(), CtlError> {
        let is_new = |now: &Value| now["incarnation"] != *life && now["health"] != "unreachable";
        while !is_new(&self.fetch_worker().await?) {
            self.pause("it was not started anew").await?;
        }
        self.set_draining(&json!({"draining": false})).await?;
        while self.fetch_worker().await?["health"] != "ready" {
            self.pause("it takes no work").await?;
        }
        Ok(())
    }

    async fn pause(&self, what: &str) -> Result<(), CtlError> {
        if Instant::now() >= self.deadline {
            return Err(CtlError::Refused(format!("{}: {what} within --within; it still drains", self.endpoint)));
        }
        tokio::time::sleep(POLL_INTERVAL).await;
        Ok(())
    }
}

/// Formats the progress.
fn progress_text(progress: &Value) -> String {
    let count = |name: &str| progress[name].as_u64().unwrap_or_default();
    let (moved, owned) = (count("moved"), count("owned"));
    let mut text = format!("{moved} of {} sessions moved, {} MiB", moved + owned, count("moved_bytes") >> 20);
    for (name, what) in [("busy", "busy"), ("stuck", "cannot be moved"), ("kept", "moved once already and stay")] {
        if count(name) > 0 {
            text.push_str(&format!(", {} {what}", count(name)));
        }
    }
    if count("stuck") > 0 {
        text.push_str(&format!(" ({})", cell_text(progress.get("why"))));
    }
    text
}

/// On a terminal, updates a bar that is full when nothing more can be moved.
fn show_progress(bar: &ProgressBar, progress: &Value) {
    let count = |name: &str| progress[name].as_u64().unwrap_or_default();
    bar.set_length((count("moved") + count("owned")).max(1));
    bar.set_position(count("moved") + count("stuck") + count("kept"));
    bar.set_message(progress_text(progress));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stuck_sessions_are_an_error_with_worker_and_cause() {
        let progress = [("http://a:1", 2, "no fabric"), ("http://b:1", 0, ""), ("http://c:1", 3, "nobody")];
        let workers =
            progress.iter().filter_map(|(at, stuck, why)| stuck_sessions(at, &json!({"stuck": stuck, "why": why})));
        let error = CtlError::SessionsStuck { workers: workers.collect() };
        assert_eq!((error.exit_code(), error.error_code()), (6, "partly_done"));
        let told = "sessions stay at who was drained: 2 at http://a:1 (no fabric), 3 at http://c:1 (nobody); ";
        assert!(error.to_string().starts_with(told), "{error}");
    }

    #[test]
    fn progress_bar_is_full_when_nothing_more_can_move() {
        let shown = |progress: Value| {
            let bar = ProgressBar::hidden();
            show_progress(&bar, &progress);
            (bar.position(), bar.length(), bar.message())
        };
        let half = json!({"state": "moving", "owned": 5, "moved": 5, "moved_bytes": 3 << 20, "busy": 2, "stuck": 0, "kept": 0});
        assert_eq!(shown(half), (5, Some(10), "5 of 10 sessions moved, 3 MiB, 2 busy".into()));
        let done =
            json!({"owned": 2, "moved": 8, "moved_bytes": 0, "busy": 0, "stuck": 1, "kept": 1, "why": "no fabric"});
        let told = "8 of 10 sessions moved, 0 MiB, 1 cannot be moved, 1 moved once already and stay (no fabric)";
        assert_eq!(shown(done), (10, Some(10), told.into()));
        assert_eq!(shown(json!({"owned": 0, "moved": 0})).0, 0);
    }
}
