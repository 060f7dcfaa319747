//! Token checkpoints of conversations: what one step has tokenized, the next one need not, whichever router it reaches.
//!
//! They only ever save work. One that is missing, late or of another text is not used, and the ids are the same.

use std::sync::Arc;

use prefix::Checkpoint;
use vocabulary::{SessionId, TenantId, Tokens};

use crate::pipeline::identify::Prefixed;
use crate::soft_state::{Key, Kind, SoftState};

/// Bodies below this are tokenized anew. Measured: the tokenizer, which remembers words itself, takes 0.05 ms for 32 KB
/// that it has seen, as long as reading a checkpoint does, and 0.2 ms for 128 KB, which is three times as long.
const SHORTEST: usize = 128 << 10;
/// Bodies from this on are worth a question to Redis. Measured: text that this router has not seen takes 0.7 ms at 128 KB
/// and 3 ms or more at 512 KB; to fetch and read its ids takes about 1 ms.
const WORTH_ASKING: usize = 256 << 10;
/// Redis is told of a conversation whenever it has grown by this factor.
const GROWTH: f64 = 1.25;

/// The checkpoints of all conversations.
#[derive(Debug)]
pub struct Checkpoints {
    state: Arc<SoftState>,
}

impl Checkpoints {
    /// Kept in `state`.
    pub fn new(state: Arc<SoftState>) -> Self {
        Self { state }
    }

    /// What is known of the conversation that a body of this size goes on with.
    pub async fn known(&self, tenant: &TenantId, pin: SessionId, body_bytes: usize) -> Option<Checkpoint> {
        if body_bytes < SHORTEST {
            return None;
        }
        let key = key(tenant, pin);
        let stored = match body_bytes < WORTH_ASKING {
            true => self.state.near(&key),
            false => self.state.get(&key).await,
        };
        Checkpoint::from_bytes(&stored?)
    }

    /// Whether other routers should be told of a step whose tokens were known from the one before: they would otherwise
    /// encode the conversation from where it was computed as a whole last.
    pub fn wants(&self, prefixed: &Prefixed, known: Tokens) -> bool {
        let is_long = prefixed.request.incoming.body.len() >= WORTH_ASKING;
        is_long && self.state.standing().is_some() && size(prefixed.prompt.chain.tokens) > size(known)
    }

    /// Keeps what was found out. Never waits.
    pub fn keep(&self, tenant: &TenantId, pin: SessionId, tokenized: Tokenized) {
        let Tokenized { known, next, body_bytes } = tokenized;
        let next = next.filter(|next| body_bytes >= SHORTEST && next.tokens() > known);
        let Some((tokens, bytes)) = next.and_then(|next| Some((next.tokens(), next.to_bytes()?))) else { return };
        if body_bytes >= WORTH_ASKING && size(tokens) > size(known) {
            self.state.put(key(tenant, pin), bytes.into());
        } else {
            self.state.put_near(key(tenant, pin), bytes.into());
        }
    }
}

/// What a step has found out.
#[derive(Debug)]
pub struct Tokenized {
    /// Tokens that were known before.
    pub known: Tokens,
    /// The next checkpoint.
    pub next: Option<Checkpoint>,
    /// Bytes of the body.
    pub body_bytes: usize,
}

fn key(tenant: &TenantId, pin: SessionId) -> Key {
    Key::new(Kind::Checkpoint, tenant, &pin.to_string())
}

/// How often `GROWTH` goes into it.
fn size(tokens: Tokens) -> u32 {
    (tokens.0.max(1) as f64).log(GROWTH) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_conversation_is_told_to_redis_a_few_times_and_not_at_each_step() {
        let steps = (1..1000u64).map(|step| Tokens(1000 * step));
        let mut last = Tokens(0);
        let told = steps.filter(|step| size(*step) > size(std::mem::replace(&mut last, *step)));
        assert!((20..45).contains(&told.count()));
    }
}
