//! Identify: which prompt is this, block by block, and whose conversation does the client say it is.
//!
//! Pure given a tokenizer: it reads the request, and what earlier steps have left of it.

use std::sync::Arc;

use prefix::{
    Asked, ChatForm, ChatLayout, Checkpoint, Converted, FallbackReason, Grown, Identified, Identity, Memory,
    PrefixError, Prompt, Rung, Trails, WallTime,
};
use vocabulary::{Chain, SessionId, Tokens};

use super::opening::opening;
use super::parse::Request;
use crate::catalog::Model;

/// A request whose prompt has a name.
#[derive(Debug)]
pub struct Prefixed {
    /// The request.
    pub request: Request,
    /// The model it is for, as far as it is known here.
    pub model: Arc<Model>,
    /// The prompt: the first one of a batch, whose session it is.
    pub prompt: Prompt,
    /// The other ones of a batch.
    pub others: Vec<Chain>,
    /// By what a conversation was recognised; none where its token ids are unknown, and for completions.
    pub rung: Option<Rung>,
    /// The time for templates that print it.
    pub now: WallTime,
    /// The session that the client names, if it names one.
    pub named: Option<SessionId>,
    /// What must be stable over a conversation's steps: the client's name for it, else how it began.
    pub pin: SessionId,
}

impl Prefixed {
    /// Why the prompt is known by its bytes only; none when by token ids.
    pub fn fallback(&self) -> Option<FallbackReason> {
        match self.prompt.identity {
            Identity::Exact => None,
            Identity::Fallback(reason) => Some(reason),
        }
    }

    /// Tokens that its engine must count in it, too; none where ours are estimated, or where its count may rightly be
    /// another one or says nothing of how the text was read here.
    pub fn countable(&self) -> Option<Tokens> {
        let is_certain = self.fallback().is_none() && self.request.is_counted_alike();
        is_certain.then(|| self.tokens())
    }

    /// The chains of all prompts.
    pub fn chains(&self) -> impl Iterator<Item = &Chain> {
        std::iter::once(&self.prompt.chain).chain(&self.others)
    }

    /// Tokens of all prompts.
    pub fn tokens(&self) -> Tokens {
        self.chains().map(|chain| chain.tokens).sum()
    }

    /// Tokens of the longest prompt.
    pub fn longest(&self) -> Tokens {
        self.chains().map(|chain| chain.tokens).max().unwrap_or_default()
    }
}

/// A prompt, and how it was come by.
#[derive(Debug)]
pub struct Found {
    prompt: Prompt,
    others: Vec<Chain>,
    rung: Option<Rung>,
    /// Tokens that were known before.
    pub known: Tokens,
    /// The checkpoint for the conversation's next step.
    pub next: Option<Checkpoint>,
}

/// A request that is to be identified.
#[derive(Debug)]
pub struct Unnamed {
    request: Request,
    model: Arc<Model>,
    now: WallTime,
    named: Option<SessionId>,
    /// What must be stable over a conversation's steps: the client's name for it, else how it began.
    pub pin: SessionId,
    /// What its engine makes of it, once that was asked for, where it comes in another endpoint's words.
    chat: Option<Result<Converted, PrefixError>>,
}

/// What is left of a request that was identified.
#[derive(Debug)]
pub struct Named {
    /// The request with its prompt's name.
    pub prefixed: Prefixed,
    /// Tokens that were known before.
    pub known: Tokens,
    /// The checkpoint for the conversation's next step.
    pub next: Option<Checkpoint>,
    /// What its engine makes of it, where it came in another endpoint's words.
    pub chat: Option<Converted>,
}

impl Unnamed {
    /// A request for this model.
    pub fn new(request: Request, model: Arc<Model>) -> Self {
        let key = request.session_key.as_ref();
        let named = key.map(|key| SessionId::of_key(&request.incoming.tenant, &request.model, &key.name));
        let pin = named.unwrap_or_else(|| opening(&request));
        Self { now: wall_time(), named, pin, request, model, chat: None }
    }

