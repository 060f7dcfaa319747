//! Identifying a conversation's next step at the cost of what is new in it.
//!
//! That the old part of the body is unchanged is proven by one digest. Only the new messages are read, rendered,
//! tokenized and hashed. Whatever is odd is left to the whole way; the prompt is the same either way.

use std::sync::Arc;

use vocabulary::{Chain, PrefixId, Tokens};
use xxhash_rust::xxh3::Xxh3;

use crate::model_text::Rendered;
use crate::pieces::Pieces;
use crate::scan::{self, Role, Scan};
use crate::trail::{Frame, Known, Leading, Trail, push_known};
use crate::trails::Found;
use crate::window::{Around, Before, Cut, Heads, SECONDS_A_DAY, Turn, Windowing, short};
use crate::{
    Asked, ChatBody, ChatLayout, Checkpoint, Content, Identified, Identifier, Identity, ModelText, PrefixError, Prompt,
    Rung, TemplateKind, Tokenized, Trails, WallTime,
};

/// Places of a trail that are tried, from the deepest.
const MOST_TRIED: usize = 4;
/// Bytes of text that are tokenized twice, at most, to find a place in a prompt that was tokenized as a whole.
const MOST_AGAIN: usize = 64 << 10;
/// Bytes of a body that are rendered, at most; more of it is work for a thread that may block.
const MOST_NEW: usize = 256 << 10;
/// Of most texts that are tokenized, at least.
const BYTES_A_TOKEN: usize = 3;

/// Where conversations are remembered, and whose this one is.
#[derive(Clone, Copy, Debug)]
pub struct Memory<'a> {
    /// All that is remembered.
    pub trails: &'a Trails,
    /// Conversations of other tenants are not seen.
    pub tenant: &'a str,
    /// The client's name for the conversation.
    pub session: Option<u128>,
}

/// A prompt of a conversation that was known.
#[derive(Debug)]
pub struct Grown {
    /// The prompt. Its content is what follows the last whole block.
    pub prompt: Prompt,
    /// Tokens that were known.
    pub known: Tokens,
    /// By what it was recognised.
    pub rung: Rung,
}

/// A request, on its way along a trail.
#[derive(Clone, Copy)]
struct Step<'a> {
    text: &'a ModelText,
    windowing: &'a Windowing,
    layout: ChatLayout<'a>,
    root: PrefixId,
    now: WallTime,
}

/// A place found in a prompt: where the text goes on after it, and what is known of it.
struct Spot {
    after: usize,
    cut_in: Turn,
    cut: Arc<Cut>,
    before: Before,
}

impl Identifier {
    /// Identifies the next step of a conversation that is remembered. None where it must be computed as a whole.
    pub fn grow(&self, layout: ChatLayout<'_>, asked: Asked<'_>, memory: Memory<'_>) -> Option<Grown> {
        let step = self.step(layout, asked)?;
        let found = memory.trails.find(step.scope(memory.tenant), memory.session, layout.list())?;
        let places = (0..=found.known).rev().take(MOST_TRIED);
        let (at, grown, next) = places.into_iter().find_map(|at| {
            let (grown, next) = self.grow_from(step, &found, at)?;
            Some((at, grown, next))
        })?;
        if let Some(next) = next {
            let is_end = at + 1 == found.trail.known.len();
            let replaced = is_end.then_some(&found);
            memory.trails.put(memory.tenant, Arc::new(next), (memory.session, replaced));
        }
        Some(grown)
    }

    /// Identifies a chat request by its whole body and remembers the conversation.
    pub fn begin(
        &self,
        layout: ChatLayout<'_>,
        asked: Asked<'_>,
        known: Option<&Checkpoint>,
        memory: Memory<'_>,
    ) -> Identified {
        let computed = self.rendered(layout, asked.now).and_then(|(chat, rendered)| {
            let tokenized = self.model_text()?.encode_rendered(&rendered.text, &chat, known)?;
            Ok((chat, rendered, tokenized))
        });
        match computed {
            Ok((chat, rendered, Tokenized { ids, known, next })) => {
                let prompt = self.exact(ids, asked.keys);
                if let Some(trail) = self.trail(layout, asked, (&chat, &rendered, &prompt), memory.tenant) {
                    memory.trails.put(memory.tenant, Arc::new(trail), (memory.session, None));
                }
                Identified { prompt, known, next }
            }
            Err(error) => {
                let prompt = self.fallback(layout.body, &error, asked.keys);
                Identified { prompt, known: Tokens::ZERO, next: None }
            }
        }
    }

