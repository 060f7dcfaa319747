//! Tokenizer drift: checks whether engines tokenize prompts as this router does. Engines must report the same number of
//! tokens, and must not find more of a prompt in their caches than their events have reported. These are the outside
//! signs of a different tokenizer or template; without them steps would be called exact although none of their blocks
//! is ever found.
//!
//! Only certain values are compared, and no step waits or fails because of a comparison.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use strum::{AsRefStr, IntoStaticStr};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use vocabulary::{ModelId, WorkerId};

use workers_shim::fleet::Fleet;

use crate::receipt::{CacheHitCheck, PromptTokenCounts};
use crate::telemetry::prefix_cache_metrics::PrefixCacheMetrics;

/// Consecutive agreeing answers that clear a suspicion.
const AGREEMENTS_TO_CLEAR: u32 = 32;
/// Events arrive later than answers where links or engines are slow: a cache hit beyond the reported blocks is checked
/// again after this time, before it counts.
pub(crate) const EVENT_GRACE_PERIOD: Duration = Duration::from_secs(3);
/// Limit of answers that wait for a second check; further ones are not compared.
const MAX_DEFERRED_CHECKS: usize = 256;
/// Time between two removals of workers that are not listed any more.
const PRUNE_INTERVAL: Duration = Duration::from_secs(1);
/// Minimum time between two warnings for a model at a worker.
const WARN_INTERVAL: Duration = Duration::from_secs(60);

/// The sign by which an engine shows that its prompts differ from those computed here.
#[derive(Clone, Copy, PartialEq, Eq, Debug, AsRefStr, IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum DriftSignal {
    /// Their number of tokens.
    #[strum(serialize = "token_count_mismatch")]
    TokenCount,
    /// The number of tokens found in its cache.
    #[strum(serialize = "cache_hit_mismatch")]
    CacheHit,
}

/// A model whose prompts differ at some workers.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TokenizerMismatch {
    /// The model as clients name it.
    pub model: ModelId,
    /// The sign by which it shows.
    pub signal: DriftSignal,
    /// The workers that disagree.
    pub workers: Vec<WorkerId>,
    /// Where the model's steps no longer count as exact.
    pub scope: MismatchScope,
}

/// Where a model's steps do not count as exact.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MismatchScope {
    /// At the workers that disagree, which are a minority.
    Workers,
    /// Everywhere: most of the workers that answered disagree.
    Model,
}

/// What one answer shows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum DriftObservation {
    TokenCount(PromptTokenCounts),
    CacheHit(CacheHitCheck),
}

/// What one worker's answers show about one model's prompts.
#[derive(Debug, Default)]
struct MismatchWindow {
    /// Bit mask of the newest eight answers, set where an answer disagreed.
    disagreements: u8,
    /// Consecutive answers that agreed.
    agreements: u32,
    suspected: bool,
    warned_at: Option<Instant>,
}

impl MismatchWindow {
    fn record(&mut self, observation: DriftObservation) {
        let agrees = observation.agrees();
        self.disagreements = self.disagreements << 1 | u8::from(!agrees);
        self.agreements = if agrees { self.agreements.saturating_add(1) } else { 0 };
        self.suspected = match self.suspected {
            false => self.disagreements.count_ones() >= observation.signal().mismatch_threshold(),
            true => self.agreements < AGREEMENTS_TO_CLEAR,
        };
    }

    /// Whether to log this disagreement: the log is rate-limited.
    fn should_warn(&mut self, now: Instant) -> bool {
        let is_due = self.warned_at.is_none_or(|last| now.saturating_duration_since(last) >= WARN_INTERVAL);
        if is_due {
            self.warned_at = Some(now);
        }
        is_due
    }
}

#[derive(Debug, Default)]
struct WorkerWindows(BTreeMap<WorkerId, MismatchWindow>);

impl WorkerWindows {
    fn suspected_workers(&self) -> impl Iterator<Item = WorkerId> {
        self.0.iter().filter(|(_, window)| window.suspected).map(|(worker, _)| *worker)
    }

    /// Whether most of the workers disagree.
    fn is_suspected_everywhere(&self) -> bool {
        2 * self.suspected_workers().count() > self.0.len()
    }

    fn is_suspected_mismatch(&self, worker: WorkerId) -> bool {
        self.0.get(&worker).is_some_and(|window| window.suspected) || self.is_suspected_everywhere()
    }
}

/// The windows of one model by signal.
#[derive(Debug, Default)]
struct ModelDriftWindows {
    token_counts: WorkerWindows,
    cache_hits: WorkerWindows,
}

impl ModelDriftWindows {
    fn of(&mut self, sign: DriftSignal) -> &mut WorkerWindows {
        match sign {
            DriftSignal::TokenCount => &mut self.token_counts,
            DriftSignal::CacheHit => &mut self.cache_hits,
        }
    }

