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

use crate::gateway::Gateway;
use crate::telemetry::identity::IdentityMetrics;

/// So many answers in a row that agree end a doubt.
const HEALED: u32 = 32;
/// Events come later than answers where links or engines are slow: what more was found than they had told is looked at again
/// after this time, before it counts.
pub(crate) const LATE: Duration = Duration::from_secs(3);
/// So many answers wait for that at most; others say nothing then.
const MOST_LATER: usize = 256;
/// Between two looks at who is still listed.
const FORGET_EVERY: Duration = Duration::from_secs(1);
/// Between two warnings of one model at one worker.
const WARN_EVERY: Duration = Duration::from_secs(60);

/// The tokens of one request's prompts by two counts.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Debug)]
pub struct Counts {
    /// As computed here.
    pub computed: Tokens,
    /// As the engine's usage says.
    pub counted: Tokens,
}

/// The tokens of one prompt that were in the engine's cache, by two words of the engine's.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Debug)]
pub struct Finds {
    /// What its events had told of the prompt as it was computed here: before the step, until its answer was over, or `LATE`
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
pub enum Sign {
    /// In how many tokens they have.
    #[strum(serialize = "engine_disagrees")]
    Counted,
    /// In how many of those it finds in its cache.
    #[strum(serialize = "cache_disagrees")]
    Found,
}

/// A model whose prompts are other ones at some workers.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Doubt {
    /// As clients name it.
    pub model: ModelId,
    /// In what it shows.
    pub sign: Sign,
    /// The workers that disagree.
    pub at: Vec<WorkerId>,
    /// Where its steps are not called exact any more.
    pub reach: DoubtReach,
}

/// Where a model's steps are not called exact.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DoubtReach {
    /// At the workers that disagree: most agree, so that these are the odd ones.
    Workers,
    /// Everywhere: most of the workers that answered disagree.
    Model,
}

/// One answer's word.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Said {
    Counts(Counts),
    Finds(Finds),
}

/// What one worker's answers said of one model's prompts.
#[derive(Debug, Default)]
struct Window {
    /// The newest eight answers, a bit each, set where it disagreed.
    disagreed: u8,
    /// Answers in a row that agreed.
    agreeing: u32,
    doubted: bool,
    warned: Option<Instant>,
}

impl Window {
    fn note(&mut self, said: Said) {
        let agrees = said.agrees();
        self.disagreed = self.disagreed << 1 | u8::from(!agrees);
        self.agreeing = if agrees { self.agreeing.saturating_add(1) } else { 0 };
        self.doubted = match self.doubted {
            false => self.disagreed.count_ones() >= said.sign().doubt(),
            true => self.agreeing < HEALED,
        };
    }

    /// Whether this disagreement is to be told: not all of them are.
    fn warns(&mut self, now: Instant) -> bool {
        let is_due = self.warned.is_none_or(|last| now.saturating_duration_since(last) >= WARN_EVERY);
        if is_due {
            self.warned = Some(now);
        }
        is_due
    }
}

#[derive(Debug, Default)]
struct Answered(BTreeMap<WorkerId, Window>);

impl Answered {
    fn doubted(&self) -> impl Iterator<Item = WorkerId> {
        self.0.iter().filter(|(_, window)| window.doubted).map(|(worker, _)| *worker)
    }

    /// Whether most of them disagree.
    fn is_doubted(&self) -> bool {
        2 * self.doubted().count() > self.0.len()
    }

    fn doubts(&self, worker: WorkerId) -> bool {
        self.0.get(&worker).is_some_and(|window| window.doubted) || self.is_doubted()
    }
}

/// The same by what their answers said.
#[derive(Debug, Default)]
struct Signs {
    counted: Answered,
    found: Answered,
}

impl Signs {
    fn of(&mut self, sign: Sign) -> &mut Answered {
        match sign {
            Sign::Counted => &mut self.counted,
            Sign::Found => &mut self.found,
        }
    }

