//! Whether engines read prompts as they are read here: whether they count as many tokens in them, and find no more of them
//! in their caches than their events had told. The signs from outside that the tokenizer or the template here is not the
//! engine's; without them steps would be called exact while no block of them is ever found.
//!
//! Only what is certain is held against each other, and no step waits or fails for it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use serde::Serialize;
use strum::{AsRefStr, IntoStaticStr};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use vocabulary::{ModelId, Tokens, WorkerId};

use crate::app_state::AppState;
use crate::telemetry::prefix_cache::PrefixCacheMetrics;

/// So many answers in a row that agree end a doubt.
const AGREEMENTS_TO_CLEAR: u32 = 32;
/// Events come later than answers where links or engines are slow: what more was found than they had told is looked at again
/// after this time, before it counts.
pub(crate) const EVENT_GRACE_PERIOD: Duration = Duration::from_secs(3);
/// So many answers wait for that at most; others say nothing then.
const MAX_DEFERRED_CHECKS: usize = 256;
/// Between two looks at who is still listed.
const PRUNE_INTERVAL: Duration = Duration::from_secs(1);
/// Between two warnings of one model at one worker.
const WARN_INTERVAL: Duration = Duration::from_secs(60);

/// The tokens of one request's prompts by two counts.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Debug)]
pub struct PromptTokenCount {
    /// As computed here.
    pub computed: Tokens,
    /// As the engine's usage says.
    pub counted: Tokens,
}

/// The tokens of one prompt that were in the engine's cache, by two words of the engine's.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Debug)]
pub struct CacheHitCheck {
    /// What its events had told of the prompt as it was computed here: before the step, until its answer was over, or `EVENT_GRACE_PERIOD`
    /// after that.
    pub told: Tokens,
    /// As its usage says.
    pub found: Tokens,
    /// One of the engine's own blocks: so much may be a matter of rounding.
    pub block: Tokens,
}

/// In what an engine shows that its prompts are other ones than were computed here.
#[derive(Clone, Copy, PartialEq, Eq, Debug, AsRefStr, IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum DriftSignal {
    /// In how many tokens they have.
    #[strum(serialize = "engine_disagrees")]
    Counted,
    /// In how many of those it finds in its cache.
    #[strum(serialize = "cache_disagrees")]
    Found,
}

/// A model whose prompts are other ones at some workers.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TokenizerMismatch {
    /// As clients name it.
    pub model: ModelId,
    /// In what it shows.
    pub signal: DriftSignal,
    /// The workers that disagree.
    pub workers: Vec<WorkerId>,
    /// Where its steps are not called exact any more.
    pub scope: MismatchScope,
}

/// Where a model's steps are not called exact.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MismatchScope {
    /// At the workers that disagree: most agree, so that these are the odd ones.
    Workers,
    /// Everywhere: most of the workers that answered disagree.
    Model,
}

/// One answer's word.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum DriftObservation {
    TokenCount(PromptTokenCount),
    CacheHit(CacheHitCheck),
}

/// What one worker's answers said of one model's prompts.
#[derive(Debug, Default)]
struct MismatchWindow {
    /// The newest eight answers, a bit each, set where it disagreed.
    disagreements: u8,
    /// Answers in a row that agreed.
    agreements: u32,
    suspected: bool,
    warned_at: Option<Instant>,
}

impl MismatchWindow {
    fn record(&mut self, said: DriftObservation) {
        let agrees = said.agrees();
        self.disagreements = self.disagreements << 1 | u8::from(!agrees);
        self.agreements = if agrees { self.agreements.saturating_add(1) } else { 0 };
        self.suspected = match self.suspected {
            false => self.disagreements.count_ones() >= said.signal().mismatch_threshold(),
            true => self.agreements < AGREEMENTS_TO_CLEAR,
        };
    }

    /// Whether this disagreement is to be told: not all of them are.
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

    /// Whether most of them disagree.
    fn is_suspected_everywhere(&self) -> bool {
        2 * self.suspected_workers().count() > self.0.len()
    }

    fn is_suspected_mismatch(&self, worker: WorkerId) -> bool {
        self.0.get(&worker).is_some_and(|window| window.suspected) || self.is_suspected_everywhere()
    }
}

/// The same by what their answers said.
#[derive(Debug, Default)]
struct ModelDrift {
    token_counts: WorkerWindows,
    cache_hits: WorkerWindows,
}

