//! Backups: saved while clients write, restored as a cluster of its own, and held against what clients were told; and
//! restored once more.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use serde::Deserialize;
use tokio::process::Command;
use tokio::time::Instant;
use vocabulary::{Epoch, SessionId};

use super::Strike;
use crate::NemesisError;
use crate::arena::{Arena, PATIENCE};
use crate::check::{self, Broken, Finals, NodeState};
use crate::cluster::{Boot, Origin};
use crate::door::{Change, Door};
use crate::ground::{SEATS, cut};
use crate::history::{Answer, Asked, Holding, Seat};
use crate::node::Running;

/// Where the restored cluster lives: seats that the one under test never takes.
const RESTORED: [Seat; 3] = [Seat(SEATS - 2), Seat(SEATS - 1), Seat(SEATS)];
const PROMISE: &str = "a restored backup holds all that was acknowledged before it";
/// Sessions that are written to in the restored cluster.
const WRITTEN: usize = 12;
/// Writes to each of them in the first cluster of one backup; the second gets fewer.
const WRITES: usize = 4;

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
        let (first, broken) = judge(arena, &saved, WRITES).await?;
        strike.broken.extend(broken);
        drop(restored);
        // Its machine died too, or it turned out bad: the same last good backup is taken again, and has written less so far.
        if seat == leader {
            strike.fault();
            let again = restore(arena, &file).await?;
            let (second, broken) = judge(arena, &saved, 1).await?;
            strike.broken.extend(broken);
            strike.broken.extend(outranks(&first, &second));
            drop(again);
        }
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

/// Every grant of the second cluster that a backup was restored to is newer than all of the first one: whoever holds one of
/// those is fenced off by it.
fn outranks(first: &[Epoch], second: &[Epoch]) -> Option<Broken> {
    let (newest, oldest) = first.iter().max().zip(second.iter().min())?;
    let detail = format!("the first restored cluster granted {newest}, the second one, later, {oldest}");
    (oldest <= newest).then_some(Broken { promise: "epochs rise over two restores of one backup", detail })
}

/// What the restored cluster remembers beside the backup, through each of its nodes; whether its grants, so many of each
/// session that is written to, outrank; and whether clients of the old cluster are fenced off. Returns the grants.
async fn judge(arena: &Arena, saved: &Finals, writes: usize) -> Result<(Vec<Epoch>, Vec<Broken>), NemesisError> {
    let (mut grants, mut broken) = (Vec::new(), Vec::new());
    let mut door = arena.cluster.doors().enter();
    let owners = arena.cluster.doors().owners(RESTORED[0]).await?;
    for (at, (subject, before)) in saved.iter().enumerate() {
        let found = door.read(RESTORED[at % RESTORED.len()], *subject).await?;
        if found.owner != before.owner {
            let detail = format!("{subject} was {before:?} in the backup, and is {found:?}");
            broken.push(Broken { promise: PROMISE, detail });
        }
        if at >= WRITTEN || owners.is_empty() {
            continue;
        }
        let mut seen = found.epoch;
        for to in owners.iter().cycle().take(writes) {
            let (answer, _) = door.ask(RESTORED[1], (*subject, Asked::Migrate { to: *to, seen }), PATIENCE).await;
            match answer {
                Answer::Granted(now) if now.generation > before.epoch.generation => {
                    grants.push(now);
                    seen = now;
                }
                _ => {
                    let detail = format!("{subject} was {before:?} in the backup; {answer:?} to a migration");
                    broken.push(Broken { promise: "a restored cluster's grants outrank all earlier ones", detail });
                    break;
                }
            }
        }
        broken.extend(fences_off(&mut door, (*subject, *before)).await?);
    }
    broken.extend(equal(arena).await?);
    broken.extend(crate::snapshot::check(arena, RESTORED[2]).await?);
    Ok((grants, broken))
}

/// A client of the old cluster, which lives on, comes to the restored one with what it saw there: nothing is taken away.
async fn fences_off(door: &mut Door, (subject, before): (SessionId, Holding)) -> Result<Option<Broken>, NemesisError> {
    let Some(owner) = before.owner else { return Ok(None) };
    let now = door.read(RESTORED[0], subject).await?;
    let (answer, _) = door.ask(RESTORED[0], (subject, Asked::Release { owner, seen: before.epoch }), PATIENCE).await;
    let then = door.read(RESTORED[0], subject).await?;
    let detail = format!("{subject} was {now:?}; {answer:?} to a release that had seen {before:?}, and it is {then:?}");
    Ok((then != now).then_some(Broken { promise: "epochs from before a backup fence nothing after it", detail }))
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
