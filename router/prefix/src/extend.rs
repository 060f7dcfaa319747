//! Resolves a conversation's next step at the cost of its new messages only.
//!
//! One digest proves that the old part of the body is unchanged. Only the new messages are parsed, rendered,
//! tokenized and hashed. Unusual requests are left to the full computation; both ways yield the same prompt.

use std::sync::Arc;

use vocabulary::{PrefixChain, PrefixId, Tokens};
use xxhash_rust::xxh3::Xxh3;

use crate::block_segments::SharedBlockHashes;
use crate::conversation_cache::CheckpointMatch;
use crate::conversation_checkpoint::{
    BodyPrefixHasher, ConversationCheckpoint, ConversationSetup, MessageBoundary, push_boundary,
};
use crate::incremental_rendering::{
    BodyEnvelope, HistorySummary, RenderedTail, SECONDS_PER_DAY, SystemPromptForm, TemplateCapabilities,
    TurnContinuation, shorten_variables,
};
use crate::message_scan::{self, MessageRole, MessageScan};
use crate::model_tokenizer::RenderedPrompt;
use crate::{
    ChatBody, ChatBodyLayout, ConversationCache, ExtraPromptInputs, LookupTier, ModelTokenizer, PrefixError,
    PrefixStability, Prompt, PromptContent, PromptIdentity, PromptResolver, ResolvedPrompt, TokenCheckpoint,
    TokenizedPrompt, WallTime,
};

/// Maximum number of boundaries tried per checkpoint, from the deepest.
const MAX_RESUME_ATTEMPTS: usize = 4;
/// Maximum bytes of text tokenized a second time to locate a boundary in a prompt that was tokenized as a whole.
const MAX_RETOKENIZED_BYTES: usize = 64 << 10;
/// Maximum bytes of new messages rendered here; larger bodies are left to a thread that may block.
const MAX_NEW_BYTES: usize = 256 << 10;
/// Maximum number of new messages rendered here: a template may take time in the square of it.
const MAX_NEW_MESSAGES: usize = 64;
/// Lower bound of bytes per token for most texts; sizes the id buffer.
const MIN_BYTES_PER_TOKEN: usize = 3;

/// Conversation cache, and the tenant and session to look up.
#[derive(Clone, Copy, Debug)]
pub struct ConversationQuery<'a> {
    /// Cache of all conversations.
    pub cache: &'a ConversationCache,
    /// Tenant; conversations of other tenants are not found.
    pub tenant: &'a str,
    /// The client's name for the conversation.
    pub session: Option<u128>,
}

/// Prompt resolved from a cached conversation.
#[derive(Debug)]
pub struct ExtendedPrompt {
    /// The prompt. Its content holds only the ids after the last whole block.
    pub prompt: Prompt,
    /// Tokens reused from the checkpoint.
    pub reused_tokens: Tokens,
    /// How the conversation was recognized.
    pub tier: LookupTier,
}

/// A request that is resolved from a checkpoint.
#[derive(Clone, Copy)]
struct ExtendRequest<'a> {
    text: &'a ModelTokenizer,
    rendering: &'a TemplateCapabilities,
    layout: ChatBodyLayout<'a>,
    root: PrefixId,
    now: WallTime,
}

/// Boundary found in a prompt: the text that remains after it and the history before it.
struct ResumePoint {
    rest_len: usize,
    following_turn: TurnContinuation,
    cut: Arc<RenderedTail>,
    history: HistorySummary,
}

impl PromptResolver {
    /// Resolves the next step of a cached conversation. Returns `None` if the prompt must be computed in full.
    pub fn extend(
        &self,
        layout: ChatBodyLayout<'_>,
        inputs: ExtraPromptInputs<'_>,
        lookup: ConversationQuery<'_>,
    ) -> Option<ExtendedPrompt> {
        let step = self.extend_request(layout, inputs)?;
        let found = lookup.cache.find(step.scope(lookup.tenant), lookup.session, layout.message_list())?;
        let boundaries = (0..=found.boundary).rev().take(MAX_RESUME_ATTEMPTS);
        let (at, grown, next) = boundaries.into_iter().find_map(|at| {
            let (grown, next) = self.extend_from(step, &found, at)?;
            Some((at, grown, next))
        })?;
        if let Some(next) = next {
            let is_end = at + 1 == found.checkpoint.boundaries.len();
            let replaced = is_end.then_some(&found);
            lookup.cache.insert(lookup.tenant, Arc::new(next), (lookup.session, replaced));
        }
        Some(grown)
    }

