//! What a process runs out of, for a while: descriptors and memory for files it opens and connections it takes, threads it
//! starts. A disk without room is another nemesis: it ends a ledger.

use std::time::Duration;

use tokio::time::Instant;

use super::{NO_LEVERS, Strike};
use crate::NemesisError;
use crate::arena::{Arena, PATIENCE};
use crate::check::Broken;
use crate::ground::{Lever, Levers};
use crate::history::Seat;

const HELD: Duration = Duration::from_millis(900);
const PROMISE: &str = "a shortage ends with its cause";

/// Each with the error of the system call: EMFILE, ENOMEM, EAGAIN.
const SHORTAGES: [(&str, Lever, i64); 5] = [
    ("descriptors for files", Lever::OpenError, 24),
    ("memory for files", Lever::OpenError, 12),
    ("descriptors for connections", Lever::AcceptError, 24),
    ("memory for connections", Lever::AcceptError, 12),
    ("threads", Lever::ThreadError, 11),
];

/// A follower runs out of each, then the leader, while each is asked for a snapshot. Nobody ends, and what failed for that
/// reason succeeds without a restart once the shortage is over: only a write or an fsync that fails stops a ledger.
pub(super) async fn shortages(arena: &mut Arena) -> Result<Strike, NemesisError> {
    let mut strike = Strike::begin(arena);
    let Some(levers) = arena.cluster.levers().cloned() else { return Ok(strike.not_run(NO_LEVERS)) };
    let (mut unopened, mut unaccepted, mut unstarted) = (0, 0, 0);
    for seat in [arena.follower().await?, arena.leader().await?] {
        for (what, lever, error) in SHORTAGES {
            strike.fault();
            levers.pull(seat, lever, error)?;
            under(arena, seat).await;
            levers.pull(seat, lever, 0)?;
            if let Some(broken) = over(arena, (seat, what)).await? {
                strike.broken.push(broken);
                // What follows shows nothing of this node.
                start_again(arena, seat).await?;
                break;
            }
        }
        let felt = felt(&levers, seat)?;
        unopened += felt.0;
        unaccepted += felt.1;
        unstarted += felt.2;
    }
    if strike.broken.is_empty() {
        strike.broken.extend(Broken::unless_felt("a shortage of descriptors for files", unopened));
        strike.broken.extend(Broken::unless_felt("a shortage of descriptors for connections", unaccepted));
    }
    // Threads that are there already do the work of those that are not.
    strike.note =
        format!("{unopened} files not opened, {unaccepted} connections not taken, {unstarted} threads not started");
    Ok(strike.end(arena))
}

fn felt(levers: &Levers, seat: Seat) -> Result<(i64, i64, i64), NemesisError> {
    let felt = levers.felt(seat)?;
    Ok((felt.unopened, felt.unaccepted, felt.unstarted))
}

/// Asks for a snapshot, which opens a file, on a connection of its own; what comes of it now is nobody's promise.
async fn under(arena: &mut Arena, seat: Seat) {
    let span = arena.span(HELD);
    let doors = arena.cluster.doors().clone();
    let asked = async {
        let _ = doors.write_snapshot(seat).await;
        let _ = doors.snapshot(seat).await;
    };
    let until = Instant::now() + span;
    let _ = tokio::time::timeout(span, asked).await;
    tokio::time::sleep_until(until).await;
}

/// What must be true of the node again.
async fn over(arena: &mut Arena, (seat, what): (Seat, &str)) -> Result<Option<Broken>, NemesisError> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if arena.cluster.running(seat)?.ended().is_some() {
            let detail = format!("node {} ran out of {what} and ended: {}", seat.0, arena.cluster.last_words(seat));
            return Ok(Some(Broken { promise: PROMISE, detail }));
        }
        let refused = match arena.cluster.doors().write_snapshot(seat).await {
            Ok(()) => return Ok(None),
            Err(refused) => refused,
        };
        if Instant::now() > deadline {
            let detail = format!("node {} ran out of {what}, and still answers: {refused}", seat.0);
            return Ok(Some(Broken { promise: PROMISE, detail }));
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

async fn start_again(arena: &mut Arena, seat: Seat) -> Result<(), NemesisError> {
    let mut running = arena.cluster.take(seat)?;
    if running.ended().is_none() {
        running.kill().await?;
    }
    arena.cluster.restart(seat).await
}
