//! Identify: computes which prompt this is, block by block, and which session the client names.
//!
//! The computation is pure given a tokenizer: it depends on the request and on what earlier steps have cached.

use std::sync::Arc;

use prefix::{
    ChatBodyLayout, ChatEndpoint, ConversationCache, ConversationQuery, ConvertedRequest, ExtendedPrompt,
    ExtraPromptInputs, FieldLayout, LayoutOf, LookupTier, PrefixError, Prompt, PromptIdentity, ResolvedPrompt,
    TokenCheckpoint, WallTime,
};
use prometheus::IntCounterVec;
use vocabulary::{PrefixChain, SessionId, Tokens};
use workers_shim::engine_api::ScannedJson;

use super::conversation_fingerprint::conversation_fingerprint;
use crate::catalog::{Catalog, Model};
use crate::checkpoints::{TokenCheckpointStore, TokenCheckpointUpdate};
use crate::error::ApiError;
use crate::identified_request::{IdentifiedRequest, ParsedRequest};
use crate::memory_budget::MemoryReservation;
use crate::offload_pool::{OffloadPool, OffloadSpec};
use crate::prefix_cache::PrefixCache;
use crate::request_body_cache::{BodyLineage, MAX_INLINE_COMPARISON};

/// A prompt, and how it was identified.
#[derive(Debug)]
pub struct IdentifiedPrompt {
    prompt: Prompt,
    other_chains: Vec<PrefixChain>,
    tier: Option<LookupTier>,
    /// Tokens that were known from earlier steps.
    pub known_tokens: Tokens,
    /// The checkpoint for the conversation's next step.
    pub next_checkpoint: Option<TokenCheckpoint>,
}

impl IdentifiedPrompt {
    /// A prompt of which nothing was known before.
    fn first_seen(prompt: Prompt) -> Self {
        Self { prompt, other_chains: Vec::new(), tier: None, known_tokens: Tokens::ZERO, next_checkpoint: None }
    }
}

/// Cost of one pair of messages in a template that is quadratic in messages, in bytes of plain text.
const QUADRATIC_BYTES: usize = 32;

/// A request whose prompt is not yet identified.
#[derive(Debug)]
pub struct IdentificationInput {
    request: ParsedRequest,
    model: Arc<Model>,
    wall_time: WallTime,
    named_session: Option<SessionId>,
    /// Key that is stable over a conversation's steps: the client's session name, else the conversation fingerprint.
    pub affinity_key: SessionId,
    /// A request of another endpoint as the engine converts it to chat, once that was computed.
    converted: Option<Result<ConvertedRequest, PrefixError>>,
}

/// Result of identifying a request.
#[derive(Debug)]
pub struct IdentificationResult {
    /// The identified request.
    pub identified: IdentifiedRequest,
    /// Tokens that were known from earlier steps.
    pub known_tokens: Tokens,
    /// The checkpoint for the conversation's next step.
    pub next_checkpoint: Option<TokenCheckpoint>,
    /// The request as the engine converts it to chat, where it came by another endpoint.
    pub converted: Option<ConvertedRequest>,
}

impl IdentificationInput {
    /// Starts identification of a request for this model.
    pub fn new(request: ParsedRequest, model: Arc<Model>) -> Self {
        let key = request.session_key.as_ref();
        let named_session = key.map(|key| SessionId::of_key(&request.incoming.tenant, &request.model, &key.name));
        let affinity_key = named_session.unwrap_or_else(|| conversation_fingerprint(&request));
        Self { wall_time: wall_time(), named_session, affinity_key, request, model, converted: None }
    }

    /// Whether the request is a conversation in another endpoint's format than chat completions.
    pub fn needs_conversion(&self) -> bool {
        self.request.endpoint.chat_form().is_some_and(|form| form != ChatEndpoint::Chat)
    }

    /// Converts the request to chat as its engine does. Done once; takes time proportional to the body.
    pub fn converted(self) -> Self {
        let body = &self.request.incoming.body;
        let chat = self.request.endpoint.chat_form().and_then(|form| self.model.identifier.convert(form, body));
        Self { converted: chat, ..self }
    }

