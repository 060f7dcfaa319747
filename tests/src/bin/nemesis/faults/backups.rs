//! Backups: saved while clients write, restored as a cluster of its own, and held against what clients were told.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use serde::Deserialize;
use tokio::process::Command;
use tokio::time::Instant;

use super::Strike;
use crate::NemesisError;
use crate::arena::{Arena, PATIENCE};
use crate::check::{self, Broken, Finals, NodeState};
use crate::cluster::{Boot, Origin};
use crate::door::Change;
use crate::ground::{SEATS, cut};
use crate::history::{Answer, Asked, Holding, Seat};
use crate::node::Running;

/// Where the restored cluster lives: seats that the one under test never takes.
const RESTORED: [Seat; 3] = [Seat(SEATS - 2), Seat(SEATS - 1), Seat(SEATS)];
const PROMISE: &str = "a restored backup holds all that was acknowledged before it";
/// Sessions that are written to in the restored cluster.
const WRITTEN: usize = 12;

/// A snapshot that `ctl` saved.
#[derive(Deserialize)]
struct Saved {
    applied: u64,
}

/// Saves a backup of the leader and one of another node, and makes a cluster of three of each.
pub(super) async fn backup(arena: &mut Arena) -> Result<Strike, NemesisError> {
    let mut strike = Strike::begin(arena);
    let leader = arena.leader().await?;
    let others = arena.others(leader);
    let other = arena.dice.pick(&others).copied().unwrap_or(leader);
    let mut notes = Vec::new();
    for (name, seat) in [("leader", leader), ("other", other)] {
        strike.fault();
        let file = arena.cluster.folder(seat).with_file_name(format!("backup-{name}-{}", arena.dice.below(1 << 32)));
        let acknowledged = arena.history.look(|kept| check::newest(&kept.operations));
        let Saved { applied } = save(arena, seat, &file).await?;
        let saved = holdings(arena, &file)?;
        // The backup may hold what is still to be answered; who was asked notes it once clients have held still.
        drop(arena.load.pause().await);
        let (history, held) = (arena.history.clone(), saved.clone());
        strike.broken.extend(check::aside(move || check::backed_up(&history.copy(), &held, applied)).await?);
        if seat == leader && applied < acknowledged {
            let detail = format!("it ends at entry {applied}; {acknowledged} was acknowledged before it was asked for");
            strike.broken.push(Broken { promise: PROMISE, detail });
        }
        strike.broken.extend(refuses_a_part(arena, &file).await?);
        notes.push(format!("{name} to entry {applied}"));
        let restored = restore(arena, &file).await?;
        strike.broken.extend(judge(arena, &saved).await?);
        drop(restored);
        std::fs::remove_file(&file).map_err(NemesisError::system(file.display().to_string()))?;
    }
    strike.note = format!("restored on {} nodes: {}", RESTORED.len(), notes.join(", "));
    Ok(strike.end(arena))
}

async fn save(arena: &Arena, seat: Seat, file: &Path) -> Result<Saved, NemesisError> {
    let endpoint = format!("http://{}", arena.cluster.doors().operator(seat));
    let file = file.display().to_string();
    let said = ctl(arena, &["--endpoint", &endpoint, "-o", "json", "snapshot", "save", &file]).await?;
    let said = said.done("ctl snapshot save")?;
    let odd =
        |error: serde_json::Error| NemesisError::Answer { who: "ctl snapshot save".into(), got: error.to_string() };
    serde_json::from_str(&said).map_err(odd)
}

/// How a call of `ctl` ended.
#[derive(Debug)]
enum Ctl {
    /// It did it, and printed this.
    Done(String),
    /// It did not, and said this.
    Refused(String),
}

impl Ctl {
    fn done(self, who: &str) -> Result<String, NemesisError> {
        match self {
            Ctl::Done(said) => Ok(said),
            Ctl::Refused(got) => Err(NemesisError::Answer { who: who.into(), got }),
        }
    }
}

async fn ctl(arena: &Arena, arguments: &[&str]) -> Result<Ctl, NemesisError> {
    let mut command = Command::new(arena.cluster.binary());
    command.arg("ctl").args(arguments).stdin(Stdio::null()).kill_on_drop(true);
    let output = command.output().await.map_err(NemesisError::system("run ctl"))?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    Ok(if output.status.success() { Ctl::Done(text(&output.stdout)) } else { Ctl::Refused(text(&output.stderr)) })
}