    /// Resolves a chat request from its whole body and caches the conversation.
    pub fn resolve_and_cache(
        &self,
        layout: ChatBodyLayout<'_>,
        inputs: ExtraPromptInputs<'_>,
        checkpoint: Option<&TokenCheckpoint>,
        lookup: ConversationQuery<'_>,
    ) -> ResolvedPrompt {
        let computed = self.render(layout, inputs.now).and_then(|(chat, rendered)| {
            let tokenized = self.model_tokenizer()?.encode_rendered(&rendered.text, &chat, checkpoint)?;
            Ok((chat, rendered, tokenized))
        });
        match computed {
            Ok((chat, rendered, TokenizedPrompt { ids, reused_tokens: checkpoint, next_checkpoint: next })) => {
                let prompt = self.exact_prompt(ids, inputs.keys);
                if let Some(checkpoint) = self.checkpoint_of(layout, inputs, (&chat, &rendered, &prompt), lookup.tenant)
                {
                    lookup.cache.insert(lookup.tenant, Arc::new(checkpoint), (lookup.session, None));
                }
                ResolvedPrompt { prompt, reused_tokens: checkpoint, next_checkpoint: next }
            }
            Err(error) => {
                let prompt = self.fallback_prompt(layout.body, &error, inputs.keys);
                ResolvedPrompt { prompt, reused_tokens: Tokens::ZERO, next_checkpoint: None }
            }
        }
    }

    /// Removes the conversation that a request continues from the cache, and possibly others with the same beginning.
    pub fn forget(&self, layout: ChatBodyLayout<'_>, inputs: ExtraPromptInputs<'_>, lookup: ConversationQuery<'_>) {
        let Some(step) = self.extend_request(layout, inputs) else { return };
        let scope = step.scope(lookup.tenant);
        for _ in 0..MAX_RESUME_ATTEMPTS {
            let Some(found) = lookup.cache.find(scope, lookup.session, layout.message_list()) else { break };
            lookup.cache.remove(&found);
        }
    }

    fn render(&self, layout: ChatBodyLayout<'_>, now: WallTime) -> Result<(ChatBody, RenderedPrompt), PrefixError> {
        let text = self.model_tokenizer()?;
        let chat = ChatBody::parse(layout.body)?.with_call_order(layout.call_order);
        let rendered = text.render_prompt(&chat, now)?;
        Ok((chat, rendered))
    }

