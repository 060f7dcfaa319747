//! The newest prompts whose token ids are known, one a session: with them a sealed prefix can be moved when no client
//! is asking for it. What falls out is only not movable by hand until its session's next step.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use ownership::ledger::Point;
use parking_lot::Mutex;
use vocabulary::{Blocks, Chain, ModelId, SessionId, TenantId};

use super::plan::Classified;
use super::token_ids::TokenIds;

/// Bytes of token ids and block names that are kept.
const BOUND: usize = 128 << 20;

/// A prompt by its token ids.
#[derive(Debug)]
pub struct Kept {
    /// Whose.
    pub tenant: TenantId,
    /// Under which name it was sent.
    pub model: ModelId,
    /// Its blocks.
    pub chain: Chain,
    /// What the engines see.
    pub tokens: TokenIds,
    /// The cache salt that it carries.
    pub salt: Option<String>,
}

impl Kept {
    /// The prompt of a step that is over; none when its tokens are not known. Leaves the step without them.
    pub fn of(step: &mut Classified) -> Option<Self> {
        let prefixed = &mut step.located.prefixed;
        let salt = prefixed.request.cache_salt().map(str::to_owned);
        let tokens = TokenIds::take(prefixed)?;
        let ids = std::mem::take(&mut prefixed.prompt.chain.ids);
        Some(Self {
            tenant: prefixed.request.incoming.tenant.clone(),
            model: prefixed.request.model.clone(),
            chain: Chain { ids, ..prefixed.prompt.chain },
            tokens,
            salt,
        })
    }

    /// The ids of its first blocks; none where it is shorter or cannot be encoded again. May take milliseconds.
    pub fn first(&self, blocks: Blocks) -> Option<Vec<u32>> {
        let length = usize::try_from(blocks.tokens(self.chain.block).0).ok()?;
        Some(self.tokens.read(&self.chain)?.get(..length)?.to_vec())
    }

    fn size(&self) -> usize {
        self.tokens.size() + size_of_val(&*self.chain.ids) + 256
    }
}

/// The prompts that are kept, the oldest going first.
#[derive(Debug, Default)]
pub struct Prompts(Mutex<Shelf>);

#[derive(Debug, Default)]
struct Shelf {
    by_session: HashMap<SessionId, (u64, Arc<Kept>)>,
    by_age: BTreeMap<u64, SessionId>,
    next: u64,
    bytes: usize,
}

impl Shelf {
    fn remove(&mut self, session: SessionId) {
        if let Some((age, kept)) = self.by_session.remove(&session) {
            self.by_age.remove(&age);
            self.bytes -= kept.size();
        }
    }
}

impl Prompts {
    /// Keeps a session's newest prompt in place of its last one.
    pub fn keep(&self, session: SessionId, kept: Kept) {
        let size = kept.size();
        let mut shelf = self.0.lock();
        shelf.remove(session);
        while shelf.bytes + size > BOUND
            && let Some((_, oldest)) = shelf.by_age.first_key_value()
        {
            let oldest = *oldest;
            shelf.remove(oldest);
        }
        if size <= BOUND {
            let age = shelf.next;
            shelf.next += 1;
            shelf.bytes += size;
            shelf.by_age.insert(age, session);
            shelf.by_session.insert(session, (age, Arc::new(kept)));
        }
    }

    /// A prompt of this tenant that goes through `point`; the newest of them.
    pub fn through(&self, tenant: &TenantId, point: Point) -> Option<Arc<Kept>> {
        let shelf = self.0.lock();
        let goes = |kept: &&Arc<Kept>| kept.tenant == *tenant && point.is_on(&kept.chain);
        let newest_first = shelf.by_age.values().rev().filter_map(|session| shelf.by_session.get(session));
        newest_first.map(|(_, kept)| kept).find(goes).cloned()
    }
}

#[cfg(test)]
mod tests {
    use vocabulary::{PrefixId, Seed, Tokens};

    use super::*;

    fn kept(tenant: &str, tokens: u32, first: u32) -> Kept {
        let tokens: Vec<u32> = (first..first + tokens).collect();
        let chain = Chain::over_tokens(PrefixId(1), Seed(0), Tokens(16), &tokens);
        let tokens = TokenIds::Here(tokens);
        Kept { tenant: TenantId(tenant.into()), model: ModelId::from("m"), chain, tokens, salt: None }
    }

    #[test]
    fn a_prompt_is_found_by_any_prefix_of_it_and_only_by_its_tenant() {
        let prompts = Prompts::default();
        prompts.keep(SessionId(1), kept("a", 64, 0));
        let point = Point::on(&kept("a", 64, 0).chain, Blocks(2)).unwrap();
        assert_eq!(prompts.through(&TenantId("a".into()), point).unwrap().tokens.size(), 256);
        assert!(prompts.through(&TenantId("b".into()), point).is_none());
        prompts.keep(SessionId(1), kept("a", 64, 500));
        assert!(prompts.through(&TenantId("a".into()), point).is_none(), "a session's newest prompt takes its place");
    }

    #[test]
    fn the_oldest_go_when_there_are_too_many_bytes() {
        let prompts = Prompts::default();
        let size = kept("a", 1 << 20, 0).size();
        let fit = BOUND / size;
        for n in 0..=fit {
            prompts.keep(SessionId(n as u128), kept("a", 1 << 20, n as u32));
        }
        let shelf = prompts.0.lock();
        assert_eq!((shelf.by_session.len(), shelf.by_age.len(), shelf.bytes), (fit, fit, fit * size));
        assert!(!shelf.by_session.contains_key(&SessionId(0)));
    }
}