    /// The request.
    pub fn request(&self) -> &ParsedRequest {
        &self.request
    }

    fn prompt_options(&self) -> ExtraPromptInputs<'_> {
        ExtraPromptInputs { keys: self.model.root_keys(self.request.cache_salt()), now: self.wall_time }
    }

    fn layout(&self) -> Option<ChatBodyLayout<'_>> {
        match self.request.endpoint.chat_form()? {
            ChatEndpoint::Chat => {
                let fields = self.request.body.scanned_json();
                ChatBodyLayout::new(fields.body(), fields.all())
            }
            ChatEndpoint::Messages | ChatEndpoint::Responses => {
                self.converted.as_ref()?.as_ref().ok().map(ConvertedRequest::layout)
            }
        }
    }

    fn memory<'a>(&'a self, conversations: &'a ConversationCache) -> Option<ConversationQuery<'a>> {
        let tenant = &self.request.incoming.tenant.0;
        let session = self.named_session.map(|session| session.0);
        let is_wanted = conversations.has_room() && !self.model.is_disabled_by_spot_check();
        is_wanted.then_some(ConversationQuery { cache: conversations, tenant, session })
    }

    /// Identifies the prompt by extending a known conversation, at the cost of its new part; `None` where the whole
    /// prompt must be computed.
    pub fn extend_known(&self, conversations: &ConversationCache) -> Option<IdentifiedPrompt> {
        let memory = self.memory(conversations)?;
        let ExtendedPrompt { prompt, reused_tokens: known, tier } =
            self.model.identifier.extend(self.layout()?, self.prompt_options(), memory)?;
        Some(IdentifiedPrompt {
            prompt,
            other_chains: Vec::new(),
            tier: Some(tier),
            known_tokens: known,
            next_checkpoint: None,
        })
    }

    /// Returns whether only what is new since the body before is hashed: for a model without a tokenizer, and a body that
    /// is short enough for the copies of its block ids.
    fn continues_known(&self) -> bool {
        let (fields, endpoint) = (self.request.body.scanned_json(), self.request.endpoint.chat_form());
        let (body, keys) = (fields.body(), self.prompt_options().keys);
        let known = self.request.lineage.conversation().filter(|_| endpoint == Some(ChatEndpoint::Chat));
        body.len() <= MAX_INLINE_COMPARISON
            && known.is_some_and(|known| self.model.identifier.continues((body, fields.all()), keys, known))
    }

    /// Identifies the prompt by computing all of it, except the part covered by its checkpoint.
    pub fn compute_whole(
        &self,
        conversations: &ConversationCache,
        checkpoint: Option<&TokenCheckpoint>,
    ) -> IdentifiedPrompt {
        let (identifier, body, asked) = (&self.model.identifier, &self.request.incoming.body, self.prompt_options());
        if identifier.text().is_none() && self.request.endpoint.chat_form() == Some(ChatEndpoint::Chat) {
            let (fields, lineage) = (self.request.body.scanned_json(), &self.request.lineage);
            let (conversation, layout) = (lineage.conversation(), |name: &str| field_layout(fields, name));
            let known = (asked.keys, conversation, &layout as LayoutOf<'_, '_>);
            let (prompt, checkpoint) = identifier.prompt_without_tokenizer(fields.body(), fields.all(), known);
            lineage.set_checkpoint(checkpoint);
            return IdentifiedPrompt::first_seen(prompt);
        }
        let remembered = self.memory(conversations).and_then(|memory| Some((self.layout()?, memory)));
        let ResolvedPrompt { prompt, reused_tokens: checkpoint, next_checkpoint: next } =
            match (self.request.endpoint.chat_form(), &self.converted, remembered) {
                (Some(_), Some(Err(error)), _) => identifier.resolve_rejected(body, error, asked),
                (Some(_), _, Some((layout, memory))) => identifier.resolve_and_cache(layout, asked, checkpoint, memory),
                (Some(_), Some(Ok(converted)), None) => identifier.resolve_converted(converted, (asked, checkpoint)),
                (Some(form), None, None) => identifier.resolve_conversation(form, body, (asked, checkpoint)),
                (None, ..) => {
                    let mut batch = identifier.resolve_completion(body, asked);
                    let others = batch.drain(1..).map(|prompt| prompt.chain).collect();
                    return IdentifiedPrompt { other_chains: others, ..IdentifiedPrompt::first_seen(batch.remove(0)) };
                }
            };
        let tier = if checkpoint == Tokens::ZERO { LookupTier::Miss } else { LookupTier::Checkpoint };
        let tier = (prompt.identity == PromptIdentity::Exact).then_some(tier);
        IdentifiedPrompt { prompt, other_chains: Vec::new(), tier, known_tokens: checkpoint, next_checkpoint: next }
    }

    /// Combines the request with its identified prompt.
    pub fn with_prompt(self, found: IdentifiedPrompt) -> IdentificationResult {
        let IdentifiedPrompt { prompt, other_chains: others, tier, known_tokens: known, next_checkpoint: next } = found;
        let Self { mut request, model, wall_time: now, named_session: named, affinity_key, converted: chat } = self;
        // The cache's bound does not hold for what requests keep.
        request.lineage = BodyLineage::default();
        let identified = IdentifiedRequest {
            request,
            model,
            prompt,
            other_chains: others,
            tier,
            wall_time: now,
            named_session: named,
            affinity_key,
        };
        IdentificationResult {
            identified,
            known_tokens: known,
            next_checkpoint: next,
            converted: chat.and_then(Result::ok),
        }
    }
}