    fn extend_request<'a>(
        &'a self,
        layout: ChatBodyLayout<'a>,
        inputs: ExtraPromptInputs<'_>,
    ) -> Option<ExtendRequest<'a>> {
        let text = self.text()?;
        let windowing =
            text.incremental_rendering().filter(|windowing| windowing.supports_call_order(layout.call_order))?;
        Some(ExtendRequest { text, rendering: windowing, layout, root: self.root(inputs.keys), now: inputs.now })
    }

    /// Builds the checkpoint of a prompt that was computed in full.
    fn checkpoint_of(
        &self,
        layout: ChatBodyLayout<'_>,
        inputs: ExtraPromptInputs<'_>,
        (chat, rendered, prompt): (&ChatBody, &RenderedPrompt, &Prompt),
        tenant: &str,
    ) -> Option<ConversationCheckpoint> {
        let step = self
            .extend_request(layout, inputs)
            .filter(|_| !chat.continues_final_message() && !chat.adds_special_tokens())?;
        let scan = MessageScan::from_offset(layout.message_list(), 0, step.text.content_literals())?;
        let frame = Arc::new(ConversationSetup::of(&step, chat, &scan)?);
        if !step.rendering.supports_late_system && scan.has_late_system(frame.leading_roles.len()) {
            return None;
        }
        // Template arguments may contain time formats, so the rendering is tested at other times of the day.
        let is_told = step.rendering.prints_date && chat.has_template_arguments();
        if is_told && !step.text.is_stable_within_day(chat, (step.now, &rendered.text)) {
            return None;
        }
        let mut closings = Vec::new();
        let resume_points = step.resume_points(&frame, &scan, (message_scan::QuestionState::Never, &mut closings));
        let (ids, RenderedPrompt { text: rendered, steps }) = (prompt.token_ids()?, rendered);
        let mut leading = BodyPrefixHasher::new(layout.message_list());
        let mut known = Vec::with_capacity(resume_points.len());
        for (at, resume_point) in resume_points {
            let rest = &resume_point.cut.rest;
            if rest.len() > MAX_RETOKENIZED_BYTES || !rendered.ends_with(rest.as_str()) {
                continue;
            }
            let before = ids.strip_suffix(resume_point.cut.token_ids(step.text.tokenizer()).ok()?)?;
            let text = rendered.len() - rest.len();
            let depth = (text, *steps, before.len(), before);
            known.push(Arc::new(self.message_boundary(&mut leading, scan.messages[at].end, depth, resume_point)?));
        }
        let last = known.last()?;
        let mut leads = Vec::new();
        // A second pass over the body, because lead digests before the first boundary are needed, too.
        BodyPrefixHasher::new(layout.message_list()).push_lead_digests(&mut leads, last.body_bytes);
        let blocks = SharedBlockHashes::default().extended(0, &prompt.chain.ids[..last.tokens / self.block_size()]);
        Some(ConversationCheckpoint {
            scope: step.scope(tenant),
            lead_digests: leads,
            boundaries: known,
            blocks,
            header: frame,
            closings,
        })
    }

    fn block_size(&self) -> usize {
        usize::try_from(self.block().0).unwrap_or(usize::MAX)
    }

    /// Builds a boundary `tokens` deep; `ids` are the last ids before it.
    fn message_boundary(
        &self,
        leading: &mut BodyPrefixHasher<'_>,
        body: usize,
        (text, steps, tokens, ids): (usize, u64, usize, &[u32]),
        resume_point: ResumePoint,
    ) -> Option<MessageBoundary> {
        let tail = ids[ids.len().checked_sub(tokens % self.block_size())?..].into();
        let ResumePoint { following_turn: cut_in, cut, history: before, .. } = resume_point;
        let digest = leading.digest(body)?;
        Some(MessageBoundary {
            body_bytes: body,
            digest,
            text_bytes: text,
            template_steps: steps,
            tokens,
            tail,
            gap: cut.gap.clone(),
            cut_token: cut.cut_token,
            following_turn: cut_in,
            history: before,
        })
    }

    fn extend_from(
        &self,
        request: ExtendRequest<'_>,
        found: &CheckpointMatch<'_>,
        at: usize,
    ) -> Option<(ExtendedPrompt, Option<ConversationCheckpoint>)> {
        let (checkpoint, known) = (&*found.checkpoint, &found.checkpoint.boundaries[at]);
        let frame = &checkpoint.header;
        let list = request.layout.message_list();
        if list.len() - known.body_bytes > MAX_NEW_BYTES {
            return None;
        }
        let scan = MessageScan::from_offset(list, known.body_bytes, request.text.content_literals())?;
        if scan.messages.len() > MAX_NEW_MESSAGES {
            return None;
        }
        if !request.rendering.supports_late_system && scan.has_late_system(0) {
            return None;
        }
        let suffix = &list[scan.end..];
        if frame.day.is_some_and(|day| day != day_of(request.now)) {
            return None;
        }
        let turn = TurnContinuation::of(&scan.messages);
        if !request.rendering.is_cut_valid(known.following_turn, turn) {
            return None;
        }
        let new = &list[known.body_bytes..scan.end - 1];
        let cut = request.cut(frame, (&known.history, turn), new, suffix)?;
        if cut.gap != known.gap
            || cut.cut_token != known.cut_token
            || known.text_bytes + cut.rest.len() > request.text.max_rendered_bytes()
        {
            return None;
        }
        // The full rendering might exceed the step limit; only the full computation can tell.
        if known.template_steps + cut.template_steps > request.text.max_template_steps() {
            return None;
        }
        request.text.tokenizer().reject_endless_part(known.text_bytes, &cut.rest).ok()?;
        self.join(request, found, at, (&scan, &cut))
    }

    /// Joins the known part and the rest into one prompt and builds the checkpoint up to its end.
    fn join(
        &self,
        request: ExtendRequest<'_>,
        found: &CheckpointMatch<'_>,
        at: usize,
        (scan, cut): (&MessageScan, &RenderedTail),
    ) -> Option<(ExtendedPrompt, Option<ConversationCheckpoint>)> {
        let (checkpoint, known) = (&*found.checkpoint, &found.checkpoint.boundaries[at]);
        // No boundary lies after a message without text or after a tool call.
        let question = known.history.question.after(known.history.last_role);
        let mut closings = checkpoint.closings.clone();
        let resume_points = request.resume_points(&checkpoint.header, scan, (question, &mut closings));
        let resume_points: Vec<_> = resume_points
            .into_iter()
            .filter(|(_, resume_point)| cut.rest.ends_with(resume_point.cut.rest.as_str()))
            .collect();
        let size = self.block_size();
        let base = known.tokens / size;
        let mut ids = Vec::with_capacity(known.tail.len() + cut.rest.len() / MIN_BYTES_PER_TOKEN);
        ids.extend_from_slice(&known.tail);
        let mut next = Vec::with_capacity(at + 1 + resume_points.len());
        next.extend_from_slice(&checkpoint.boundaries[..=at]);
        let mut leading = found.hasher.clone();
        let (mut from, mut closing) = (0, None);
        for (message, resume_point) in resume_points {
            let to = cut.rest.len() - resume_point.rest_len;
            ids.extend(request.text.tokenizer().encode_part(&cut.rest[from..to]).ok()?);
            from = to;
            let (text, tokens) = (known.text_bytes + to, base * size + ids.len());
            let depth = (text, known.template_steps + cut.template_steps, tokens, &ids[..]);
            closing = Some(resume_point.cut.clone());
            push_boundary(
                &mut next,
                self.message_boundary(&mut leading, scan.messages[message].end, depth, resume_point)?,
            );
        }
        // The text after the last boundary is usually the one that followed the boundary before, already tokenized.
        ids.extend_from_slice(closing.as_deref().unwrap_or(cut).token_ids(request.text.tokenizer()).ok()?);
        let prompt = self.prompt_from(request.root, (&checkpoint.blocks, base), ids);
        let last = next.last().filter(|last| last.body_bytes > known.body_bytes);
        let next = last.map(|last| (last.body_bytes, last.tokens / size)).map(|(body, depth)| {
            let mut leads = checkpoint.lead_digests.clone();
            // Lead digests past the boundary belong to the body that diverged.
            leads.truncate(
                (0..)
                    .map_while(crate::conversation_checkpoint::lead_bytes)
                    .take_while(|lead| *lead <= known.body_bytes)
                    .count(),
            );
            let mut leading = found.hasher.clone();
            leading.push_lead_digests(&mut leads, body);
            let blocks = checkpoint.blocks.extended(base, &prompt.chain.ids[base..depth]);
            ConversationCheckpoint {
                scope: checkpoint.scope,
                lead_digests: leads,
                boundaries: next,
                blocks,
                header: checkpoint.header.clone(),
                closings,
            }
        });
        let grown = ExtendedPrompt { prompt, reused_tokens: Tokens(known.tokens as u64), tier: lookup_tier(found, at) };
        Some((grown, next))
    }

    /// Builds a prompt from its known first blocks and the ids after them.
    fn prompt_from(&self, root: PrefixId, (blocks, first): (&SharedBlockHashes, usize), mut ids: Vec<u32>) -> Prompt {
        let size = self.block_size();
        let mut names = blocks.first(first, ids.len() / size);
        let parent = names.last().copied().unwrap_or(root);
        let more = PrefixChain::over_tokens(parent, self.seed(), self.block(), &ids).ids;
        let tokens = Tokens((first * size + ids.len()) as u64);
        let tail = ids.split_off(more.len() * size);
        names.extend(more);
        let chain = PrefixChain { root, block: self.block(), ids: names, tokens };
        Prompt { content: PromptContent::Tail(tail), chain, identity: PromptIdentity::Exact, detail: None }
    }
}

