//! Identify: which prompt is this, block by block, and whose conversation does the client say it is.
//!
//! Pure given a tokenizer: it reads the request and nothing else.

use prefix::{Asked, Checkpoint, FallbackReason, Identified, Identity, Prompt, WallTime};
use vocabulary::{RootKeys, SessionId, Tokens};

use super::opening::opening;
use super::parse::Request;
use crate::catalog::Model;
use crate::incoming::Endpoint;

/// A request whose prompt has a name.
#[derive(Debug)]
pub struct Prefixed {
    /// The request.
    pub request: Request,
    /// The model it is for, as far as it is known here.
    pub model: std::sync::Arc<Model>,
    /// The prompt: the first one of a batch.
    pub prompt: Prompt,
    /// The session that the client names, if it names one.
    pub named: Option<SessionId>,
    /// What must be stable over a conversation's steps: the client's name for it, else how it began.
    pub pin: SessionId,
}

/// What the conversation's next step can start from.
#[derive(Debug, Default)]
pub struct Found {
    /// Tokens that the checkpoint knew.
    pub known: Tokens,
    /// The next checkpoint.
    pub next: Option<Checkpoint>,
}

impl Prefixed {
    /// Why the prompt is known by its bytes only; none when by token ids.
    pub fn fallback(&self) -> Option<FallbackReason> {
        match self.prompt.identity {
            Identity::Exact => None,
            Identity::Fallback(reason) => Some(reason),
        }
    }
}

/// What must be stable over a conversation's steps.
pub fn pin(request: &Request) -> SessionId {
    named(request).unwrap_or_else(|| opening(request))
}

fn named(request: &Request) -> Option<SessionId> {
    let key = request.session_key.as_ref()?;
    Some(SessionId::of_key(&request.incoming.tenant, &request.model, &key.name))
}

/// Names the prompt and the session, as far as possible from the conversation's checkpoint.
pub fn identify(
    request: Request,
    model: std::sync::Arc<Model>,
    (pin, known): (SessionId, Option<Checkpoint>),
) -> (Prefixed, Found) {
    let named = named(&request);
    let keys = RootKeys { adapter: None, salt: request.cache_salt(), content: None };
    let asked = Asked { keys, now: wall_time() };
    let body = &request.incoming.body;
    let (prompt, found) = match request.endpoint {
        Endpoint::ChatCompletions => {
            let Identified { prompt, known, next } = model.identifier.chat_from(body, asked, known.as_ref());
            (prompt, Found { known, next })
        }
        Endpoint::Completions => {
            let mut batch = model.identifier.completion(body, asked);
            (batch.swap_remove(0), Found::default())
        }
    };
    (Prefixed { request, model, prompt, named, pin }, found)
}

/// For templates that print the date: engines take their own clock, in UTC as ours.
fn wall_time() -> WallTime {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    WallTime { unix_seconds: now.as_secs() as i64 }
}