/// Current time for templates that print the date: engines use their own clock, in UTC like ours.
fn wall_time() -> WallTime {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    WallTime { unix_seconds: now.as_secs() as i64 }
}

/// Returns the cost of rendering and tokenizing a conversation, in bytes of plain text: a chat template may take time in
/// the square of the number of messages.
fn rendering_cost(body_bytes: usize, messages: usize) -> usize {
    body_bytes.max(messages.saturating_mul(messages).saturating_mul(QUADRATIC_BYTES))
}

/// What identifying a prompt uses.
#[derive(Debug)]
pub struct IdentifyStage {
    pub(super) catalog: Arc<Catalog>,
    pub(super) prefix_cache: Arc<PrefixCache>,
    pub(super) checkpoints: Arc<TokenCheckpointStore>,
    pub(super) offload_pool: Arc<OffloadPool>,
    /// Counts tokens by how they were identified.
    pub(super) identified: IntCounterVec,
}

impl IdentifyStage {
    /// Stores and counts what a step has learned about its prompt.
    fn record(&self, identified: &IdentifiedRequest, known: Tokens, next: Option<TokenCheckpoint>) {
        self.prefix_cache.record_step(identified, known);
        let Some(tier) = identified.tier else { return };
        let source =
            if matches!(tier, LookupTier::Checkpoint | LookupTier::Miss) { "checkpoint" } else { "conversation" };
        let counted = |source: &str, tokens: Tokens| {
            self.identified.with_label_values(&[source]).inc_by(tokens.0);
        };
        counted(source, known);
        counted("encoded", identified.prompt.chain.tokens - known);
        let incoming = &identified.request.incoming;
        let tokenized =
            TokenCheckpointUpdate { known_tokens: known, next_checkpoint: next, body_bytes: incoming.body.len() };
        self.checkpoints.store(&incoming.tenant, identified.affinity_key, tokenized);
    }
}

