//! What became of a leg: its answer, or why there is none; and what became of a plan's legs together.

use std::time::Instant;

use axum::response::Response;
use bytes::Bytes;
use http::StatusCode;
use vocabulary::WorkerId;
use workers_shim::engine_api::AnswerSummary;
use workers_shim::fleet::InFlightGuard;

use crate::error::ApiError;
use crate::receipt::AttemptEvent;
use crate::upstream::{UpstreamError, WorkerBody};

/// Why a leg produced no answer that could be delivered.
#[derive(Debug, thiserror::Error)]
pub enum LegError {
    /// The worker has left the configuration; nothing was sent.
    #[error("the worker is not configured any more")]
    UnknownWorker,
    /// No response head arrived.
    #[error(transparent)]
    Upstream(#[from] UpstreamError),
    /// The connection broke before the first byte of the body, or inside an answer that is delivered whole.
    #[error("the answer broke off")]
    Broken,
    /// The worker became unreachable, and its answer made no progress for a while.
    #[error("the worker cannot be reached any more")]
    Silent,
    /// The worker is out of capacity, or is not ready.
    #[error("the worker answered {0}")]
    Busy(StatusCode),
    /// The worker answered with a server error.
    #[error("the worker answered {0}")]
    Failed(StatusCode),
    /// The prefill leg failed, and its target computes no prompts or is waiting for a source that is gone.
    #[error("there is no prompt's KV to go on with")]
    NoSource,
    /// The memory budget has no room for the leg's body; nothing was sent.
    #[error("no memory for the body of the leg: {0}")]
    OverBudget(ApiError),
    /// There is no memory left for an answer that comes as one body.
    #[error("no memory for the answer; see upstream.stream_buffer_limit")]
    AnswerOverBudget,
}

impl LegError {
    /// Returns the event that the receipt records for this error.
    pub fn attempt_event(&self) -> AttemptEvent {
        match self {
            LegError::UnknownWorker | LegError::Upstream(UpstreamError::Connect(_)) => AttemptEvent::DecodeUnreachable,
            LegError::Upstream(UpstreamError::Timeout(_)) => AttemptEvent::DecodeTimeout,
            LegError::Silent => AttemptEvent::DecodeLost,
            LegError::Upstream(_) | LegError::Broken | LegError::Failed(_) | LegError::NoSource => {
                AttemptEvent::DecodeFailed
            }
            LegError::Busy(_) => AttemptEvent::DecodeBusy,
            LegError::OverBudget(_) | LegError::AnswerOverBudget => AttemptEvent::MemoryBudgetExceeded,
        }
    }

    /// Whether another worker may succeed. A timed-out request may still be running, so a retry would double it.
    pub fn retryable(&self) -> bool {
        match self {
            LegError::Upstream(error) => error.retryable(),
            LegError::OverBudget(_) | LegError::AnswerOverBudget => false,
            LegError::UnknownWorker
            | LegError::Broken
            | LegError::Silent
            | LegError::Busy(_)
            | LegError::Failed(_)
            | LegError::NoSource => true,
        }
    }

    /// Whether the request itself may be the cause: it may break an engine's answer at every worker.
    pub(crate) fn may_be_the_requests(&self) -> bool {
        matches!(self, LegError::Failed(_) | LegError::Broken | LegError::Upstream(UpstreamError::Broken(_)))
    }

    /// Returns the error for the client, which does not reveal the worker's address.
    pub fn client_error(&self) -> ApiError {
        match self {
            LegError::Upstream(error) => error.client_error(),
            LegError::OverBudget(error) => error.clone(),
            LegError::AnswerOverBudget => ApiError::Overloaded { what: "the memory for answers is full" },
            LegError::Busy(_) => ApiError::Overloaded { what: "the workers take no more requests" },
            LegError::UnknownWorker
            | LegError::Broken
            | LegError::Silent
            | LegError::Failed(_)
            | LegError::NoSource => ApiError::WorkerFailed { detail: "it failed before its answer began".into() },
        }
    }
}

/// A leg's answer whose first byte has arrived.
pub enum LegResponse {
    /// The complete answer.
    Whole(Response<Bytes>, AnswerSummary),
    /// The head and the first chunk; the rest follows.
    Stream(Response<WorkerBody>, Bytes),
}

impl LegResponse {
    /// The answer's status.
    pub fn status(&self) -> StatusCode {
        match self {
            LegResponse::Whole(answer, _) => answer.status(),
            LegResponse::Stream(answer, _) => answer.status(),
        }
    }
}

/// An answer that has begun.
pub struct StartedAnswer {
    /// Head and body of the answer leg.
    pub response: LegResponse,
    /// The request as counted in the target's load.
    pub in_flight: InFlightGuard,
    /// When the legs were sent.
    pub sent_at: Instant,
    /// When the first byte arrived.
    pub first_byte: Instant,
    /// Deviations from the plan.
    pub events: Vec<AttemptEvent>,
}

/// A plan that failed before the client got a byte.
#[derive(Debug)]
pub struct FailedAttempt {
    /// When the legs were sent.
    pub sent_at: Instant,
    /// Deviations from the plan; the last one is the cause of the failure.
    pub events: Vec<AttemptEvent>,
    /// Worker to exclude from the next plan.
    pub exclude: WorkerId,
    /// Cause of the failure.
    pub error: LegError,
}
