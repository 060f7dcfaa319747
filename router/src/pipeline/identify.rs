//! Identify: which prompt is this, block by block, and whose conversation does the client say it is.
//!
//! Pure given a tokenizer: it reads the request, and what earlier steps have left of it.

use std::sync::Arc;

use prefix::{
    ChatEndpoint, ChatLayout, ConversationCache, ConversationLookup, ConvertedRequest, ExtendedPrompt, FallbackReason,
    LookupTier, PrefixError, Prompt, PromptIdentity, PromptInputs, ResolvedPrompt, TokenCheckpoint, WallTime,
};
use vocabulary::{PrefixChain, SessionId, Tokens};

use super::conversation_fingerprint::conversation_fingerprint;
use super::parse::ParsedRequest;
use crate::catalog::Model;

/// A request whose prompt has a name.
#[derive(Debug)]
pub struct IdentifiedRequest {
    /// The request.
    pub request: ParsedRequest,
    /// The model it is for, as far as it is known here.
    pub model: Arc<Model>,
    /// The prompt: the first one of a batch, whose session it is.
    pub prompt: Prompt,
    /// The other ones of a batch.
    pub other_chains: Vec<PrefixChain>,
    /// By what a conversation was recognised; none where its token ids are unknown, and for completions.
    pub tier: Option<LookupTier>,
    /// The time for templates that print it.
    pub wall_time: WallTime,
    /// The session that the client names, if it names one.
    pub named_session: Option<SessionId>,
    /// What must be stable over a conversation's steps: the client's name for it, else how it began.
    pub affinity_key: SessionId,
}

impl IdentifiedRequest {
    /// Why the prompt is known by its bytes only; none when by token ids.
    pub fn fallback_reason(&self) -> Option<FallbackReason> {
        match self.prompt.identity {
            PromptIdentity::Exact => None,
            PromptIdentity::Fallback(reason) => Some(reason),
        }
    }

    /// Tokens that its engine must count in it, too; none where ours are estimated, or where its count may rightly be
    /// another one or says nothing of how the text was read here.
    pub fn comparable_tokens(&self) -> Option<Tokens> {
        let is_certain = self.fallback_reason().is_none() && self.request.has_comparable_counts();
        is_certain.then(|| self.total_tokens())
    }

    /// The chains of all prompts.
    pub fn chains(&self) -> impl Iterator<Item = &PrefixChain> {
        std::iter::once(&self.prompt.chain).chain(&self.other_chains)
    }

    /// Tokens of all prompts.
    pub fn total_tokens(&self) -> Tokens {
        self.chains().map(|chain| chain.tokens).sum()
    }

    /// Tokens of the longest prompt.
    pub fn longest_prompt(&self) -> Tokens {
        self.chains().map(|chain| chain.tokens).max().unwrap_or_default()
    }
}

/// A prompt, and how it was come by.
#[derive(Debug)]
pub struct IdentifiedPrompt {
    prompt: Prompt,
    other_chains: Vec<PrefixChain>,
    tier: Option<LookupTier>,
    /// Tokens that were known before.
    pub known_tokens: Tokens,
    /// The checkpoint for the conversation's next step.
    pub next_checkpoint: Option<TokenCheckpoint>,
}

/// A request that is to be identified.
#[derive(Debug)]
pub struct UnidentifiedRequest {
    request: ParsedRequest,
    model: Arc<Model>,
    wall_time: WallTime,
    named_session: Option<SessionId>,
    /// What must be stable over a conversation's steps: the client's name for it, else how it began.
    pub affinity_key: SessionId,
    /// What its engine makes of it, once that was asked for, where it comes in another endpoint's words.
    converted: Option<Result<ConvertedRequest, PrefixError>>,
}

/// What is left of a request that was identified.
#[derive(Debug)]
pub struct IdentificationResult {
    /// The request with its prompt's name.
    pub identified: IdentifiedRequest,
    /// Tokens that were known before.
    pub known_tokens: Tokens,
    /// The checkpoint for the conversation's next step.
    pub next_checkpoint: Option<TokenCheckpoint>,
    /// What its engine makes of it, where it came in another endpoint's words.
    pub converted: Option<ConvertedRequest>,
}

impl UnidentifiedRequest {
    /// A request for this model.
    pub fn new(request: ParsedRequest, model: Arc<Model>) -> Self {
        let key = request.session_key.as_ref();
        let named_session = key.map(|key| SessionId::of_key(&request.incoming.tenant, &request.model, &key.name));
        let affinity_key = named_session.unwrap_or_else(|| conversation_fingerprint(&request));
        Self { wall_time: wall_time(), named_session, affinity_key, request, model, converted: None }
    }