    fn all(&self) -> [(DriftSignal, &WorkerWindows); 2] {
        [(DriftSignal::TokenCount, &self.token_counts), (DriftSignal::CacheHit, &self.cache_hits)]
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum DriftTransition {
    Disagrees,
    Suspected,
    Cleared,
}

/// Observations of all workers. At most two windows per configured model and listed worker.
#[derive(Debug)]
pub struct TokenizerDrift {
    models: Mutex<BTreeMap<ModelId, ModelDriftWindows>>,
    /// Whether any mismatch is suspected: if not, steps need not take the lock.
    any_suspected: AtomicBool,
    /// Slots for answers that are checked a second time.
    deferred_checks: Arc<Semaphore>,
    metrics: PrefixCacheMetrics,
}

impl TokenizerDrift {
    /// Returns an instance without observations.
    pub fn new(metrics: PrefixCacheMetrics) -> Self {
        let deferred_checks = Arc::new(Semaphore::new(MAX_DEFERRED_CHECKS));
        Self { models: Mutex::default(), any_suspected: AtomicBool::new(false), deferred_checks, metrics }
    }

    /// Records a complete answer of a worker. `counts` is `None` where the counts are not comparable; it is returned
    /// where they disagree.
    pub fn record_token_count(
        &self,
        at: (&ModelId, WorkerId),
        counts: Option<PromptTokenCounts>,
        now: Instant,
    ) -> Option<PromptTokenCounts> {
        self.record_answer(at, (DriftSignal::TokenCount, counts.map(DriftObservation::TokenCount)), now)
            .then_some(counts)
            .flatten()
    }

    /// Records how much of its prompt an engine found in its cache, in the same way.
    pub fn record_cache_hit(
        &self,
        at: (&ModelId, WorkerId),
        finds: Option<CacheHitCheck>,
        now: Instant,
    ) -> Option<CacheHitCheck> {
        self.record_answer(at, (DriftSignal::CacheHit, finds.map(DriftObservation::CacheHit)), now)
            .then_some(finds)
            .flatten()
    }

    /// Acquires a slot for checking an answer a second time; `None` where there are too many.
    pub fn reserve_deferred_check(&self) -> Option<OwnedSemaphorePermit> {
        self.deferred_checks.clone().try_acquire_owned().ok()
    }

    /// Records an observation; returns whether it disagrees.
    fn record_answer(
        &self,
        at: (&ModelId, WorkerId),
        (sign, said): (DriftSignal, Option<DriftObservation>),
        now: Instant,
    ) -> bool {
        let outcome = said.map_or("not_comparable", |said| if said.agrees() { "match" } else { "mismatch" });
        let counter = match sign {
            DriftSignal::TokenCount => &self.metrics.token_count_checks,
            DriftSignal::CacheHit => &self.metrics.cache_hit_checks,
        };
        counter.with_label_values(&[outcome]).inc();
        let Some(observation) = said else { return false };
        if let Some(news) = self.record(at, observation, now) {
            news.log(at, observation);
        }
        !observation.agrees()
    }

    fn record(
        &self,
        (model, worker): (&ModelId, WorkerId),
        observation: DriftObservation,
        now: Instant,
    ) -> Option<DriftTransition> {
        let mut models = self.models.lock();
        let answered = models.entry(model.clone()).or_default().of(observation.signal());
        let window = answered.0.entry(worker).or_default();
        let was_doubted = window.suspected;
        window.record(observation);
        let news = match (was_doubted, window.suspected) {
            (true, false) => Some(DriftTransition::Cleared),
            (false, true) => Some(DriftTransition::Suspected),
            _ if observation.agrees() => None,
            _ => window.should_warn(now).then_some(DriftTransition::Disagrees),
        };
        if was_doubted != window.suspected {
            self.refresh_any(&models);
        }
        news
    }

    fn refresh_any(&self, models: &BTreeMap<ModelId, ModelDriftWindows>) {
        let mut all = models.values().flat_map(ModelDriftWindows::all);
        self.any_suspected
            .store(all.any(|(_, answered)| answered.suspected_workers().next().is_some()), Ordering::Release);
    }

    /// Forgets all other workers' observations: a worker that left cannot agree again, so its suspicion would never
    /// end.
    pub fn retain_workers(&self, is_listed: impl Fn(WorkerId) -> bool) {
        let mut models = self.models.lock();
        for signs in models.values_mut() {
            for sign in [DriftSignal::TokenCount, DriftSignal::CacheHit] {
                signs.of(sign).0.retain(|worker, _| is_listed(*worker));
            }
        }
        self.refresh_any(&models);
    }

    /// Whether a step of this model must not count as exact at this worker.
    pub fn is_suspected_mismatch(&self, model: &ModelId, worker: WorkerId) -> bool {
        if !self.any_suspected.load(Ordering::Acquire) {
            return false;
        }
        let models = self.models.lock();
        models
            .get(model)
            .is_some_and(|signs| signs.all().iter().any(|(_, answered)| answered.is_suspected_mismatch(worker)))
    }

    /// Returns every model whose prompts differ at some worker, sorted by name.
    pub fn suspected_mismatches(&self) -> Vec<TokenizerMismatch> {
        let models = self.models.lock();
        let doubt = |model: &ModelId, (sign, answered): (DriftSignal, &WorkerWindows)| {
            let at: Vec<WorkerId> = answered.suspected_workers().collect();
            let reach = if answered.is_suspected_everywhere() { MismatchScope::Model } else { MismatchScope::Workers };
            (!at.is_empty()).then(|| TokenizerMismatch {
                model: model.clone(),
                signal: sign,
                workers: at,
                scope: reach,
            })
        };
        models
            .iter()
            .flat_map(|(model, signs)| signs.all().into_iter().filter_map(move |it| doubt(model, it)))
            .collect()
    }

    /// Number of models that are suspected everywhere.
    pub fn suspected_model_count(&self) -> usize {
        let is_doubted =
            |signs: &&ModelDriftWindows| signs.all().iter().any(|(_, answered)| answered.is_suspected_everywhere());
        self.models.lock().values().filter(is_doubted).count()
    }
}

/// Forgets workers that are no longer listed. Never returns.
pub async fn follow(drift: Arc<TokenizerDrift>, fleet: Arc<Fleet>) {
    loop {
        tokio::time::sleep(PRUNE_INTERVAL).await;
        drift.retain_workers(|worker| fleet.is_listed(worker));
    }
}

impl DriftSignal {
    /// Disagreements among a worker's last eight answers that raise a suspicion. A count is right or wrong; a cache hit
    /// looks wrong a few times where events come later than answers.
    fn mismatch_threshold(self) -> u32 {
        match self {
            DriftSignal::TokenCount => 3,
            DriftSignal::CacheHit => 6,
        }
    }
}

impl DriftObservation {
    fn signal(self) -> DriftSignal {
        match self {
            DriftObservation::TokenCount(_) => DriftSignal::TokenCount,
            DriftObservation::CacheHit(_) => DriftSignal::CacheHit,
        }
    }

    fn agrees(self) -> bool {
        match self {
            DriftObservation::TokenCount(counts) => counts.agree(),
            DriftObservation::CacheHit(finds) => finds.agree(),
        }
    }
}

impl DriftTransition {
    fn log(self, (model, worker): (&ModelId, WorkerId), observation: DriftObservation) {
        let advice = advice(model);
        match (self, observation) {
            (DriftTransition::Disagrees, DriftObservation::TokenCount(PromptTokenCounts { router, engine })) => {
                tracing::warn!(
                    %model, %worker, router_tokens = router.0, engine_tokens = engine.0,
                    "the worker's prompt token count differs from this router's; {advice}"
                )
            }
            (DriftTransition::Suspected, DriftObservation::TokenCount(PromptTokenCounts { router, engine })) => {
                tracing::warn!(
                    %model, %worker, router_tokens = router.0, engine_tokens = engine.0,
                    "a worker has counted other prompt tokens than were computed here several times: steps are known as approximate \
                     there until {AGREEMENTS_TO_CLEAR} answers in a row agree; {advice}"
                )
            }
            (DriftTransition::Disagrees, DriftObservation::CacheHit(CacheHitCheck { reported, cached_tokens, .. })) => {
                tracing::warn!(
                    %model, %worker, reported_tokens = reported.0, cached_tokens = cached_tokens.0,
                    "the worker's cache hit exceeds the blocks that its KV events had reported {EVENT_GRACE_PERIOD:?} later; if this repeats, {advice}"
                )
            }
            (DriftTransition::Suspected, DriftObservation::CacheHit(CacheHitCheck { reported, cached_tokens, .. })) => {
                tracing::warn!(
                    %model, %worker, reported_tokens = reported.0, cached_tokens = cached_tokens.0,
                    "a worker has found more of most prompts in its cache than its events told of them: it makes other prompts of \
                     requests than are computed here, and steps are known as approximate there until {AGREEMENTS_TO_CLEAR} answers in a row agree; \
                     {advice}"
                )
            }
            (DriftTransition::Cleared, DriftObservation::TokenCount(_)) => {
                tracing::info!(%model, %worker, "its counts of prompt tokens agree again: steps are exact there")
            }
            (DriftTransition::Cleared, DriftObservation::CacheHit(_)) => {
                tracing::info!(%model, %worker, "it finds what its events told again: steps are exact there")
            }
        }
    }
}

/// Returns what an operator should check.
pub fn advice(model: &ModelId) -> String {
    format!(
        "see that the folder of models.{model:?}.tokenizer_dir holds the very tokenizer.json and chat template that the engine \
         loads, and that the engine was not started with another --chat-template or --tokenizer; then start the router again",
        model = &*model.0
    )
}

#[cfg(test)]
mod tests;
