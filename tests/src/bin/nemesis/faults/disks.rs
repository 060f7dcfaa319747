//! Disks that fill up, logs that lost their end or one bit.

use std::time::Duration;

use super::Strike;
use super::processes::kill;
use crate::NemesisError;
use crate::arena::Arena;
use crate::check::Broken;
use crate::ground::{ballast, flip_a_byte, newest_chunk, tear_the_end, unballast};
use crate::history::Seat;

const FULL: Duration = Duration::from_secs(3);

/// A voter's disk is full, and has room again. A node that could not write keeps no ledger until it is started again:
/// either it ended, or it goes on serving and says so.
pub(super) async fn full(arena: &mut Arena) -> Result<Strike, NemesisError> {
    let mut strike = Strike::begin(arena);
    let Some(seat) = arena.cluster.small_disk() else {
        strike.note = "no small disk can be mounted here".into();
        return Ok(strike);
    };
    match arena.leader().await? == seat && arena.cluster.seats().len() > 1 {
        true => strike.takes_leader(arena),
        false => strike.fault(),
    }
    let folder = arena.cluster.folder(seat);
    let bytes = ballast(&folder)?;
    arena.hold(FULL).await;
    unballast(&folder)?;
    let mut running = arena.cluster.take(seat)?;
    let did = match running.ended() {
        Some(status) => format!("the node ended ({status})"),
        None => format!("the node went on serving, and ended when asked ({})", running.terminate().await?),
    };
    strike.note = format!("{} MB; {did}", bytes >> 20);
    arena.cluster.restart(seat).await?;
    Ok(strike.end(arena))
}

/// The end of a stopped follower's log, with what it had acknowledged, is gone.
pub(super) async fn torn(arena: &mut Arena) -> Result<Strike, NemesisError> {
    damaged(arena, |chunk| tear_the_end(chunk).map(|left| format!("cut to {left} bytes"))).await
}

/// One bit of a stopped follower's log is flipped.
pub(super) async fn flipped(arena: &mut Arena) -> Result<Strike, NemesisError> {
    damaged(arena, |chunk| flip_a_byte(chunk).map(|at| format!("flipped at {at}"))).await
}

/// The node must refuse to start, and say which file and where; then it is wiped and joins under a new id.
async fn damaged(
    arena: &mut Arena,
    damage: impl FnOnce(&std::path::Path) -> Result<String, NemesisError>,
) -> Result<Strike, NemesisError> {
    let alone = arena.cluster.seats().len() == 1;
    let seat = if alone { arena.leader().await? } else { arena.follower().await? };
    let mut strike = Strike::begin(arena);
    strike.fault();
    kill(arena, seat).await?;
    let chunk = newest_chunk(&arena.cluster.folder(seat))?;
    let whole = std::fs::read(&chunk).map_err(NemesisError::system(chunk.display().to_string()))?;
    strike.note = damage(&chunk)?;
    let boot = arena.cluster.boot(seat)?;
    match arena.cluster.start_in_vain(seat, boot).await {
        Ok(said) => strike.broken.extend(names_the_damage(seat, &said)),
        Err(error) => strike.broken.push(refusal(format!("node {}: {error}", seat.0))),
    }
    match alone {
        // From the backup that the message asks for.
        true => {
            std::fs::write(&chunk, whole).map_err(NemesisError::system(chunk.display().to_string()))?;
            arena.cluster.restart(seat).await?;
        }
        false => arena.replace(seat).await?,
    }
    Ok(strike.end(arena))
}

fn names_the_damage(seat: Seat, said: &str) -> Option<Broken> {
    // The end of a log has an entry, the middle of one an offset; either tells where.
    let located = said.contains("offset") || said.contains("entry");
    let named = said.contains("log") && located;
    (!named).then(|| refusal(format!("node {} does not say which log, or where in it: {said}", seat.0)))
}

fn refusal(detail: String) -> Broken {
    Broken { promise: "a damaged log stops the node, which says where the damage is", detail }
}
