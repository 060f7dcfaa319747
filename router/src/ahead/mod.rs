//! Idle time used: while a session is between two steps, its prefix is sent to where its next step would rather be served.
//!
//! `planner::ahead` decides, with the same prices as for steps. One move at a time, within a bandwidth, never from or to a worker
//! that has much to do. What is sent is a copy: the next step's own commit moves ownership.

mod config;
mod gaps;

use std::sync::Arc;
use std::time::{Duration, Instant};

use ownership::ledger::Query;
use parking_lot::Mutex;
use planner::{Account, Action, AheadBounds, AheadMove, BarredLink, Disabled, Inputs, SessionView, Stay, Stays, ahead};
use vocabulary::{Blocks, Owner, SessionId, Tokens, WorkerId, WorkerView};
use workers_shim::dialect::Usage;

pub use config::AheadConfig;
pub use gaps::Expected;
use gaps::Tried;

use crate::config::units::paced;
use crate::gateway::Gateway;
use crate::pipeline::plan::Classified;
use crate::pipeline::prompts::Kept;
use crate::pipeline::receipt::Remark;
use crate::pipeline::replicate::relocate;
use crate::pipeline::steering::Mode;
use crate::pipeline::verify::{Transfer, sample};

/// Between two looks at sessions.
const EVERY: Duration = Duration::from_millis(250);
/// Sessions that one look is at: each costs two plans.
const AT_ONCE: usize = 64;

/// Sessions whose next step is awaited; none where nothing is sent ahead.
#[derive(Debug)]
pub struct Ahead(Option<Mutex<gaps::Gaps>>);

/// A move that pays, and what for.
struct Chosen {
    session: SessionId,
    expected: Arc<Expected>,
    moving: AheadMove,
    source: Owner,
    target: Owner,
    /// What of it the target has, and room for how much.
    stay: Stay,
}

impl Ahead {
    /// As configured.
    pub fn new(config: AheadConfig) -> Self {
        Self(config.enabled.then(Mutex::default))
    }

    /// A step is over that `server` answered.
    pub(crate) fn begins(
        &self,
        gateway: &Gateway,
        (step, kept): (&Classified, &Arc<Kept>),
        (server, usage): (WorkerId, Option<Usage>),
    ) {
        let Some(gaps) = self.0.as_ref().filter(|_| step.mode == Mode::Own) else { return };
        let mut ask = step.ask.clone();
        ask.prompt += usage.map_or(Tokens::ZERO, |usage| usage.completion);
        let expected = Expected { step: step.step, ask, kept: kept.clone() };
        let used = gaps.lock().begins(step.located.session.id, (expected, server), Instant::now());
        let outcome = used.map(|used| if used { "used" } else { "unused" });
        outcome
            .into_iter()
            .for_each(|outcome| gateway.metrics.plans.between_steps.ahead.with_label_values(&[outcome]).inc());
    }
}

/// Sends what pays, as long as the router runs.
pub(crate) async fn run(gateway: Arc<Gateway>) {
    let Some(gaps) = &gateway.policies.ahead.0 else { return };
    let bandwidth = gateway.config.ahead.bandwidth.0 as u64;
    loop {
        tokio::time::sleep(EVERY).await;
        // An operator may have turned it meanwhile.
        if gateway.steering.get().mode != Mode::Own {
            continue;
        }
        let due = gaps.lock().due(AT_ONCE, Instant::now());
        let chosen = due.into_iter().filter_map(|(session, expected)| {
            let chosen = choose(&gateway, session, expected);
            chosen.inspect_err(|why| tracing::debug!(%session, why = why.as_str(), "nothing is sent ahead")).ok()
        });
        let Some(chosen) = chosen.max_by_key(|chosen| chosen.moving.saves - chosen.moving.costs) else { continue };
        let begun = Instant::now();
        let tried = send(&gateway, &chosen).await;
        gaps.lock().tried(chosen.session, &chosen.expected, tried);
        if tried != Tried::Failed {
            tokio::time::sleep(paced(chosen.moving.bytes, bandwidth).saturating_sub(begun.elapsed())).await;
        }
    }
}