    /// Forgets what is remembered of the conversation that a request goes on with, and perhaps of some that began like it.
    pub fn forget(&self, layout: ChatLayout<'_>, asked: Asked<'_>, memory: Memory<'_>) {
        let Some(step) = self.step(layout, asked) else { return };
        let scope = step.scope(memory.tenant);
        for _ in 0..MOST_TRIED {
            let Some(found) = memory.trails.find(scope, memory.session, layout.list()) else { break };
            memory.trails.remove(&found);
        }
    }

    fn rendered(&self, layout: ChatLayout<'_>, now: WallTime) -> Result<(ChatBody, Rendered), PrefixError> {
        let text = self.model_text()?;
        let chat = ChatBody::parse(layout.body)?.with_call_order(layout.order);
        let rendered = text.rendered(&chat, now)?;
        Ok((chat, rendered))
    }

    fn step<'a>(&'a self, layout: ChatLayout<'a>, asked: Asked<'_>) -> Option<Step<'a>> {
        let text = self.text()?;
        let windowing = text.windowing().filter(|windowing| windowing.shows(layout.order))?;
        Some(Step { text, windowing, layout, root: self.root(asked.keys), now: asked.now })
    }

    /// The trail that a prompt computed as a whole leaves.
    fn trail(
        &self,
        layout: ChatLayout<'_>,
        asked: Asked<'_>,
        (chat, rendered, prompt): (&ChatBody, &Rendered, &Prompt),
        tenant: &str,
    ) -> Option<Trail> {
        let step =
            self.step(layout, asked).filter(|_| !chat.continues_final_message() && !chat.adds_special_tokens())?;
        let scan = Scan::from(layout.list(), 0, step.text.heeds())?;
        let frame = Arc::new(Frame::of(&step, chat, &scan)?);
        if !step.windowing.late_system && scan.has_late_system(frame.leads.len()) {
            return None;
        }
        // What the template is told may be what it asks of the time.
        let is_told = step.windowing.dated && chat.has_template_arguments();
        if is_told && !step.text.is_of_the_day(chat, (step.now, &rendered.text)) {
            return None;
        }
        let mut closings = Vec::new();
        let places = step.places(&frame, &scan, (scan::Asked::Never, &mut closings));
        let (ids, Rendered { text: rendered, steps }) = (prompt.tokens()?, rendered);
        let mut leading = Leading::new(layout.list());
        let mut known = Vec::with_capacity(places.len());
        for (at, place) in places {
            let rest = &place.cut.rest;
            if rest.len() > MOST_AGAIN || !rendered.ends_with(rest.as_str()) {
                continue;
            }
            let before = ids.strip_suffix(place.cut.ids(step.text.tokenizer()).ok()?)?;
            let text = rendered.len() - rest.len();
            let depth = (text, *steps, before.len(), before);
            known.push(Arc::new(self.known(&mut leading, scan.messages[at].end, depth, place)?));
        }
        let last = known.last()?;
        let mut leads = Vec::new();
        // Below the first place too: the digests are taken in one more pass, over a body that was read several times.
        Leading::new(layout.list()).leads(&mut leads, last.body);
        let blocks = Pieces::default().extended(0, &prompt.chain.ids[..last.tokens / self.block_size()]);
        Some(Trail { scope: step.scope(tenant), leads, known, blocks, frame, closings })
    }

    fn block_size(&self) -> usize {
        usize::try_from(self.block().0).unwrap_or(usize::MAX)
    }

    /// A place, `tokens` deep; `ids` are the last ones before it.
    fn known(
        &self,
        leading: &mut Leading<'_>,
        body: usize,
        (text, steps, tokens, ids): (usize, u64, usize, &[u32]),
        place: Spot,
    ) -> Option<Known> {
        let tail = ids[ids.len().checked_sub(tokens % self.block_size())?..].into();
        let Spot { cut_in, cut, before, .. } = place;
        let digest = leading.digest(body)?;
        Some(Known { body, digest, text, steps, tokens, tail, gap: cut.gap.clone(), token: cut.token, cut_in, before })
    }

    fn grow_from(&self, step: Step<'_>, found: &Found<'_>, at: usize) -> Option<(Grown, Option<Trail>)> {
        let (trail, known) = (&*found.trail, &found.trail.known[at]);
        let frame = &trail.frame;
        let list = step.layout.list();
        if list.len() - known.body > MOST_NEW {
            return None;
        }
        let scan = Scan::from(list, known.body, step.text.heeds())?;
        if !step.windowing.late_system && scan.has_late_system(0) {
            return None;
        }
        let suffix = &list[scan.end..];
        if frame.day.is_some_and(|day| day != day_of(step.now)) {
            return None;
        }
        let turn = Turn::of(&scan.messages);
        if !step.windowing.holds(known.cut_in, turn) {
            return None;
        }
        let new = &list[known.body..scan.end - 1];
        let cut = step.cut(frame, (&known.before, turn), new, suffix)?;
        if cut.gap != known.gap || cut.token != known.token || known.text + cut.rest.len() > step.text.longest() {
            return None;
        }
        // The whole may take more steps than it may: the whole way finds out.
        if known.steps + cut.steps > step.text.most_steps() {
            return None;
        }
        step.text.tokenizer().refuse_endless_part(known.text, &cut.rest).ok()?;
        self.joined(step, found, at, (&scan, &cut))
    }

    /// The known part and the rest, as one prompt, and the trail that goes on to its end.
    fn joined(
        &self,
        step: Step<'_>,
        found: &Found<'_>,
        at: usize,
        (scan, cut): (&Scan, &Cut),
    ) -> Option<(Grown, Option<Trail>)> {
        let (trail, known) = (&*found.trail, &found.trail.known[at]);
        // A place after a message without text is none, and one after a call neither.
        let asked = known.before.asked.then(known.before.last);
        let mut closings = trail.closings.clone();
        let places = step.places(&trail.frame, scan, (asked, &mut closings));
        let places: Vec<_> =
            places.into_iter().filter(|(_, place)| cut.rest.ends_with(place.cut.rest.as_str())).collect();
        let size = self.block_size();
        let base = known.tokens / size;
        let mut ids = Vec::with_capacity(known.tail.len() + cut.rest.len() / BYTES_A_TOKEN);
        ids.extend_from_slice(&known.tail);
        let mut next = Vec::with_capacity(at + 1 + places.len());
        next.extend_from_slice(&trail.known[..=at]);
        let mut leading = found.leading.clone();
        let (mut from, mut closing) = (0, None);
        for (message, place) in places {
            let to = cut.rest.len() - place.after;
            ids.extend(step.text.tokenizer().encode_part(&cut.rest[from..to]).ok()?);
            from = to;
            let (text, tokens) = (known.text + to, base * size + ids.len());
            let depth = (text, known.steps + cut.steps, tokens, &ids[..]);
            closing = Some(place.cut.clone());
            push_known(&mut next, self.known(&mut leading, scan.messages[message].end, depth, place)?);
        }
        // What follows the last place is mostly what followed the one before.
        ids.extend_from_slice(closing.as_deref().unwrap_or(cut).ids(step.text.tokenizer()).ok()?);
        let prompt = self.prompt_from(step.root, (&trail.blocks, base), ids);
        let last = next.last().filter(|last| last.body > known.body);
        let next = last.map(|last| (last.body, last.tokens / size)).map(|(body, depth)| {
            let mut leads = trail.leads.clone();
            // Those past the place are of the body that went another way.
            leads.truncate((0..).map_while(crate::trail::lead).take_while(|lead| *lead <= known.body).count());
            let mut leading = found.leading.clone();
            leading.leads(&mut leads, body);
            let blocks = trail.blocks.extended(base, &prompt.chain.ids[base..depth]);
            Trail { scope: trail.scope, leads, known: next, blocks, frame: trail.frame.clone(), closings }
        });
        let grown = Grown { prompt, known: Tokens(known.tokens as u64), rung: rung(found, at) };
        Some((grown, next))
    }

    /// A prompt whose first blocks are known, and the ids after them.
    fn prompt_from(&self, root: PrefixId, (blocks, first): (&Pieces, usize), mut ids: Vec<u32>) -> Prompt {
        let size = self.block_size();
        let mut names = blocks.first(first, ids.len() / size);
        let parent = names.last().copied().unwrap_or(root);
        let more = Chain::over_tokens(parent, self.seed(), self.block(), &ids).ids;
        let tokens = Tokens((first * size + ids.len()) as u64);
        let tail = ids.split_off(more.len() * size);
        names.extend(more);
        let chain = Chain { root, block: self.block(), ids: names, tokens };
        Prompt { content: Content::Tail(tail), chain, identity: Identity::Exact, detail: None }
    }
}

