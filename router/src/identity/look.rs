//! A step that was known from the one before it, encoded again as a whole and compared. Off the request path, one at a
//! time, a few waiting.

use std::sync::Arc;

use ownership::Supervision;
use prefix::{Difference, Identified, Memory, Prompt, Rung, Trails};
use tokio::sync::{Mutex as AsyncMutex, mpsc};
use vocabulary::{ModelId, RequestId, SessionId, TenantId, Tokens};

use crate::checkpoints::{Checkpoints, Tokenized};
use crate::pipeline::identify::Prefixed;
use crate::pipeline::token_ids::Written;
use crate::telemetry::identity::IdentityMetrics;

/// Steps that wait to be looked at; others are left out.
const WAITING: usize = 4;

pub(super) struct Look {
    written: Written,
    /// As the client named it: an adapter has a name of its own.
    model: ModelId,
    prompt: Prompt,
    rung: Rung,
    known: Tokens,
    request: RequestId,
    tenant: TenantId,
    session: Option<SessionId>,
    pin: SessionId,
}

impl Look {
    pub(super) fn at(prefixed: &Prefixed, rung: Rung, known: Tokens) -> Self {
        Self {
            written: Written::of(prefixed),
            model: prefixed.request.model.clone(),
            prompt: prefixed.prompt.clone(),
            rung,
            known,
            request: prefixed.request.incoming.id,
            tenant: prefixed.request.incoming.tenant.clone(),
            session: prefixed.named,
            pin: prefixed.pin,
        }
    }

    /// What differs, and what the whole prompt leaves.
    fn taken(&self) -> (Option<Difference>, Identified) {
        let whole = self.written.identify();
        (self.prompt.difference(&whole.prompt), whole)
    }
}

/// The way to whoever looks.
#[derive(Debug)]
pub(super) struct Looks {
    waiting: mpsc::Sender<Look>,
    metrics: IdentityMetrics,
}

impl Looks {
    pub(super) fn start(
        (trails, checkpoints): (Arc<Trails>, Arc<Checkpoints>),
        metrics: IdentityMetrics,
        tasks: &Arc<Supervision>,
    ) -> Self {
        let (waiting, next) = mpsc::channel::<Look>(WAITING);
        let (looking, next) = (metrics.clone(), Arc::new(AsyncMutex::new(next)));
        // Ends with the last sender, this one.
        drop(tasks.keep("looks", move || {
            let (next, looking) = (next.clone(), looking.clone());
            let kept = (trails.clone(), checkpoints.clone());
            async move { look_at_all(&mut *next.lock().await, &looking, (&kept.0, &kept.1)).await }
        }));
        Self { waiting, metrics }
    }

    /// Has it looked at, unless too many wait.
    pub(super) fn take(&self, look: Look) {
        if self.waiting.try_send(look).is_err() {
            self.metrics.looks.with_label_values(&["left_out"]).inc();
        }
    }
}

async fn look_at_all(
    next: &mut mpsc::Receiver<Look>,
    looking: &IdentityMetrics,
    (trails, checkpoints): (&Arc<Trails>, &Checkpoints),
) {
    while let Some(look) = next.recv().await {
        let taken = tokio::task::spawn_blocking(move || (look.taken(), look)).await;
        let Ok(((difference, whole), look)) = taken else { continue };
        told(looking, &look, (difference, trails));
        if difference.is_none() {
            let body_bytes = look.written.bytes();
            let tokenized = Tokenized { known: look.known, next: whole.next, body_bytes };
            checkpoints.keep(&look.tenant, look.pin, tokenized);
        }
    }
}

fn told(metrics: &IdentityMetrics, look: &Look, (difference, trails): (Option<Difference>, &Trails)) {
    let outcome = difference.map_or("same", Difference::label);
    metrics.looks.with_label_values(&[outcome]).inc();
    let Some(difference) = difference else { return };
    let model = look.written.model();
    let name = &look.model;
    if let Difference::Refused(reason) = difference {
        // Engines refuse it as well, or it has become too long to be looked at here: no other prompt is touched.
        let session = look.session.map(|session| session.0);
        look.written.forget(Memory { trails, tenant: &look.tenant.0, session });
        tracing::warn!(
            model = %name, request = %look.request, cause = reason.as_ref(),
            "a prompt that was put together from an earlier step cannot be computed as a whole; what was remembered of \
             its conversation is forgotten"
        );
    } else if model.distrust() {
        tracing::error!(
            model = %name, request = %look.request, rung = look.rung.as_ref(), cause = difference.label(),
            tokens = look.prompt.chain.tokens.0,
            "a prompt that was put together from an earlier step differs from the whole one; prompts of this model are \
             computed as a whole until this router is started again"
        );
    }
}

#[cfg(test)]
mod tests;