/// Identifies the request's prompt. A known conversation costs only its new part; any other prompt is tokenized as a
/// whole. The second value is the request as the engine converts it to chat, where that had to be computed.
pub async fn identify(
    stage: &IdentifyStage,
    request: ParsedRequest,
) -> Result<(IdentifiedRequest, Option<ConvertedRequest>), ApiError> {
    let model = stage.catalog.model(&request.model);
    let has_text = model.identifier.text().is_some();
    // Freed after identification: JSON trees and rendered text.
    let mut derived = request.incoming.memory.as_deref().map(MemoryReservation::sibling);
    if let Some(derived) = &mut derived {
        derived.grow(request.body.derived_bytes())?;
    }
    let (request, found, derived) = extend_known(stage, (request, model), derived).await?;
    let (request, found) = match found {
        Some(found) => {
            drop(derived);
            (request, found)
        }
        None => {
            let incoming = &request.request().incoming;
            let (tenant, size) = (incoming.tenant.clone(), incoming.body.len());
            let known = match has_text {
                true => stage.checkpoints.lookup(&tenant, request.affinity_key, size).await,
                false => None,
            };
            compute_whole(stage, (request, known), derived).await?
        }
    };
    let IdentificationResult { identified, known_tokens: known, next_checkpoint: next, converted: chat } =
        request.with_prompt(found);
    stage.record(&identified, known, next);
    Ok((identified, chat))
}

/// Identifies the prompt by extending a known conversation, after converting requests of other endpoints to chat.
/// Returns `None` for the prompt where it must be identified as a whole. The memory reservation moves into the work,
/// which may outlive its client.
async fn extend_known(
    stage: &IdentifyStage,
    (request, model): (ParsedRequest, Arc<Model>),
    derived: Option<MemoryReservation>,
) -> Result<(IdentificationInput, Option<IdentifiedPrompt>, Option<MemoryReservation>), ApiError> {
    // Without a tokenizer no conversation is known, and a client's name for the session needs no look at the body.
    let is_chat = request.endpoint.chat_form().is_none_or(|form| form == ChatEndpoint::Chat);
    if model.identifier.text().is_none() && is_chat && request.session_key.is_some() {
        return Ok((IdentificationInput::new(request, model), None, derived));
    }
    let (load, conversations) = (OffloadSpec::of(&request.incoming), stage.prefix_cache.conversations.clone());
    let work = move || {
        // The fingerprint of an unnamed session reads the body, too.
        let request = IdentificationInput::new(request, model);
        let request = if request.needs_conversion() { request.converted() } else { request };
        let found = request.extend_known(&conversations);
        (request, found, derived)
    };
    load.run(&stage.offload_pool, work).await
}

async fn compute_whole(
    stage: &IdentifyStage,
    (request, known): (IdentificationInput, Option<TokenCheckpoint>),
    derived: Option<MemoryReservation>,
) -> Result<(IdentificationInput, IdentifiedPrompt), ApiError> {
    let (mut load, conversations) =
        (OffloadSpec::of(&request.request().incoming), stage.prefix_cache.conversations.clone());
    if request.model.identifier.text().is_some() {
        let fields = request.request.body.scanned_json();
        let messages = fields.elements("messages").max(fields.elements("input"));
        load = load.on(rendering_cost(fields.body().len(), messages));
    } else if request.continues_known() {
        load = load.on(request.request.lineage.new_bytes(request.request.incoming.body.len()));
    }
    let work = move || {
        let found = request.compute_whole(&conversations, known.as_ref());
        drop(derived);
        (request, found)
    };
    load.run(&stage.offload_pool, work).await
}