    /// Whether it comes in another endpoint's words than a chat.
    pub fn needs_conversion(&self) -> bool {
        self.request.endpoint.chat_form().is_some_and(|form| form != ChatEndpoint::Chat)
    }

    /// With what its engine makes of it: as long as reading all of it takes, and done once.
    pub fn converted(self) -> Self {
        let body = &self.request.incoming.body;
        let chat = self.request.endpoint.chat_form().and_then(|form| self.model.identifier.convert(form, body));
        Self { converted: chat, ..self }
    }

    /// The request.
    pub fn request(&self) -> &ParsedRequest {
        &self.request
    }

    fn prompt_options(&self) -> PromptInputs<'_> {
        PromptInputs { keys: self.model.root_keys(self.request.cache_salt()), now: self.wall_time }
    }

    fn layout(&self) -> Option<ChatLayout<'_>> {
        match self.request.endpoint.chat_form()? {
            ChatEndpoint::Chat => {
                let fields = self.request.body.json_fields();
                ChatLayout::new(fields.body(), fields.all())
            }
            ChatEndpoint::Messages | ChatEndpoint::Responses => {
                self.converted.as_ref()?.as_ref().ok().map(ConvertedRequest::layout)
            }
        }
    }

    fn memory<'a>(&'a self, trails: &'a ConversationCache) -> Option<ConversationLookup<'a>> {
        let tenant = &self.request.incoming.tenant.0;
        let session = self.named_session.map(|session| session.0);
        let is_wanted = trails.has_room() && !self.model.is_disabled_by_spot_check();
        is_wanted.then_some(ConversationLookup { cache: trails, tenant, session })
    }

    /// The prompt at the cost of what is new in it; none where it must be computed as a whole.
    pub fn extend_known(&self, trails: &ConversationCache) -> Option<IdentifiedPrompt> {
        let memory = self.memory(trails)?;
        let ExtendedPrompt { prompt, reused_tokens: known, tier: rung } =
            self.model.identifier.extend(self.layout()?, self.prompt_options(), memory)?;
        Some(IdentifiedPrompt {
            prompt,
            other_chains: Vec::new(),
            tier: Some(rung),
            known_tokens: known,
            next_checkpoint: None,
        })
    }

    /// The prompt, computed as a whole as far as its checkpoint does not know it.
    pub fn compute_whole(&self, trails: &ConversationCache, known: Option<&TokenCheckpoint>) -> IdentifiedPrompt {
        let (identifier, body, asked) = (&self.model.identifier, &self.request.incoming.body, self.prompt_options());
        let remembered = self.memory(trails).and_then(|memory| Some((self.layout()?, memory)));
        let ResolvedPrompt { prompt, reused_tokens: known, next_checkpoint: next } =
            match (self.request.endpoint.chat_form(), &self.converted, remembered) {
                (Some(_), Some(Err(error)), _) => identifier.resolve_rejected(body, error, asked),
                (Some(_), _, Some((layout, memory))) => identifier.resolve_and_cache(layout, asked, known, memory),
                (Some(_), Some(Ok(converted)), None) => identifier.resolve_converted(converted, (asked, known)),
                (Some(form), None, None) => identifier.resolve_conversation(form, body, (asked, known)),
                (None, ..) => {
                    let mut batch = identifier.resolve_completion(body, asked);
                    let others = batch.drain(1..).map(|prompt| prompt.chain).collect();
                    return IdentifiedPrompt {
                        prompt: batch.remove(0),
                        other_chains: others,
                        tier: None,
                        known_tokens: Tokens::ZERO,
                        next_checkpoint: None,
                    };
                }
            };
        let rung = if known == Tokens::ZERO { LookupTier::Cold } else { LookupTier::Checkpoint };
        let rung = (prompt.identity == PromptIdentity::Exact).then_some(rung);
        IdentifiedPrompt { prompt, other_chains: Vec::new(), tier: rung, known_tokens: known, next_checkpoint: next }
    }

    /// The request with its prompt's name.
    pub fn with_prompt(self, found: IdentifiedPrompt) -> IdentificationResult {
        let IdentifiedPrompt { prompt, other_chains: others, tier: rung, known_tokens: known, next_checkpoint: next } =
            found;
        let Self { request, model, wall_time: now, named_session: named, affinity_key: pin, converted: chat } = self;
        let prefixed = IdentifiedRequest {
            request,
            model,
            prompt,
            other_chains: others,
            tier: rung,
            wall_time: now,
            named_session: named,
            affinity_key: pin,
        };
        IdentificationResult {
            identified: prefixed,
            known_tokens: known,
            next_checkpoint: next,
            converted: chat.and_then(Result::ok),
        }
    }
}

/// For templates that print the date: engines take their own clock, in UTC as ours.
fn wall_time() -> WallTime {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    WallTime { unix_seconds: now.as_secs() as i64 }
}
