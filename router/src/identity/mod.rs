//! Knowing prompts at the cost of what is new in them: what conversations leave for their next step, and the look at one
//! step in many, encoded again as a whole, whether that held. And whether the engines' own counts agree with it.
//!
//! A look is never waited for. One that finds a difference ends it for that model: its prompts are computed as a whole
//! from then on, and everything that tells how this router stands says so.

pub mod agreement;
mod look;

use std::num::NonZeroU64;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use ownership::Supervision;
use prefix::{Rung, Trails};
use serde::Deserialize;
use smart_default::SmartDefault;
use vocabulary::{Bytes, Tokens};

use crate::checkpoints::Checkpoints;
use crate::config::units::Size;
use crate::pipeline::identify::Prefixed;
use crate::telemetry::identity::IdentityMetrics;
use agreement::Agreement;
use look::{Look, Looks};

/// Section `[identity]`.
#[derive(Clone, Debug, Deserialize, SmartDefault)]
#[serde(deny_unknown_fields, default)]
pub struct IdentityConfig {
    /// Memory for what conversations leave for their next step; 0 has every prompt computed as a whole.
    #[default(Size::mebibytes(256))]
    pub memory: Size,
    /// One step in so many is encoded again as a whole and compared; none where it is 0.
    #[default(256)]
    pub look_every: u64,
}

/// What is known of conversations, and the looks at whether it holds.
#[derive(Debug)]
pub struct Identity {
    /// What they left.
    pub trails: Arc<Trails>,
    /// Whether engines count prompts as they are counted here.
    pub agreement: Agreement,
    looks: Looks,
    every: Option<NonZeroU64>,
    steps: AtomicU64,
    checkpoints: Arc<Checkpoints>,
    metrics: IdentityMetrics,
}

impl Identity {
    /// Knows nothing yet. Looks are taken for as long as it lives.
    pub fn start(
        config: &IdentityConfig,
        checkpoints: Arc<Checkpoints>,
        (metrics, tasks): (IdentityMetrics, &Arc<Supervision>),
    ) -> Self {
        let trails = Arc::new(Trails::new(Bytes(config.memory.0 as u64)));
        Self {
            looks: Looks::start((trails.clone(), checkpoints.clone()), metrics.clone(), tasks),
            agreement: Agreement::new(metrics.clone()),
            trails,
            every: NonZeroU64::new(config.look_every),
            steps: AtomicU64::new(0),
            checkpoints,
            metrics,
        }
    }

    /// Counts a step, and has it looked at when its turn has come, or when other routers should know its tokens.
    pub fn identified(&self, prefixed: &Prefixed, known: Tokens) {
        let Some(rung) = prefixed.rung else { return };
        self.metrics.steps.with_label_values(&[rung.as_ref()]).inc();
        if matches!(rung, Rung::Cold | Rung::Checkpoint) {
            return;
        }
        let is_next = self.every.is_some_and(|every| self.steps.fetch_add(1, Ordering::Relaxed) % every == 0);
        if is_next || self.checkpoints.wants(prefixed, known) {
            self.looks.take(Look::at(prefixed, rung, known));
        }
    }
}