impl ExtendRequest<'_> {
    /// Returns the checkpoint scope: a hash of the root, the settings that determine the prompt, and the tenant.
    fn scope(&self, tenant: &str) -> u128 {
        let mut hash = Xxh3::new();
        hash.update(&self.root.0.to_le_bytes());
        hash.update(&self.layout.settings_digest.to_le_bytes());
        hash.update(tenant.as_bytes());
        hash.digest128()
    }

    fn cut(
        &self,
        header: &ConversationSetup,
        (before, turn): (&HistorySummary, TurnContinuation),
        new: &[u8],
        suffix: &[u8],
    ) -> Option<RenderedTail> {
        let heads = self.rendering.system_prompt_form(turn, before)?;
        let head = self.layout.body_up_to(*header.head_ends.get(before.leading_roles.len())?)?;
        if heads == SystemPromptForm::Full && head.len() + new.len() + suffix.len() > MAX_NEW_BYTES {
            return None;
        }
        let shown = (heads, &header.variables, BodyEnvelope { head, suffix, call_order: self.layout.call_order });
        self.text.render_cut((before, new), shown, self.now).ok()?
    }

    /// Returns the boundaries in a scan from which the next step may resume, ascending, keyed by the message before
    /// each. `asked` is the question state before the scan.
    fn resume_points(
        &self,
        header: &ConversationSetup,
        scan: &MessageScan,
        (asked, closings): (message_scan::QuestionState, &mut Vec<(MessageRole, Arc<RenderedTail>)>),
    ) -> Vec<(usize, ResumePoint)> {
        let end = scan.messages.len().checked_sub(1);
        // A boundary before the last user message is needed if later steps may render the last turn differently or if
        // another conversation may share this beginning.
        let is_needed =
            self.rendering.kind != PrefixStability::AppendOnly || asked == message_scan::QuestionState::Never;
        let turn = scan.last_user().and_then(|user| user.checked_sub(1)).filter(|_| is_needed);
        let turns = turn.into_iter().chain(end.filter(|end| turn != Some(*end)));
        turns.filter_map(|at| Some((at, self.resume_point(header, scan, (at, asked), closings)?))).collect()
    }

    fn resume_point(
        &self,
        header: &ConversationSetup,
        scan: &MessageScan,
        (at, asked): (usize, message_scan::QuestionState),
        closings: &mut Vec<(MessageRole, Arc<RenderedTail>)>,
    ) -> Option<ResumePoint> {
        let message = scan.messages.get(at).filter(|message| message.is_plain)?;
        let is_end = at + 1 == scan.messages.len();
        // Templates may render an assistant message differently while it is last, and a turn without an answer as if
        // it continued.
        if is_end == (message.role == MessageRole::Assistant) && !message.role.is_system() {
            return None;
        }
        let leads = match message.role.is_system() {
            // Boundaries among the leading system messages exist only after the last of them.
            true if asked == message_scan::QuestionState::Never && at + 1 == header.leading_roles.len() => {
                &header.leading_roles[..at]
            }
            true => return None,
            false => &header.leading_roles,
        };
        let before = HistorySummary {
            leading_roles: leads.into(),
            question: scan.question_state(at, asked),
            last_role: message.role,
        };
        let cut_in = TurnContinuation::of(&scan.messages[at + 1..]);
        let seen = closings.iter().find(|(role, _)| is_end && *role == message.role).map(|(_, cut)| cut.clone());
        let cut = match seen {
            Some(cut) => cut,
            None => {
                let list = self.layout.message_list();
                let new = &list[message.end..scan.end - 1];
                let cut = Arc::new(self.cut(header, (&before, cut_in), new, &list[scan.end..])?);
                if is_end {
                    closings.push((message.role, cut.clone()));
                }
                cut
            }
        };
        Some(ResumePoint { rest_len: cut.rest.len(), following_turn: cut_in, cut, history: before })
    }
}

impl ConversationSetup {
    fn of(request: &ExtendRequest<'_>, chat: &ChatBody, scan: &MessageScan) -> Option<Self> {
        let variables = shorten_variables(chat.variables().ok()?)?;
        let leads = scan.leading_roles()?;
        let ends = scan.messages[..leads.len()].iter().map(|message| message.end);
        let bytes = variables.iter().map(|(name, value)| 96 + name.to_string().len() + value.to_string().len());
        Some(Self {
            head_ends: std::iter::once(scan.start).chain(ends).collect(),
            day: request.rendering.prints_date.then(|| day_of(request.now)),
            bytes: bytes.sum(),
            leading_roles: leads,
            variables,
        })
    }
}

fn lookup_tier(found: &CheckpointMatch<'_>, at: usize) -> LookupTier {
    if at == found.boundary { found.tier } else { LookupTier::Segment }
}

fn day_of(now: WallTime) -> i64 {
    now.unix_seconds.div_euclid(SECONDS_PER_DAY)
}

#[cfg(test)]
mod tests;
