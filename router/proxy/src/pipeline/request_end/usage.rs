//! Drops usage that an engine cannot have counted, before any sink sees it.

use prometheus::IntCounter;
use vocabulary::Tokens;
use workers_shim::engine_api::TokenUsage;

use super::RequestEnd;
use crate::usage_bounds::{UNBOUNDED_ANSWER, most_believed};

/// Counts and logs implausible usage.
#[derive(Debug)]
pub(in crate::pipeline) struct UsageFilter {
    pub(in crate::pipeline) implausible: IntCounter,
}

impl UsageFilter {
    /// Returns the end without usage that is not believed: the request is treated as if the engine reported none.
    pub(in crate::pipeline) fn believed(&self, mut end: RequestEnd) -> RequestEnd {
        end.answer.usage = end.answer.usage.filter(|usage| self.is_plausible(&end, usage));
        end
    }

    fn is_plausible(&self, end: &RequestEnd, usage: &TokenUsage) -> bool {
        let max_answer = end.step.located.identified.request.max_answer.unwrap_or_default();
        let most_answered = most_believed(Tokens::max(max_answer, end.answer.delivered)).max(UNBOUNDED_ANSWER);
        let is_possible =
            usage.prompt <= most_believed(end.step.request.prompt_tokens) && usage.completion <= most_answered;
        if !is_possible {
            self.implausible.inc();
            let (prompt, completion) = (usage.prompt.0, usage.completion.0);
            tracing::warn!(worker = %end.target(), prompt, completion, "a worker counts more tokens than a request can have");
        }
        is_possible
    }
}