/// Returns what the scan knows of the white space in a field.
fn field_layout<'a>(fields: &'a ScannedJson, name: &str) -> FieldLayout<'a> {
    FieldLayout { is_compact: fields.is_compact(name), element_ends: fields.compact_elements(name) }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use prefix::{BytesCheckpoint, KnownConversation, Prompt, PromptResolver};
    use proptest::prelude::*;
    use vocabulary::{ModelId, RequestNamespace};

    use super::*;
    use crate::offload_pool::MIN_OFFLOAD_BYTES;

    #[test]
    fn a_small_body_of_many_messages_costs_as_much_as_a_long_one() {
        assert!(rendering_cost(1_000, 10) < MIN_OFFLOAD_BYTES && rendering_cost(1_000, 100) > MIN_OFFLOAD_BYTES);
        assert_eq!(rendering_cost(70_000, 1), 70_000);
    }

    #[test]
    fn a_prompt_by_the_parsers_fields_equals_one_by_the_whole_body() {
        let model = Catalog::default().model(&ModelId::from("m"));
        let keys = model.root_keys(None);
        let long = format!(r#"{{"messages":[{{"role":"user","content":"{}"}}]}}"#, r#"words \n \"é\" "#.repeat(200));
        for body in [
            r#"{"model":"m","messages":[{"role":"user","content":" a  b "}, {"role":"x" , "n":[1, 2,{"y":null}]}],"tools":[{"a" : 1}]}"#,
            r#"{"tools":null,"messages":[ ],"documents":[[],{}],"system":"s"}"#,
            r#"{"messages":[{"content":"]}\""},"text",7]}"#,
            r#"{"messages":[1],"messages":[2]}"#,
            r#"{"tools":[1],"tools":null,"messages":[2]}"#,
            r#"{"m\u0065ssages":[{"role":"user"}],"stream":true}"#,
            r#"{"messages":{"not":"a list"}}"#,
            &long,
        ] {
            let scanned = ScannedJson::scan(body.to_owned().into(), &[]).unwrap();
            let by_fields = by_layout(&model.identifier, &scanned, (keys, None)).0;
            let whole = model.identifier.resolve_chat(body.as_bytes(), ExtraPromptInputs { keys, now: wall_time() });
            assert_eq!(by_fields, whole, "{body}");
        }
    }

    fn by_layout(
        identifier: &PromptResolver,
        fields: &ScannedJson,
        (keys, known): (RequestNamespace<'_>, Option<KnownConversation<'_>>),
    ) -> (Prompt, Option<BytesCheckpoint>) {
        let layout = |name: &str| field_layout(fields, name);
        identifier.prompt_without_tokenizer(fields.body(), fields.all(), (keys, known, &layout))
    }

    proptest! {
        /// Messages, what separates them, and the fields around them, with white space here and there.
        #[test]
        fn a_conversation_by_its_layout_has_the_prompt_of_its_text(
            messages in prop::collection::vec(("[a-z\"\\\\\\[\\]{}, é\n]{0,40}", prop_oneof![4 => Just(","), 1 => Just(" ,"), 1 => Just(", ")]), 1..7),
            tools in prop_oneof![Just("null"), Just("[{\"b\": [1, 2]}]"), Just("[{\"b\":[1,2]}]")],
            (open, close) in prop_oneof![3 => Just(("[", "]")), 1 => Just(("[ ", "]")), 1 => Just(("[", "\n]"))],
            list in prop_oneof![3 => Just("messages"), 1 => Just("m\\u0065ssages")],
        ) {
            let model = Catalog::default().model(&ModelId::from("m"));
            let keys = model.root_keys(None);
            let body = |count: usize| {
                let mut text = String::new();
                for (content, separator) in &messages[..count] {
                    let content = serde_json::to_string(content).unwrap();
                    let before = if text.is_empty() { "" } else { *separator };
                    text.push_str(&format!("{before}{{\"content\":{content}}}"));
                }
                format!("{{\"tools\":{tools},\"{list}\":{open}{text}{close},\"system\":\"s\"}}")
            };
            let mut known: Option<(Arc<ScannedJson>, BytesCheckpoint)> = None;
            for count in (1..=messages.len()).flat_map(|count| [count, count]) {
                let body = Bytes::from(body(count));
                let growth = known.as_ref().and_then(|(known, _)| known.growth_to(&body, "messages"));
                let scanned = match &growth {
                    Some(growth) => ScannedJson::scan_growth(body.clone(), growth, &[]).unwrap(),
                    None => ScannedJson::scan(body.clone(), &[]).unwrap(),
                };
                prop_assert_eq!(&scanned, &ScannedJson::scan(body.clone(), &[]).unwrap());
                let before = known.as_ref().zip(growth.as_ref()).map(|((known, checkpoint), growth)| KnownConversation {
                    body: known.body(),
                    checkpoint,
                    end: growth.end(),
                });
                let (prompt, checkpoint) = by_layout(&model.identifier, &scanned, (keys, before));
                let asked = ExtraPromptInputs { keys, now: wall_time() };
                prop_assert_eq!(prompt, model.identifier.resolve_chat(&body, asked));
                known = checkpoint.map(|checkpoint| (Arc::new(scanned), checkpoint));
            }
        }
    }
}