/// A backup whose end is gone is no data directory, and leaves none behind.
async fn refuses_a_part(arena: &mut Arena, file: &Path) -> Result<Option<Broken>, NemesisError> {
    let part = file.with_extension("part");
    std::fs::copy(file, &part).map_err(NemesisError::system(part.display().to_string()))?;
    let bytes = 1 + arena.dice.below(64);
    cut(&part, bytes)?;
    let folder = part.with_extension("restored");
    let paths = [part.display().to_string(), folder.display().to_string()];
    let tried = ctl(arena, &["snapshot", "restore", &paths[0], "--data-dir", &paths[1]]).await?;
    let held =
        matches!(&tried, Ctl::Refused(said) if said.contains(&paths[0]) && said.contains("offset")) && !folder.exists();
    let detail = || format!("{bytes} bytes were cut off: {tried:?}, a directory is there: {}", folder.exists());
    std::fs::remove_file(&part).map_err(NemesisError::system(paths[0].clone()))?;
    Ok((!held).then(|| Broken { promise: "a cut backup is refused with the file and the offset", detail: detail() }))
}

/// A cluster of three from the backup.
async fn restore(arena: &mut Arena, file: &Path) -> Result<Vec<Running>, NemesisError> {
    for seat in RESTORED {
        arena.cluster.wipe(seat)?;
    }
    let (founder, file) = (RESTORED[0], file.display().to_string());
    let folder: PathBuf = arena.cluster.folder(founder);
    let done = ctl(arena, &["snapshot", "restore", &file, "--data-dir", &folder.display().to_string()]).await?;
    done.done("ctl snapshot restore")?;
    let mut running = vec![arena.cluster.start_apart(founder, Boot::new(Origin::Founder)).await?];
    for seat in &RESTORED[1..] {
        running.push(arena.cluster.start_apart(*seat, Boot::new(Origin::JoinsThrough(founder))).await?);
    }
    promote(arena).await?;
    Ok(running)
}

async fn promote(arena: &Arena) -> Result<(), NemesisError> {
    let (founder, deadline) = (RESTORED[0], Instant::now() + PATIENCE);
    loop {
        let tried = async {
            let mut nodes = Vec::new();
            for seat in &RESTORED[1..] {
                nodes.push(arena.cluster.member(*seat, founder).await?.node);
            }
            arena.cluster.doors().change(founder, &Change::Promote(nodes)).await
        };
        match tried.await {
            Ok(()) => return Ok(()),
            Err(error) if Instant::now() > deadline => return Err(error),
            // One that has not joined or caught up yet.
            Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
        }
    }
}

/// Who has which session, by the backup itself.
fn holdings(arena: &Arena, file: &Path) -> Result<Finals, NemesisError> {
    let unreadable = |error: ownership::OwnershipError| NemesisError::Answer {
        who: file.display().to_string(),
        got: error.to_string(),
    };
    let ledger = ownership::load(file).map_err(unreadable)?;
    let sessions = arena.load.subjects().iter().filter_map(|subject| Some((*subject, ledger.session(*subject)?)));
    Ok(sessions.map(|(subject, session)| (subject, Holding { owner: session.owner, epoch: session.epoch })).collect())
}

/// What the restored cluster remembers beside the backup, through each of its nodes; and whether its grants outrank.
async fn judge(arena: &Arena, saved: &Finals) -> Result<Vec<Broken>, NemesisError> {
    let mut broken = Vec::new();
    let mut door = arena.cluster.doors().enter();
    let owners = arena.cluster.doors().owners(RESTORED[0]).await?;
    for (at, (subject, before)) in saved.iter().enumerate() {
        let found = door.read(RESTORED[at % RESTORED.len()], *subject).await?;
        if found.owner != before.owner {
            let detail = format!("{subject} was {before:?} in the backup, and is {found:?}");
            broken.push(Broken { promise: PROMISE, detail });
        }
        let Some(to) = owners.first().filter(|_| at < WRITTEN) else { continue };
        let asked = Asked::Migrate { to: *to, seen: found.epoch };
        let (answer, _) = door.ask(RESTORED[1], (*subject, asked), PATIENCE).await;
        if !matches!(answer, Answer::Granted(now) if now.generation > before.epoch.generation) {
            let detail = format!("{subject} was {before:?} in the backup; {answer:?} to a migration");
            broken.push(Broken { promise: "a restored cluster's grants outrank all earlier ones", detail });
        }
    }
    broken.extend(equal(arena).await?);
    broken.extend(crate::snapshot::check(arena, RESTORED[2]).await?);
    Ok(broken)
}

async fn equal(arena: &Arena) -> Result<Vec<Broken>, NemesisError> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let mut states: Vec<NodeState> = Vec::new();
        for seat in RESTORED {
            let (applied, hash) = arena.cluster.doors().state_hash(seat).await?;
            states.push(NodeState { seat, applied, hash });
        }
        if states.iter().all(|state| state.applied == states[0].applied) {
            return Ok(check::equal_states(&states));
        }
        if Instant::now() > deadline {
            return Err(NemesisError::Late { what: format!("equal applied indexes after a restore: {states:?}") });
        }
    }
}
