//! Identify: which prompt is this, block by block, and whose conversation does the client say it is.
//!
//! Pure given a tokenizer: it reads the request and nothing else.

use prefix::{Asked, FallbackReason, Identity, Prompt, WallTime};
use vocabulary::{RootKeys, SessionId};

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

/// Names the prompt and the session.
pub fn identify(request: Request, model: std::sync::Arc<Model>) -> Prefixed {
    let named =
        request.session_key.as_ref().map(|key| SessionId::of_key(&request.incoming.tenant, &request.model, &key.name));
    let keys = RootKeys { adapter: None, salt: request.cache_salt(), content: None };
    let asked = Asked { keys, now: wall_time() };
    let body = &request.incoming.body;
    let prompt = match request.endpoint {
        Endpoint::ChatCompletions => model.identifier.chat(body, asked),
        Endpoint::Completions => {
            let mut batch = model.identifier.completion(body, asked);
            batch.swap_remove(0)
        }
    };
    Prefixed { request, model, prompt, named }
}

/// For templates that print the date: engines take their own clock, in UTC as ours.
fn wall_time() -> WallTime {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    WallTime { unix_seconds: now.as_secs() as i64 }
}
