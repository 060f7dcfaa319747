//! What a worker answered to one round of questions, and whether that means that it lives. Pure.

use std::sync::Arc;

use vocabulary::{ModelId, Tokens};

use super::flight::Mark;
use super::speech::Speech;
use crate::scrape::{Scrape, Wakefulness};

/// Why there is no answer to a question.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Silence {
    /// It does not know the path, or answers something else there.
    Absent,
    Sick,
    Refused,
    /// Nothing in time, or a connection that broke.
    Broken,
}

pub(crate) type Reply<T> = Result<T, Silence>;

/// A LoRA adapter that an engine lists.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Adapter {
    /// Under which it is asked for.
    pub name: ModelId,
    /// The model that it is on top of.
    pub base: ModelId,
}

/// What `GET /v1/models` lists.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct Models {
    /// Base models first, then adapters.
    pub(super) names: Arc<[ModelId]>,
    /// The adapters again, with what they are on top of.
    pub(super) adapters: Arc<[Adapter]>,
    /// Longest prompt and answer; 0 when it does not say.
    pub(super) context: Tokens,
}

/// One round of questions.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Answers {
    /// Our own requests when the metrics were asked for.
    pub(super) at: Mark,
    /// How often the worker had been reported unreachable before the first question.
    pub(super) blames: u64,
    /// `GET /health`.
    pub(super) health: Reply<()>,
    /// `GET /v1/models`.
    pub(super) models: Reply<Models>,
    /// `GET /metrics`.
    pub(super) metrics: Reply<Arc<Scrape>>,
    /// `GET /version`, where it was asked.
    pub(super) version: Option<Arc<str>>,
    /// Its dialect, where it was asked.
    pub(super) speech: Option<Speech>,
}

/// What a round means.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Verdict {
    Alive,
    /// Another round may tell.
    Unsure,
    Dead,
}

/// What was known of the worker before the round.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Acquaintance {
    /// No model is known.
    Stranger,
    /// Models are known, by configuration or from before, but not which process it is.
    Named,
    /// The process too.
    Settled,
}

impl Answers {
    /// Whether it lives. A worker that was out of reach must answer `/metrics` first, be it with a 404: who comes back
    /// may be another process.
    pub(super) fn verdict(&self, known: Acquaintance) -> Verdict {
        match self.reached(known) {
            Verdict::Alive => self.settled(known),
            other => other,
        }
    }

    fn reached(&self, known: Acquaintance) -> Verdict {
        use Silence::{Absent, Broken, Refused, Sick};
        match (&self.health, &self.models) {
            (Err(Refused | Sick), _) => Verdict::Dead,
            (Ok(()) | Err(Absent), Ok(_)) => Verdict::Alive,
            (Ok(()), Err(_)) if known != Acquaintance::Stranger => Verdict::Alive,
            // Not every OpenAI-compatible server has a health page; the list of models decides then.
            (Err(Absent), Err(Refused | Sick)) => Verdict::Dead,
            (Ok(()) | Err(Absent | Broken), _) => Verdict::Unsure,
        }
    }

    fn settled(&self, known: Acquaintance) -> Verdict {
        match &self.metrics {
            Ok(scrape) if scrape.wakefulness == Wakefulness::Asleep => Verdict::Dead,
            Ok(_) | Err(Silence::Absent) => Verdict::Alive,
            Err(_) if known == Acquaintance::Settled => Verdict::Alive,
            Err(_) => Verdict::Unsure,
        }
    }
}

#[cfg(test)]
mod tests {
    use Silence::{Absent, Broken, Refused, Sick};

    use super::*;

    fn verdict(health: Reply<()>, models: Reply<()>, metrics: Reply<()>, known: Acquaintance) -> Verdict {
        let models = models.map(|()| Models::default());
        let metrics = metrics.map(|()| Arc::default());
        Answers { at: Mark::default(), blames: 0, health, models, metrics, version: None, speech: None }.verdict(known)
    }

    #[test]
    fn an_engine_that_answers_everything_is_alive() {
        for known in [Acquaintance::Stranger, Acquaintance::Named, Acquaintance::Settled] {
            assert_eq!(verdict(Ok(()), Ok(()), Ok(()), known), Verdict::Alive);
        }
    }

    #[test]
    fn a_list_of_models_is_enough() {
        assert_eq!(verdict(Err(Absent), Ok(()), Err(Absent), Acquaintance::Stranger), Verdict::Alive);
    }

    #[test]
    fn a_refused_connection_and_an_engines_own_word_end_it_at_once() {
        for health in [Refused, Sick] {
            assert_eq!(verdict(Err(health), Ok(()), Ok(()), Acquaintance::Settled), Verdict::Dead, "{health:?}");
        }
        for models in [Refused, Sick] {
            assert_eq!(verdict(Err(Absent), Err(models), Ok(()), Acquaintance::Settled), Verdict::Dead, "{models:?}");
        }
    }

    #[test]
    fn a_slow_answer_is_no_death() {
        assert_eq!(verdict(Err(Broken), Ok(()), Ok(()), Acquaintance::Settled), Verdict::Unsure);
        assert_eq!(verdict(Ok(()), Err(Broken), Ok(()), Acquaintance::Settled), Verdict::Alive);
        assert_eq!(verdict(Ok(()), Ok(()), Err(Sick), Acquaintance::Settled), Verdict::Alive);
    }

    #[test]
    fn a_worker_without_any_model_is_of_no_use() {
        for models in [Absent, Sick, Refused, Broken] {
            assert_ne!(verdict(Ok(()), Err(models), Ok(()), Acquaintance::Stranger), Verdict::Alive, "{models:?}");
        }
        assert_eq!(verdict(Err(Absent), Err(Absent), Err(Absent), Acquaintance::Named), Verdict::Unsure);
    }

    #[test]
    fn who_comes_back_must_say_which_process_it_is() {
        for metrics in [Sick, Refused, Broken] {
            assert_eq!(verdict(Ok(()), Ok(()), Err(metrics), Acquaintance::Named), Verdict::Unsure, "{metrics:?}");
        }
        assert_eq!(verdict(Ok(()), Ok(()), Err(Absent), Acquaintance::Named), Verdict::Alive);
    }

    #[test]
    fn a_sleeping_engine_takes_no_work() {
        let asleep = Scrape { wakefulness: Wakefulness::Asleep, ..Scrape::default() };
        let answers = Answers {
            at: Mark::default(),
            blames: 0,
            health: Ok(()),
            models: Ok(Models::default()),
            metrics: Ok(Arc::new(asleep)),
            version: None,
            speech: None,
        };
        assert_eq!(answers.verdict(Acquaintance::Settled), Verdict::Dead);
    }
}
