//! A worker's answers to one round of probe requests, and whether they mean that it is alive. Pure.

use std::sync::Arc;

use vocabulary::{ModelId, Tokens};

use super::in_flight::CounterSnapshot;
use super::kv_connector::KvConnectorCapability;
use crate::scrape::{Scrape, SleepState};

/// Why a probe request failed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ProbeFailure {
    /// The worker does not have the path, or serves something else there.
    Absent,
    Unhealthy,
    Refused,
    /// A timeout or a broken connection.
    Unanswered,
}

pub(crate) type ProbeReply<T> = Result<T, ProbeFailure>;

/// A LoRA adapter that an engine lists.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Adapter {
    /// The model name by which it is requested.
    pub name: ModelId,
    /// Its base model.
    pub base: ModelId,
}

/// The response of `GET /v1/models`.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct ServedModels {
    /// Base models first, then adapters.
    pub(super) names: Arc<[ModelId]>,
    /// The adapters with their base models.
    pub(super) adapters: Arc<[Adapter]>,
    /// Maximum length of prompt and answer; 0 if not reported.
    pub(super) context: Tokens,
}

/// The responses of one probe.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct ProbeReplies {
    /// This router's counters when the metrics were requested.
    pub(super) counters: CounterSnapshot,
    /// How often the worker had been reported unreachable before the first request.
    pub(super) failure_reports: u64,
    /// `GET /health`.
    pub(super) health: ProbeReply<()>,
    /// `GET /v1/models`.
    pub(super) models: ProbeReply<ServedModels>,
    /// `GET /metrics`.
    pub(super) metrics: ProbeReply<Arc<Scrape>>,
    /// `GET /version`, if it was requested.
    pub(super) version: Option<Arc<str>>,
    /// The KV connector, if it was determined.
    pub(super) connector: Option<KvConnectorCapability>,
}

/// What a probe shows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum ProbeVerdict {
    Alive,
    /// Not conclusive; the next probe may be.
    Unsure,
    Dead,
}

/// What was known of the worker before the probe.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum PriorIdentification {
    /// No models are known.
    Unknown,
    /// The models are known, from configuration or earlier probes, but not the process.
    ModelsKnown,
    /// The process is known, too.
    Identified,
}

impl ProbeReplies {
    /// Returns whether the worker is alive. One that was unreachable must first answer `/metrics` (a 404 suffices),
    /// because it may be another process now.
    pub(super) fn verdict(&self, stage: PriorIdentification) -> ProbeVerdict {
        match self.reachability_verdict(stage) {
            ProbeVerdict::Alive => self.metrics_verdict(stage),
            other => other,
        }
    }

    fn reachability_verdict(&self, stage: PriorIdentification) -> ProbeVerdict {
        use ProbeFailure::{Absent, Refused, Unanswered, Unhealthy};
        match (&self.health, &self.models) {
            (Err(Refused | Unhealthy), _) => ProbeVerdict::Dead,
            (Ok(()) | Err(Absent), Ok(_)) => ProbeVerdict::Alive,
            (Ok(()), Err(_)) if stage != PriorIdentification::Unknown => ProbeVerdict::Alive,
            // Some OpenAI-compatible servers have no health endpoint; then the model list decides.
            (Err(Absent), Err(Refused | Unhealthy)) => ProbeVerdict::Dead,
            (Ok(()) | Err(Absent | Unanswered), _) => ProbeVerdict::Unsure,
        }
    }

    fn metrics_verdict(&self, stage: PriorIdentification) -> ProbeVerdict {
        match &self.metrics {
            Ok(scrape) if scrape.sleep_state == SleepState::Asleep => ProbeVerdict::Dead,
            Ok(_) | Err(ProbeFailure::Absent) => ProbeVerdict::Alive,
            Err(_) if stage == PriorIdentification::Identified => ProbeVerdict::Alive,
            Err(_) => ProbeVerdict::Unsure,
        }
    }
}

