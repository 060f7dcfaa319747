//! Drops usage that an engine cannot have counted, before any sink sees it.

use planner::RequestTransferBlocker;
use prometheus::IntCounter;
use workers_shim::engine_api::TokenUsage;

use super::RequestEnd;
use crate::usage_bounds::{max_plausible, max_plausible_answer};

/// Counts and logs implausible usage.
#[derive(Debug)]
pub(in crate::pipeline) struct ImplausibleUsageFilter {
    pub(in crate::pipeline) implausible: IntCounter,
}

impl ImplausibleUsageFilter {
    /// Returns the end without implausible usage: the request is treated as if the engine reported none.
    pub(in crate::pipeline) fn without_implausible(&self, mut end: RequestEnd) -> RequestEnd {
        end.answer.usage = end.answer.usage.filter(|usage| self.is_plausible(&end, usage));
        end
    }

    fn is_plausible(&self, end: &RequestEnd, usage: &TokenUsage) -> bool {
        let request = &end.step.located.identified.request;
        let has_one_choice = request.transfer_bar != Some(RequestTransferBlocker::SeveralChoices);
        let max_completion = max_plausible_answer(request.max_answer.filter(|_| has_one_choice), end.answer.delivered);
        let is_possible =
            usage.prompt <= max_plausible(end.step.request.prompt_tokens) && usage.completion <= max_completion;
        if !is_possible {
            self.implausible.inc();
            let (prompt, completion) = (usage.prompt.0, usage.completion.0);
            tracing::warn!(worker = %end.target(), prompt, completion, "a worker counts more tokens than a request can have");
        }
        is_possible
    }
}