impl ModelDrift {
    fn of(&mut self, sign: DriftSignal) -> &mut WorkerWindows {
        match sign {
            DriftSignal::Counted => &mut self.token_counts,
            DriftSignal::Found => &mut self.cache_hits,
        }
    }

    fn all(&self) -> [(DriftSignal, &WorkerWindows); 2] {
        [(DriftSignal::Counted, &self.token_counts), (DriftSignal::Found, &self.cache_hits)]
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum DriftTransition {
    Disagrees,
    Suspected,
    Cleared,
}

/// What all workers' answers said. At most two windows for each configured model and listed worker.
#[derive(Debug)]
pub struct TokenizerDrift {
    models: Mutex<BTreeMap<ModelId, ModelDrift>>,
    /// Whether anything is doubted: steps ask without the lock where nothing is.
    any_suspected: AtomicBool,
    /// Places for answers that are looked at again.
    deferred_checks: Arc<Semaphore>,
    metrics: PrefixCacheMetrics,
}

impl TokenizerDrift {
    /// Nobody has answered yet.
    pub fn new(metrics: PrefixCacheMetrics) -> Self {
        let deferred_checks = Arc::new(Semaphore::new(MAX_DEFERRED_CHECKS));
        Self { models: Mutex::default(), any_suspected: AtomicBool::new(false), deferred_checks, metrics }
    }

    /// A whole answer of `worker` is over. `counts` are none where they cannot be held against each other; they are given
    /// back where they disagree.
    pub fn record_token_count(
        &self,
        at: (&ModelId, WorkerId),
        counts: Option<PromptTokenCount>,
        now: Instant,
    ) -> Option<PromptTokenCount> {
        self.record_answer(at, (DriftSignal::Counted, counts.map(DriftObservation::TokenCount)), now)
            .then_some(counts)
            .flatten()
    }

    /// The same of what it found in its cache.
    pub fn record_cache_hit(
        &self,
        at: (&ModelId, WorkerId),
        finds: Option<CacheHitCheck>,
        now: Instant,
    ) -> Option<CacheHitCheck> {
        self.record_answer(at, (DriftSignal::Found, finds.map(DriftObservation::CacheHit)), now)
            .then_some(finds)
            .flatten()
    }

    /// A place for an answer that is looked at again; none where too many are.
    pub fn reserve_deferred_check(&self) -> Option<OwnedSemaphorePermit> {
        self.deferred_checks.clone().try_acquire_owned().ok()
    }

    /// Whether it disagrees.
    fn record_answer(
        &self,
        at: (&ModelId, WorkerId),
        (sign, said): (DriftSignal, Option<DriftObservation>),
        now: Instant,
    ) -> bool {
        let result = said.map_or("not_compared", |said| if said.agrees() { "agrees" } else { "disagrees" });
        let counter = match sign {
            DriftSignal::Counted => &self.metrics.token_count_checks,
            DriftSignal::Found => &self.metrics.cache_hit_checks,
        };
        counter.with_label_values(&[result]).inc();
        let Some(said) = said else { return false };
        if let Some(news) = self.record(at, said, now) {
            news.log(at, said);
        }
        !said.agrees()
    }

    fn record(
        &self,
        (model, worker): (&ModelId, WorkerId),
        said: DriftObservation,
        now: Instant,
    ) -> Option<DriftTransition> {
        let mut models = self.models.lock();
        let answered = models.entry(model.clone()).or_default().of(said.signal());
        let window = answered.0.entry(worker).or_default();
        let was_doubted = window.suspected;
        window.record(said);
        let news = match (was_doubted, window.suspected) {
            (true, false) => Some(DriftTransition::Cleared),
            (false, true) => Some(DriftTransition::Suspected),
            _ if said.agrees() => None,
            _ => window.should_warn(now).then_some(DriftTransition::Disagrees),
        };
        if was_doubted != window.suspected {
            self.refresh_any(&models);
        }
        news
    }

    fn refresh_any(&self, models: &BTreeMap<ModelId, ModelDrift>) {
        let mut all = models.values().flat_map(ModelDrift::all);
        self.any_suspected
            .store(all.any(|(_, answered)| answered.suspected_workers().next().is_some()), Ordering::Release);
    }

    /// Forgets what all others said: who left cannot agree again, and its doubt would stand for ever.
    pub fn retain_workers(&self, is_listed: impl Fn(WorkerId) -> bool) {
        let mut models = self.models.lock();
        for signs in models.values_mut() {
            for sign in [DriftSignal::Counted, DriftSignal::Found] {
                signs.of(sign).0.retain(|worker, _| is_listed(*worker));
            }
        }
        self.refresh_any(&models);
    }

    /// Whether a step of this model is not to be called exact at this worker.
    pub fn is_suspected_mismatch(&self, model: &ModelId, worker: WorkerId) -> bool {
        if !self.any_suspected.load(Ordering::Acquire) {
            return false;
        }
        let models = self.models.lock();
        models
            .get(model)
            .is_some_and(|signs| signs.all().iter().any(|(_, answered)| answered.is_suspected_mismatch(worker)))
    }

    /// Every model whose prompts are other ones at some worker, by name.
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

    /// How many models are doubted everywhere.
    pub fn suspected_model_count(&self) -> usize {
        let is_doubted =
            |signs: &&ModelDrift| signs.all().iter().any(|(_, answered)| answered.is_suspected_everywhere());
        self.models.lock().values().filter(is_doubted).count()
    }
}

/// Forgets workers that left the lists, for ever.
pub(crate) async fn follow(gateway: Arc<AppState>) {
    loop {
        tokio::time::sleep(PRUNE_INTERVAL).await;
        gateway.caches.prefix_cache.tokenizer_drift.retain_workers(|worker| gateway.fleet().is_listed(worker));
    }
}

impl DriftSignal {
    /// Of a worker's last eight answers, so many that disagree make a doubt. A count is right or wrong; what is found looks
    /// wrong a few times where events come later than answers.
    fn mismatch_threshold(self) -> u32 {
        match self {
            DriftSignal::Counted => 3,
            DriftSignal::Found => 6,
        }
    }
}

impl PromptTokenCount {
    fn agree(self) -> bool {
        self.computed == self.counted
    }
}

impl CacheHitCheck {
    /// None where it could only agree, and so says nothing: a prompt that is new there neither makes a doubt nor ends one.
    pub fn conclusive(self) -> Option<Self> {
        (self.found > self.block).then_some(self)
    }

    /// An engine finds what it has told, or less, where that was evicted meanwhile. More is another prompt's.
    pub fn agree(self) -> bool {
        self.found <= self.told + self.block
    }
}

impl DriftObservation {
    fn signal(self) -> DriftSignal {
        match self {
            DriftObservation::TokenCount(_) => DriftSignal::Counted,
            DriftObservation::CacheHit(_) => DriftSignal::Found,
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
    fn log(self, (model, worker): (&ModelId, WorkerId), said: DriftObservation) {
        let advice = advice(model);
        match (self, said) {
            (DriftTransition::Disagrees, DriftObservation::TokenCount(PromptTokenCount { computed, counted })) => {
                tracing::warn!(
                    %model, %worker, computed = computed.0, counted = counted.0,
                    "a worker counts other prompt tokens than were computed here; {advice}"
                )
            }
            (DriftTransition::Suspected, DriftObservation::TokenCount(PromptTokenCount { computed, counted })) => {
                tracing::warn!(
                    %model, %worker, computed = computed.0, counted = counted.0,
                    "a worker has counted other prompt tokens than were computed here several times: steps are known as fallback \
                     there until {AGREEMENTS_TO_CLEAR} answers in a row agree; {advice}"
                )
            }
            (DriftTransition::Disagrees, DriftObservation::CacheHit(CacheHitCheck { told, found, .. })) => {
                tracing::warn!(
                    %model, %worker, told = told.0, found = found.0,
                    "a worker finds more of a prompt in its cache than its events had told of it {EVENT_GRACE_PERIOD:?} later; if that goes on, {advice}"
                )
            }
            (DriftTransition::Suspected, DriftObservation::CacheHit(CacheHitCheck { told, found, .. })) => {
                tracing::warn!(
                    %model, %worker, told = told.0, found = found.0,
                    "a worker has found more of most prompts in its cache than its events told of them: it makes other prompts of \
                     requests than are computed here, and steps are known as fallback there until {AGREEMENTS_TO_CLEAR} answers in a row agree; \
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

/// What a person is to look at.
pub fn advice(model: &ModelId) -> String {
    format!(
        "see that the folder of models.{model:?}.text holds the very tokenizer.json and chat template that the engine \
         loads, and that the engine was not started with another --chat-template or --tokenizer; then start the router again",
        model = &*model.0
    )
}

#[cfg(test)]
mod tests;