#[cfg(test)]
mod tests {
    use ProbeFailure::{Absent, Refused, Unanswered, Unhealthy};

    use super::*;

    fn verdict(
        health: ProbeReply<()>,
        models: ProbeReply<()>,
        metrics: ProbeReply<()>,
        stage: PriorIdentification,
    ) -> ProbeVerdict {
        let models = models.map(|()| ServedModels::default());
        let metrics = metrics.map(|()| Arc::default());
        ProbeReplies {
            counters: CounterSnapshot::default(),
            failure_reports: 0,
            health,
            models,
            metrics,
            version: None,
            connector: None,
        }
        .verdict(stage)
    }

    #[test]
    fn engine_that_answers_every_probe_is_alive() {
        for known in [PriorIdentification::Unknown, PriorIdentification::ModelsKnown, PriorIdentification::Identified] {
            assert_eq!(verdict(Ok(()), Ok(()), Ok(()), known), ProbeVerdict::Alive);
        }
    }

    #[test]
    fn model_list_alone_means_alive() {
        assert_eq!(verdict(Err(Absent), Ok(()), Err(Absent), PriorIdentification::Unknown), ProbeVerdict::Alive);
    }

    #[test]
    fn refused_connection_or_reported_failure_means_dead_at_once() {
        for health in [Refused, Unhealthy] {
            assert_eq!(
                verdict(Err(health), Ok(()), Ok(()), PriorIdentification::Identified),
                ProbeVerdict::Dead,
                "{health:?}"
            );
        }
        for models in [Refused, Unhealthy] {
            assert_eq!(
                verdict(Err(Absent), Err(models), Ok(()), PriorIdentification::Identified),
                ProbeVerdict::Dead,
                "{models:?}"
            );
        }
    }

    #[test]
    fn slow_answer_is_not_death() {
        assert_eq!(verdict(Err(Unanswered), Ok(()), Ok(()), PriorIdentification::Identified), ProbeVerdict::Unsure);
        assert_eq!(verdict(Ok(()), Err(Unanswered), Ok(()), PriorIdentification::Identified), ProbeVerdict::Alive);
        assert_eq!(verdict(Ok(()), Ok(()), Err(Unhealthy), PriorIdentification::Identified), ProbeVerdict::Alive);
    }

    #[test]
    fn worker_without_models_is_not_alive() {
        for models in [Absent, Unhealthy, Refused, Unanswered] {
            assert_ne!(
                verdict(Ok(()), Err(models), Ok(()), PriorIdentification::Unknown),
                ProbeVerdict::Alive,
                "{models:?}"
            );
        }
        assert_eq!(
            verdict(Err(Absent), Err(Absent), Err(Absent), PriorIdentification::ModelsKnown),
            ProbeVerdict::Unsure
        );
    }

    #[test]
    fn returning_worker_must_identify_its_process() {
        for metrics in [Unhealthy, Refused, Unanswered] {
            assert_eq!(
                verdict(Ok(()), Ok(()), Err(metrics), PriorIdentification::ModelsKnown),
                ProbeVerdict::Unsure,
                "{metrics:?}"
            );
        }
        assert_eq!(verdict(Ok(()), Ok(()), Err(Absent), PriorIdentification::ModelsKnown), ProbeVerdict::Alive);
    }

    #[test]
    fn sleeping_engine_is_not_alive() {
        let asleep = Scrape { sleep_state: SleepState::Asleep, ..Scrape::default() };
        let answers = ProbeReplies {
            counters: CounterSnapshot::default(),
            failure_reports: 0,
            health: Ok(()),
            models: Ok(ServedModels::default()),
            metrics: Ok(Arc::new(asleep)),
            version: None,
            connector: None,
        };
        assert_eq!(answers.verdict(PriorIdentification::Identified), ProbeVerdict::Dead);
    }
}