/// What would be sent for a session's next step.
fn choose(gateway: &Gateway, id: SessionId, expected: Arc<Expected>) -> Result<Chosen, Stays> {
    let Expected { step, ask, kept } = &*expected;
    let (view, workers) = (gateway.directory().view(), gateway.fleet().snapshot());
    let record = view.session(id).ok_or(Stays::NoOwner)?;
    if view.intents(id).next().is_some() {
        return Err(Stays::NotInGap);
    }
    let model = gateway.catalog().model(&kept.model);
    let query =
        Query { scope: model.scope(&kept.tenant), session: Some(id), chain: &kept.chain, preamble: Blocks::ZERO };
    let found = view.locate(query);
    let owner = view.session_owner(&record).filter(|owner| view.is_live(*owner));
    let session = SessionView {
        owner,
        epoch: record.epoch,
        sealed: found.known(),
        replicas: found.sealed.as_ref().map_or_else(Vec::new, |sealed| sealed.holders(owner)),
        ..SessionView::new(id)
    };
    let overlaps = gateway.index().read().overlaps_of(&kept.chain);
    let (policies, steering, shapes) = (&gateway.policies, gateway.steering.get(), gateway.roster.shapes());
    let ejected = policies.outliers.lock().out(&workers, Instant::now());
    let (barred, account) = (gateway.decisions.correctness.links(), policies.account().now());
    let inputs = Inputs {
        step: *step,
        ask,
        attention: model.attention.as_deref(),
        session: &session,
        workers: &workers,
        shapes: &shapes,
        overlaps: &overlaps,
        account: Account { tenancy: account.tenancy(), now: account.now },
        excluded: &ejected,
        policy: policies.own(),
        disabled: Disabled { actions: steering.disabled, links: &barred },
        turn: 0,
    };
    let moving = ahead(&inputs, &AheadBounds::default())?;
    drop(account);
    let at = |id: WorkerId| workers.iter().find(|view| view.id == id).ok_or(Stays::NoTarget);
    let owner = |view: &WorkerView, rank| Owner { worker: view.id, incarnation: view.incarnation, rank };
    let (from, to) = (at(moving.from)?, at(moving.to)?);
    let has = overlaps.iter().filter(|one| (one.worker, one.rank) == (moving.to, moving.to_rank)).map(|one| one.blocks);
    let found = has.max().unwrap_or_default().tokens(ask.block);
    let stay = Stay { tokens: moving.blocks.tokens(ask.block), found, capacity: to.capacity.kv };
    let (source, target) = (owner(from, moving.from_rank), owner(to, moving.to_rank));
    Ok(Chosen { session: id, expected, moving, source, target, stay })
}

/// Moves it, and says what came of it.
async fn send(gateway: &Arc<Gateway>, chosen: &Chosen) -> Tried {
    let Chosen { session, expected, moving, source, target, stay } = chosen;
    let remark = relocate(gateway, &expected.kept, (moving.blocks, moving.bytes), (*source, *target)).await;
    let metrics = &gateway.metrics.plans.between_steps;
    let (from, to, saves_ms) = (moving.from, moving.to, moving.saves.0 / 1000);
    if let Some(remark) = remark.filter(|remark| *remark != Remark::SourceRecomputed) {
        tracing::info!(%session, %from, %to, remark = remark.as_ref(), "nothing was sent ahead of a step");
        metrics.ahead.with_label_values(&["failed"]).inc();
        return Tried::Failed;
    }
    tracing::debug!(%session, %from, %to, bytes = moving.bytes.0, saves_ms, "a prefix was sent ahead of a step");
    metrics.ahead.with_label_values(&["sent"]).inc();
    metrics.ahead_bytes.inc_by(moving.bytes.0);
    gateway.policies.account().copied(*target, *session, *stay);
    let link = BarredLink { from, to };
    let transfer = Transfer { link, rank: moving.to_rank, blocks: Some(moving.blocks), action: Action::ArtifactFetch };
    sample(gateway, transfer, &expected.kept);
    Tried::Sent(moving.to)
}
