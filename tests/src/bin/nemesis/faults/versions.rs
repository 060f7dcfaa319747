//! Older and newer binaries on the same data: forward, back, forward, and no way back once the level is raised.
//!
//! Level 1 is the level of the release before there were clusters, so that its nodes stand alone: this happens on a node
//! beside the others.

use tokio::time::Instant;
use vocabulary::SessionId;

use super::Strike;
use crate::NemesisError;
use crate::arena::{Arena, PATIENCE};
use crate::check::{Broken, StreamEnd};
use crate::cluster::{Boot, Origin};
use crate::ground::SEATS;
use crate::history::{Answer, Asked, Holding, Seat};
use crate::node::Running;
use crate::streams::{Streaming, Wish, stream};

const ALONE: Seat = Seat(SEATS);
const OLD: u32 = 1;
const NEW: u32 = 2;
const SESSIONS: usize = 8;
const PROMISE: &str = "binaries of two levels work on the same data until the level is raised";

/// Old, new, old, new, raised; then the old one must refuse.
pub(super) async fn mixed(arena: &mut Arena) -> Result<Strike, NemesisError> {
    let old = Boot { origin: Origin::Alone, max_level: Some(OLD) };
    let new = Boot::new(Origin::Alone);
    let mut strike = Strike::begin(arena);
    arena.cluster.wipe(ALONE)?;
    let mut running = arena.cluster.start_apart(ALONE, old).await?;
    let sessions = sessions(arena).await?;
    let mut known = write(arena, &sessions).await?;
    for (boot, word) in [(new, "newer"), (old, "older"), (new, "newer again")] {
        strike.fault();
        running = exchange(arena, running, boot).await?;
        let found = read(arena, &sessions).await?;
        if found != known {
            strike.broken.push(Broken { promise: PROMISE, detail: format!("{word}: {known:?} became {found:?}") });
        }
        known = write(arena, &sessions).await?;
    }
    let doors = arena.cluster.doors();
    let level = doors.status(ALONE).await?.level;
    if level != OLD {
        strike.broken.push(Broken { promise: PROMISE, detail: format!("level {level} before anybody raised it") });
    }
    doors.raise_level(ALONE, NEW).await?;
    strike.fault();
    running.terminate().await?;
    match arena.cluster.start_in_vain(ALONE, old).await {
        Ok(said) if said.contains("level") => {}
        Ok(said) => strike.broken.push(Broken { promise: PROMISE, detail: format!("the refusal is unclear: {said}") }),
        Err(error) => strike.broken.push(Broken { promise: PROMISE, detail: error.to_string() }),
    }
    strike.note = format!("levels {OLD} and {NEW} on one node's data, {} writes", SESSIONS * 4);
    Ok(strike.end(arena))
}

async fn exchange(arena: &Arena, running: Running, boot: Boot) -> Result<Running, NemesisError> {
    running.terminate().await?;
    arena.cluster.start_apart(ALONE, boot).await
}

/// Sessions in the lone node's ledger.
async fn sessions(arena: &Arena) -> Result<Vec<SessionId>, NemesisError> {
    let doors = arena.cluster.doors();
    let deadline = Instant::now() + PATIENCE;
    let mut sessions = Vec::new();
    for number in 0..SESSIONS {
        let key = format!("alone-{number}");
        loop {
            let wish = Wish { seat: ALONE, key: &key, tokens: 2 };
            let served = stream(doors, wish, || {}).await == Streaming::Ended(StreamEnd::Whole);
            if let Some(session) = if served { doors.session_of(ALONE, &key).await? } else { None } {
                sessions.push(session);
                break;
            }
            if Instant::now() > deadline {
                return Err(NemesisError::Late { what: "a session on the lone node".into() });
            }
            tokio::time::sleep(std::time::Duration::from_millis(100)).await;
        }
    }
    Ok(sessions)
}

/// Takes every session from its owner, and claims it for another; the grants.
async fn write(arena: &Arena, sessions: &[SessionId]) -> Result<Vec<Holding>, NemesisError> {
    let owners = arena.cluster.doors().owners(ALONE).await?;
    let mut door = arena.cluster.doors().enter();
    for (at, session) in sessions.iter().enumerate() {
        let Holding { owner, epoch } = door.read(ALONE, *session).await?;
        if let Some(owner) = owner {
            told(door.ask(ALONE, (*session, Asked::Release { owner, seen: epoch }), PATIENCE).await.0)?;
        }
        if let Some(next) = owners.get(at % owners.len().max(1)) {
            told(door.ask(ALONE, (*session, Asked::Claim(*next)), PATIENCE).await.0)?;
        }
    }
    read(arena, sessions).await
}

fn told(answer: Answer) -> Result<(), NemesisError> {
    match answer {
        Answer::Granted(_) | Answer::Released => Ok(()),
        other => Err(NemesisError::Answer { who: "the lone node".into(), got: format!("{other:?} to a write") }),
    }
}

async fn read(arena: &Arena, sessions: &[SessionId]) -> Result<Vec<Holding>, NemesisError> {
    let mut door = arena.cluster.doors().enter();
    let mut found = Vec::new();
    for session in sessions {
        found.push(door.read(ALONE, *session).await?);
    }
    Ok(found)
}
