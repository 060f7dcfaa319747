//! A generation request as far as it is known before the ledger is asked: its fields, and its prompt's block hashes.

use std::sync::Arc;

use planner::RequestTransferBlocker;
use prefix::{FallbackReason, LookupTier, Prompt, PromptIdentity, WallTime};
use vocabulary::{ModelId, PrefixChain, SessionId, Tokens};
use workers_shim::engine_api::{
    AnswerTokenIdsMode, Api, ClientRequestBody, ClientTokenIdVisibility, LegOptions, UsageEventMode,
};

use crate::catalog::Model;
use crate::client_request::{ClientRequest, GenerationEndpoint};
use crate::request_body_cache::BodyLineage;
use crate::session_key::SessionKey;

/// How the answer is delivered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ResponseDelivery {
    /// As one body.
    Whole,
    /// As server-sent events.
    Stream {
        /// Whether the client asked for the usage event. If not, the router requests it and removes it from the stream.
        usage_wanted: bool,
    },
}

/// A generation request, parsed as far as routing needs it.
#[derive(Debug)]
pub struct ParsedRequest {
    /// The request as received.
    pub incoming: ClientRequest,
    /// The endpoint that it came by.
    pub endpoint: GenerationEndpoint,
    /// The scanned body, from which legs are built.
    pub body: ClientRequestBody,
    /// The body among those of its session.
    pub lineage: BodyLineage,
    /// The model.
    pub model: ModelId,
    /// The tenant's cache salt, where tenants are isolated.
    pub salt: Option<Arc<str>>,
    /// The client's own cache salt, where tenants are not isolated: it is passed to the engines, and blocks with
    /// different salts are different blocks.
    pub client_salt: Option<Arc<str>>,
    /// The session that the client names.
    pub session_key: Option<SessionKey>,
    /// How the answer is delivered.
    pub delivery: ResponseDelivery,
    /// Maximum answer length in tokens, where the client sets one.
    pub max_answer: Option<Tokens>,
    /// What in the request forbids KV transfers for it.
    pub transfer_bar: Option<RequestTransferBlocker>,
}

impl ParsedRequest {
    /// Returns the salt that the engines see.
    pub fn cache_salt(&self) -> Option<&str> {
        self.salt.as_deref().or(self.client_salt.as_deref())
    }

    /// Returns what keeps engines from using their prefix cache for this request: log probabilities of the prompt
    /// require computing all of it. `None` where they use the cache.
    pub fn cache_bypass_reason(&self) -> Option<RequestTransferBlocker> {
        let fields = self.body.scanned_json();
        let echo = fields.read::<bool>("echo").unwrap_or(false);
        let asks = match self.endpoint {
            // An echoed chat always has prompt log probabilities, an echoed completion only if its answer has some.
            GenerationEndpoint::ChatCompletions => fields.has("prompt_logprobs") || echo,
            GenerationEndpoint::Completions => fields.has("prompt_logprobs") || echo && fields.has("logprobs"),
            GenerationEndpoint::Messages | GenerationEndpoint::Responses => false,
        };
        asks.then_some(RequestTransferBlocker::PromptLogprobs)
    }

    /// Whether the engine's prompt token count can be compared with ours: every prompt is counted once, as text that
    /// the engine tokenized. A suffix may become part of the prompt, and token ids come from the client, so their
    /// number is certain.
    pub fn has_comparable_counts(&self) -> bool {
        self.has_single_prefill() && self.body.scanned_json().get("prompt").is_none_or(|prompt| !holds_ids(prompt))
    }

    /// Whether an engine computes the prompt exactly once, and nothing else with it.
    pub fn has_single_prefill(&self) -> bool {
        let fields = self.body.scanned_json();
        let one = |name| fields.read::<u64>(name).is_none_or(|count| count <= 1);
        let beams = fields.read::<bool>("use_beam_search").unwrap_or(false);
        one("n") && one("best_of") && !beams && !fields.has("suffix")
    }
}

/// Whether a completion's prompt, or each prompt of a batch, consists of token ids.
fn holds_ids(prompt: &[u8]) -> bool {
    let inside = prompt.strip_prefix(b"[").map(<[u8]>::trim_ascii_start);
    inside.and_then(<[u8]>::first).is_some_and(|first| *first != b'"')
}

/// Returns the options that all legs of a request share.
pub fn leg_options(request: &ParsedRequest) -> LegOptions {
    LegOptions {
        api: match request.endpoint {
            GenerationEndpoint::ChatCompletions => Api::Chat,
            GenerationEndpoint::Completions => Api::Completions,
            GenerationEndpoint::Messages => Api::Messages,
            GenerationEndpoint::Responses => Api::Responses,
        },
        salt: request.salt.clone(),
        usage: match request.delivery {
            ResponseDelivery::Stream { usage_wanted: false } => UsageEventMode::Always,
            ResponseDelivery::Stream { usage_wanted: true } | ResponseDelivery::Whole => UsageEventMode::AsRequested,
        },
        ids: AnswerTokenIdsMode::AsRequested,
    }
}

/// Returns which token ids the client wants in the answer.
pub fn shown_ids(request: &ParsedRequest) -> ClientTokenIdVisibility {
    if request.body.scanned_json().read("return_token_ids").unwrap_or(false) {
        ClientTokenIdVisibility::All
    } else {
        ClientTokenIdVisibility::None
    }
}

/// A request whose prompt's block hashes are known.
#[derive(Debug)]
pub struct IdentifiedRequest {
    /// The request.
    pub request: ParsedRequest,
    /// The model it is for, as far as this router knows it.
    pub model: Arc<Model>,
    /// The prompt; of a batch the first one, which determines the session.
    pub prompt: Prompt,
    /// Chains of the other prompts of a batch.
    pub other_chains: Vec<PrefixChain>,
    /// Cache tier that recognised the conversation; `None` where its token ids are unknown, and for completions.
    pub tier: Option<LookupTier>,
    /// Wall-clock time for chat templates that print it.
    pub wall_time: WallTime,
    /// The session that the client names, if any.
    pub named_session: Option<SessionId>,
    /// Key that is stable over a conversation's steps: the client's session name, else the conversation fingerprint.
    pub affinity_key: SessionId,
}

impl IdentifiedRequest {
    /// Returns why the prompt is identified by its bytes only; `None` when it is identified by token ids.
    pub fn fallback_reason(&self) -> Option<FallbackReason> {
        match self.prompt.identity {
            PromptIdentity::Exact => None,
            PromptIdentity::Fallback(reason) => Some(reason),
        }
    }

    /// Returns the number of prompt tokens that the engine must count, too. `None` where ours is an estimate, or where
    /// the engine's count may legitimately differ or does not depend on how the text was tokenized here.
    pub fn comparable_tokens(&self) -> Option<Tokens> {
        let is_certain = self.fallback_reason().is_none() && self.request.has_comparable_counts();
        is_certain.then(|| self.total_tokens())
    }

    /// Returns the chains of all prompts.
    pub fn chains(&self) -> impl Iterator<Item = &PrefixChain> {
        std::iter::once(&self.prompt.chain).chain(&self.other_chains)
    }

    /// Tokens of all prompts together.
    pub fn total_tokens(&self) -> Tokens {
        self.chains().map(|chain| chain.tokens).sum()
    }

    /// Tokens of the longest prompt.
    pub fn longest_prompt(&self) -> Tokens {
        self.chains().map(|chain| chain.tokens).max().unwrap_or_default()
    }
}