    fn all(&self) -> [(Sign, &Answered); 2] {
        [(Sign::Counted, &self.counted), (Sign::Found, &self.found)]
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum News {
    Disagrees,
    Doubted,
    Healed,
}

/// What all workers' answers said. At most two windows for each configured model and listed worker.
#[derive(Debug)]
pub struct Agreement {
    models: Mutex<BTreeMap<ModelId, Signs>>,
    /// Whether anything is doubted: steps ask without the lock where nothing is.
    any: AtomicBool,
    /// Places for answers that are looked at again.
    later: Arc<Semaphore>,
    metrics: IdentityMetrics,
}

impl Agreement {
    /// Nobody has answered yet.
    pub fn new(metrics: IdentityMetrics) -> Self {
        let later = Arc::new(Semaphore::new(MOST_LATER));
        Self { models: Mutex::default(), any: AtomicBool::new(false), later, metrics }
    }

    /// A whole answer of `worker` is over. `counts` are none where they cannot be held against each other; they are given
    /// back where they disagree.
    pub fn counted(&self, at: (&ModelId, WorkerId), counts: Option<Counts>, now: Instant) -> Option<Counts> {
        self.answered(at, (Sign::Counted, counts.map(Said::Counts)), now).then_some(counts).flatten()
    }

    /// The same of what it found in its cache.
    pub fn found(&self, at: (&ModelId, WorkerId), finds: Option<Finds>, now: Instant) -> Option<Finds> {
        self.answered(at, (Sign::Found, finds.map(Said::Finds)), now).then_some(finds).flatten()
    }

    /// A place for an answer that is looked at again; none where too many are.
    pub fn later(&self) -> Option<OwnedSemaphorePermit> {
        self.later.clone().try_acquire_owned().ok()
    }

    /// Whether it disagrees.
    fn answered(&self, at: (&ModelId, WorkerId), (sign, said): (Sign, Option<Said>), now: Instant) -> bool {
        let result = said.map_or("not_compared", |said| if said.agrees() { "agrees" } else { "disagrees" });
        let counter = match sign {
            Sign::Counted => &self.metrics.counted_prompts,
            Sign::Found => &self.metrics.found_prompts,
        };
        counter.with_label_values(&[result]).inc();
        let Some(said) = said else { return false };
        if let Some(news) = self.note(at, said, now) {
            news.tell(at, said);
        }
        !said.agrees()
    }

    fn note(&self, (model, worker): (&ModelId, WorkerId), said: Said, now: Instant) -> Option<News> {
        let mut models = self.models.lock();
        let answered = models.entry(model.clone()).or_default().of(said.sign());
        let window = answered.0.entry(worker).or_default();
        let was_doubted = window.doubted;
        window.note(said);
        let news = match (was_doubted, window.doubted) {
            (true, false) => Some(News::Healed),
            (false, true) => Some(News::Doubted),
            _ if said.agrees() => None,
            _ => window.warns(now).then_some(News::Disagrees),
        };
        if was_doubted != window.doubted {
            self.look_for_any(&models);
        }
        news
    }

    fn look_for_any(&self, models: &BTreeMap<ModelId, Signs>) {
        let mut all = models.values().flat_map(Signs::all);
        self.any.store(all.any(|(_, answered)| answered.doubted().next().is_some()), Ordering::Release);
    }

    /// Forgets what all others said: who left cannot agree again, and its doubt would stand for ever.
    pub fn keep_only(&self, is_listed: impl Fn(WorkerId) -> bool) {
        let mut models = self.models.lock();
        for signs in models.values_mut() {
            for sign in [Sign::Counted, Sign::Found] {
                signs.of(sign).0.retain(|worker, _| is_listed(*worker));
            }
        }
        self.look_for_any(&models);
    }

    /// Whether a step of this model is not to be called exact at this worker.
    pub fn doubts(&self, model: &ModelId, worker: WorkerId) -> bool {
        if !self.any.load(Ordering::Acquire) {
            return false;
        }
        let models = self.models.lock();
        models.get(model).is_some_and(|signs| signs.all().iter().any(|(_, answered)| answered.doubts(worker)))
    }

    /// Every model whose prompts are other ones at some worker, by name.
    pub fn all_doubts(&self) -> Vec<Doubt> {
        let models = self.models.lock();
        let doubt = |model: &ModelId, (sign, answered): (Sign, &Answered)| {
            let at: Vec<WorkerId> = answered.doubted().collect();
            let reach = if answered.is_doubted() { DoubtReach::Model } else { DoubtReach::Workers };
            (!at.is_empty()).then(|| Doubt { model: model.clone(), sign, at, reach })
        };
        models
            .iter()
            .flat_map(|(model, signs)| signs.all().into_iter().filter_map(move |it| doubt(model, it)))
            .collect()
    }

    /// How many models are doubted everywhere.
    pub fn doubted_models(&self) -> usize {
        let is_doubted = |signs: &&Signs| signs.all().iter().any(|(_, answered)| answered.is_doubted());
        self.models.lock().values().filter(is_doubted).count()
    }
}

/// Forgets workers that left the lists, for ever.
pub(crate) async fn follow(gateway: Arc<Gateway>) {
    loop {
        tokio::time::sleep(FORGET_EVERY).await;
        gateway.remembered.identity.agreement.keep_only(|worker| gateway.fleet().lists(worker));
    }
}

impl Sign {
    /// Of a worker's last eight answers, so many that disagree make a doubt. A count is right or wrong; what is found looks
    /// wrong a few times where events come later than answers.
    fn doubt(self) -> u32 {
        match self {
            Sign::Counted => 3,
            Sign::Found => 6,
        }
    }
}

impl Counts {
    fn agree(self) -> bool {
        self.computed == self.counted
    }
}

impl Finds {
    /// None where it could only agree, and so says nothing: a prompt that is new there neither makes a doubt nor ends one.
    pub fn telling(self) -> Option<Self> {
        (self.found > self.block).then_some(self)
    }

    /// An engine finds what it has told, or less, where that was evicted meanwhile. More is another prompt's.
    pub fn agree(self) -> bool {
        self.found <= self.told + self.block
    }
}

impl Said {
    fn sign(self) -> Sign {
        match self {
            Said::Counts(_) => Sign::Counted,
            Said::Finds(_) => Sign::Found,
        }
    }

    fn agrees(self) -> bool {
        match self {
            Said::Counts(counts) => counts.agree(),
            Said::Finds(finds) => finds.agree(),
        }
    }
}

impl News {
    fn tell(self, (model, worker): (&ModelId, WorkerId), said: Said) {
        let advice = advice(model);
        match (self, said) {
            (News::Disagrees, Said::Counts(Counts { computed, counted })) => tracing::warn!(
                %model, %worker, computed = computed.0, counted = counted.0,
                "a worker counts other prompt tokens than were computed here; {advice}"
            ),
            (News::Doubted, Said::Counts(Counts { computed, counted })) => tracing::warn!(
                %model, %worker, computed = computed.0, counted = counted.0,
                "a worker has counted other prompt tokens than were computed here several times: steps are known as fallback \
                 there until {HEALED} answers in a row agree; {advice}"
            ),
            (News::Disagrees, Said::Finds(Finds { told, found, .. })) => tracing::warn!(
                %model, %worker, told = told.0, found = found.0,
                "a worker finds more of a prompt in its cache than its events had told of it {LATE:?} later; if that goes on, {advice}"
            ),
            (News::Doubted, Said::Finds(Finds { told, found, .. })) => tracing::warn!(
                %model, %worker, told = told.0, found = found.0,
                "a worker has found more of most prompts in its cache than its events told of them: it makes other prompts of \
                 requests than are computed here, and steps are known as fallback there until {HEALED} answers in a row agree; \
                 {advice}"
            ),
            (News::Healed, Said::Counts(_)) => {
                tracing::info!(%model, %worker, "its counts of prompt tokens agree again: steps are exact there")
            }
            (News::Healed, Said::Finds(_)) => {
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
