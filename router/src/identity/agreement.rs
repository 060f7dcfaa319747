//! Whether engines count as many prompt tokens as were computed here: the one sign from outside that the tokenizer or the
//! template here is not the engine's. Without it steps would be called exact while no block of them is ever found.
//!
//! Only certain counts are held against each other, and no step waits or fails for it.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use serde::Serialize;
use vocabulary::{ModelId, Tokens, WorkerId};

use crate::telemetry::identity::IdentityMetrics;

/// Of a worker's last eight answers, so many that disagree make a doubt.
const DOUBT: u32 = 3;
/// So many answers in a row that agree end it.
const HEALED: u32 = 32;
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

/// A model whose prompts some workers count otherwise.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Doubt {
    /// As clients name it.
    pub model: ModelId,
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
    fn note(&mut self, counts: Counts) {
        self.disagreed = self.disagreed << 1 | u8::from(!counts.agree());
        self.agreeing = if counts.agree() { self.agreeing.saturating_add(1) } else { 0 };
        self.doubted = match self.doubted {
            false => self.disagreed.count_ones() >= DOUBT,
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

/// The workers that answered for one model.
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
}

/// What is to be told.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum News {
    Disagrees,
    Doubted,
    Healed,
}

/// What all workers' answers said. At most one window for each configured model and worker.
#[derive(Debug)]
pub struct Agreement {
    models: Mutex<BTreeMap<ModelId, Answered>>,
    /// Whether anything is doubted: steps ask without the lock where nothing is.
    any: AtomicBool,
    metrics: IdentityMetrics,
}

impl Agreement {
    /// Nobody has answered yet.
    pub fn new(metrics: IdentityMetrics) -> Self {
        Self { models: Mutex::default(), any: AtomicBool::new(false), metrics }
    }

    /// A whole answer of `worker` is over. `counts` are none where they cannot be held against each other; they are given
    /// back where they disagree.
    pub fn answered(
        &self,
        (model, worker): (&ModelId, WorkerId),
        counts: Option<Counts>,
        now: Instant,
    ) -> Option<Counts> {
        let result = counts.map_or("not_compared", |counts| if counts.agree() { "agrees" } else { "disagrees" });
        self.metrics.counted_prompts.with_label_values(&[result]).inc();
        let counts = counts?;
        if let Some(news) = self.note((model, worker), counts, now) {
            news.tell((model, worker), counts);
        }
        (!counts.agree()).then_some(counts)
    }

    fn note(&self, (model, worker): (&ModelId, WorkerId), counts: Counts, now: Instant) -> Option<News> {
        let mut models = self.models.lock();
        let answered = models.entry(model.clone()).or_default();
        let window = answered.0.entry(worker).or_default();
        let was_doubted = window.doubted;
        window.note(counts);
        let news = match (was_doubted, window.doubted) {
            (true, false) => Some(News::Healed),
            (false, true) => Some(News::Doubted),
            _ if counts.agree() => None,
            _ => window.warns(now).then_some(News::Disagrees),
        };
        if was_doubted != window.doubted {
            let any = models.values().any(|answered| answered.doubted().next().is_some());
            self.any.store(any, Ordering::Release);
        }
        news
    }

    /// Whether a step of this model is not to be called exact at this worker.
    pub fn doubts(&self, model: &ModelId, worker: WorkerId) -> bool {
        if !self.any.load(Ordering::Acquire) {
            return false;
        }
        let models = self.models.lock();
        let Some(answered) = models.get(model) else { return false };
        answered.0.get(&worker).is_some_and(|window| window.doubted) || answered.is_doubted()
    }

    /// Every model that some worker counts otherwise, by name.
    pub fn all_doubts(&self) -> Vec<Doubt> {
        let models = self.models.lock();
        let doubt = |(model, answered): (&ModelId, &Answered)| {
            let at: Vec<WorkerId> = answered.doubted().collect();
            let reach = if answered.is_doubted() { DoubtReach::Model } else { DoubtReach::Workers };
            (!at.is_empty()).then(|| Doubt { model: model.clone(), at, reach })
        };
        models.iter().filter_map(doubt).collect()
    }
}

impl Counts {
    fn agree(self) -> bool {
        self.computed == self.counted
    }
}

impl News {
    fn tell(self, (model, worker): (&ModelId, WorkerId), Counts { computed, counted }: Counts) {
        let (computed, counted) = (computed.0, counted.0);
        match self {
            News::Disagrees => tracing::warn!(
                %model, %worker, computed, counted,
                "a worker counts other prompt tokens than were computed here; {}", advice(model)
            ),
            News::Doubted => tracing::warn!(
                %model, %worker, computed, counted,
                "a worker has counted other prompt tokens than were computed here several times: steps are known as fallback \
                 there until {HEALED} answers in a row agree; {}", advice(model)
            ),
            News::Healed => {
                tracing::info!(%model, %worker, "its counts of prompt tokens agree again: steps are exact there")
            }
        }
    }
}

/// What a person is to look at.
pub fn advice(model: &ModelId) -> String {
    format!(
        "see that the folder of models.{model:?}.text holds the very tokenizer.json and chat template that the engine \
         loads, and that the engine was not started with another --chat-template or --tokenizer",
        model = &*model.0
    )
}

#[cfg(test)]
mod tests;