impl Step<'_> {
    /// Whose a trail is: the tenant's, and of prompts with this root, this head and these settings.
    fn scope(&self, tenant: &str) -> u128 {
        let mut hash = Xxh3::new();
        hash.update(&self.root.0.to_le_bytes());
        hash.update(&self.layout.others.to_le_bytes());
        hash.update(tenant.as_bytes());
        hash.digest128()
    }

    fn cut(&self, frame: &Frame, (before, turn): (&Before, Turn), new: &[u8], suffix: &[u8]) -> Option<Cut> {
        let heads = self.windowing.heads(turn, before)?;
        let head = self.layout.head(*frame.head_ends.get(before.leads.len())?)?;
        if heads == Heads::Real && head.len() + new.len() + suffix.len() > MOST_NEW {
            return None;
        }
        let shown = (heads, &frame.variables, Around { head, suffix, order: self.layout.order });
        self.text.cut((before, new), shown, self.now).ok()?
    }

    /// The places among the messages of a scan from which the next step may go on, ascending, by the message that they
    /// come after. `asked`: what happened before the scan.
    fn places(
        &self,
        frame: &Frame,
        scan: &Scan,
        (asked, closings): (scan::Asked, &mut Vec<(Role, Arc<Cut>)>),
    ) -> Vec<(usize, Spot)> {
        let end = scan.messages.len().checked_sub(1);
        // Where later steps may see the turns before it in another light, or another conversation begins alike.
        let is_needed = self.windowing.kind != TemplateKind::AppendOnly || asked == scan::Asked::Never;
        let turn = scan.last_user().and_then(|user| user.checked_sub(1)).filter(|_| is_needed);
        let wanted = turn.into_iter().chain(end.filter(|end| turn != Some(*end)));
        wanted.filter_map(|at| Some((at, self.place(frame, scan, (at, asked), closings)?))).collect()
    }

    fn place(
        &self,
        frame: &Frame,
        scan: &Scan,
        (at, asked): (usize, scan::Asked),
        closings: &mut Vec<(Role, Arc<Cut>)>,
    ) -> Option<Spot> {
        let message = scan.messages.get(at).filter(|message| message.plain)?;
        let is_end = at + 1 == scan.messages.len();
        // Templates may write an answer differently while it is the last message, and a turn without one as if it went on.
        if is_end == (message.role == Role::Assistant) && !message.role.leads() {
            return None;
        }
        let leads = match message.role.leads() {
            // Only in front, and only the last of them.
            true if asked == scan::Asked::Never && at + 1 == frame.leads.len() => &frame.leads[..at],
            true => return None,
            false => &frame.leads,
        };
        let before = Before { leads: leads.into(), asked: scan.asked(at, asked), last: message.role };
        let cut_in = Turn::of(&scan.messages[at + 1..]);
        let seen = closings.iter().find(|(role, _)| is_end && *role == message.role).map(|(_, cut)| cut.clone());
        let cut = match seen {
            Some(cut) => cut,
            None => {
                let list = self.layout.list();
                let new = &list[message.end..scan.end - 1];
                let cut = Arc::new(self.cut(frame, (&before, cut_in), new, &list[scan.end..])?);
                if is_end {
                    closings.push((message.role, cut.clone()));
                }
                cut
            }
        };
        Some(Spot { after: cut.rest.len(), cut_in, cut, before })
    }
}

impl Frame {
    fn of(step: &Step<'_>, chat: &ChatBody, scan: &Scan) -> Option<Self> {
        let variables = short(chat.variables().ok()?)?;
        let leads = scan.leads()?;
        let ends = scan.messages[..leads.len()].iter().map(|message| message.end);
        let bytes = variables.iter().map(|(name, value)| 96 + name.to_string().len() + value.to_string().len());
        Some(Self {
            head_ends: std::iter::once(scan.start).chain(ends).collect(),
            day: step.windowing.dated.then(|| day_of(step.now)),
            bytes: bytes.sum(),
            leads,
            variables,
        })
    }
}

fn rung(found: &Found<'_>, at: usize) -> Rung {
    if at == found.known { found.rung } else { Rung::Segment }
}

fn day_of(now: WallTime) -> i64 {
    now.unix_seconds.div_euclid(SECONDS_A_DAY)
}

#[cfg(test)]
mod tests;