    /// Whether it comes in another endpoint's words than a chat.
    pub fn is_foreign(&self) -> bool {
        self.request.endpoint.form().is_some_and(|form| form != ChatForm::Chat)
    }

    /// With what its engine makes of it: as long as reading all of it takes, and done once.
    pub fn converted(self) -> Self {
        let body = &self.request.incoming.body;
        let chat = self.request.endpoint.form().and_then(|form| self.model.identifier.converted(form, body));
        Self { chat, ..self }
    }

    /// The request.
    pub fn request(&self) -> &Request {
        &self.request
    }

    fn asked(&self) -> Asked<'_> {
        Asked { keys: self.model.keys(self.request.cache_salt()), now: self.now }
    }

    fn layout(&self) -> Option<ChatLayout<'_>> {
        match self.request.endpoint.form()? {
            ChatForm::Chat => {
                let fields = self.request.body.fields();
                ChatLayout::new(fields.body(), fields.all())
            }
            ChatForm::Messages | ChatForm::Responses => self.chat.as_ref()?.as_ref().ok().map(Converted::layout),
        }
    }

    fn memory<'a>(&'a self, trails: &'a Trails) -> Option<Memory<'a>> {
        let tenant = &self.request.incoming.tenant.0;
        let session = self.named.map(|session| session.0);
        let is_wanted = trails.has_room() && !self.model.is_distrusted();
        is_wanted.then_some(Memory { trails, tenant, session })
    }

    /// The prompt at the cost of what is new in it; none where it must be computed as a whole.
    pub fn grown(&self, trails: &Trails) -> Option<Found> {
        let memory = self.memory(trails)?;
        let Grown { prompt, known, rung } = self.model.identifier.grow(self.layout()?, self.asked(), memory)?;
        Some(Found { prompt, others: Vec::new(), rung: Some(rung), known, next: None })
    }

    /// The prompt, computed as a whole as far as its checkpoint does not know it.
    pub fn whole(&self, trails: &Trails, known: Option<&Checkpoint>) -> Found {
        let (identifier, body, asked) = (&self.model.identifier, &self.request.incoming.body, self.asked());
        let remembered = self.memory(trails).and_then(|memory| Some((self.layout()?, memory)));
        let Identified { prompt, known, next } = match (self.request.endpoint.form(), &self.chat, remembered) {
            (Some(_), Some(Err(error)), _) => identifier.refused(body, error, asked),
            (Some(_), _, Some((layout, memory))) => identifier.begin(layout, asked, known, memory),
            (Some(_), Some(Ok(converted)), None) => identifier.converted_conversation(converted, (asked, known)),
            (Some(form), None, None) => identifier.conversation(form, body, (asked, known)),
            (None, ..) => {
                let mut batch = identifier.completion(body, asked);
                let others = batch.drain(1..).map(|prompt| prompt.chain).collect();
                return Found { prompt: batch.remove(0), others, rung: None, known: Tokens::ZERO, next: None };
            }
        };
        let rung = if known == Tokens::ZERO { Rung::Cold } else { Rung::Checkpoint };
        let rung = (prompt.identity == Identity::Exact).then_some(rung);
        Found { prompt, others: Vec::new(), rung, known, next }
    }

    /// The request with its prompt's name.
    pub fn named(self, found: Found) -> Named {
        let Found { prompt, others, rung, known, next } = found;
        let Self { request, model, now, named, pin, chat } = self;
        let prefixed = Prefixed { request, model, prompt, others, rung, now, named, pin };
        Named { prefixed, known, next, chat: chat.and_then(Result::ok) }
    }
}

/// For templates that print the date: engines take their own clock, in UTC as ours.
fn wall_time() -> WallTime {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    WallTime { unix_seconds: now.as_secs() as i64 }
}
