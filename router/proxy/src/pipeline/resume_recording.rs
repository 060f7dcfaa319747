//! Records an answer while it is delivered, so that another worker can resume it: its token ids, from which it is
//! continued, or its beginning, which is recognised when the same answer is generated again.

use workers_shim::engine_api::{AnswerDeterminism, ReplayVerifier, SseFilter, TextTiming, TokenTranscript};
use workers_shim::scrape::EngineKind;

use super::resume_blocker::is_on;
use crate::client_request::GenerationEndpoint;
use crate::identified_request::{ParsedRequest, leg_options, shown_ids};
use crate::request_states::{ClassifiedStep, ResumeBlocker};

/// Makes the filter record what is needed to resume the step's answer at another worker.
pub(super) fn with_resume_recording(scanner: SseFilter, step: &ClassifiedStep, engine: EngineKind) -> SseFilter {
    let (request, blocker) = (&step.located.identified.request, step.resume_blocker);
    let scanner = if blocker.is_none() { scanner.with_transcript(token_transcript(request)) } else { scanner };
    match replay_verifier(request, blocker, engine) {
        Some(verifier) => scanner.with_replay_verifier(verifier),
        None => scanner,
    }
}

/// Returns a transcript that records the answer from its first event on.
fn token_transcript(request: &ParsedRequest) -> TokenTranscript {
    let fields = request.body.scanned_json();
    let stops = is_on(fields, "stop");
    // Engines that parse tool calls and reasoning hold back text that may begin one, whether requested or not.
    let is_chat = request.endpoint == GenerationEndpoint::ChatCompletions;
    let delivery = if stops || is_chat { TextTiming::AfterIds } else { TextTiming::WithIds };
    TokenTranscript::new(leg_options(request).api, shown_ids(request), delivery)
}

/// Returns a verifier that records the answer from its first event on, to recognise it when it is generated again;
/// `None` where that is not allowed, or not needed with this engine.
fn replay_verifier(
    request: &ParsedRequest,
    blocker: Option<ResumeBlocker>,
    engine: EngineKind,
) -> Option<ReplayVerifier> {
    let has_ids =
        blocker.is_none() && engine == EngineKind::Vllm && request.endpoint == GenerationEndpoint::Completions;
    let is_excluded =
        matches!(blocker, Some(ResumeBlocker::NotStreamed | ResumeBlocker::Disabled | ResumeBlocker::EngineState));
    if has_ids || is_excluded {
        return None;
    }
    let fields = request.body.scanned_json();
    let is_greedy = fields.read::<f64>("temperature") == Some(0.0) || fields.read::<i64>("top_k") == Some(1);
    let is_seeded = fields.read::<i64>("seed").is_some();
    let determinism =
        if is_greedy || is_seeded { AnswerDeterminism::Always } else { AnswerDeterminism::UntilFirstOutput };
    Some(ReplayVerifier::new(leg_options(request).api, shown_ids(request), determinism))
}
