//! Retained prompts: each session's newest prompt whose token ids are known, with a byte share per tenant. It allows
//! moving a sealed prefix when no client is asking for it. An evicted prompt cannot be moved by an operator until its
//! session's next step.

use std::sync::Arc;

use ownership::ledger::PrefixPoint;
use parking_lot::Mutex;
use prefix::FairLru;
use tokio::sync::Semaphore;
use tokio::task::spawn_blocking;
use vocabulary::{Blocks, ModelId, PrefixChain, SessionId, TenantId};

use crate::request_states::ClassifiedStep;
use crate::token_ids::LazyTokenIds;

/// Limit for the bytes of stored token ids and block hashes.
const MAX_BYTES: usize = 128 << 20;
/// Prompts encoded again at once: each costs milliseconds of a core and some megabytes.
const MAX_CONCURRENT_ENCODINGS: usize = 2;
/// Limit of running and queued encodings; further prompts are not encoded.
const MAX_QUEUED_ENCODINGS: usize = 64;

/// A prompt that is retained with its token ids after its step.
#[derive(Debug)]
pub struct RetainedPrompt {
    /// The tenant that sent it.
    pub tenant: TenantId,
    /// The model name that it was sent to.
    pub model: ModelId,
    /// Its block hashes.
    pub chain: PrefixChain,
    /// The token ids that the engines see.
    pub tokens: LazyTokenIds,
    /// Its cache salt.
    pub salt: Option<String>,
}

impl RetainedPrompt {
    /// Takes the prompt out of a finished step; `None` when its token ids are not known.
    pub fn of(step: &mut ClassifiedStep) -> Option<Self> {
        let identified = &mut step.located.identified;
        let salt = identified.request.cache_salt().map(str::to_owned);
        let tokens = LazyTokenIds::take(identified)?;
        let ids = std::mem::take(&mut identified.prompt.chain.ids);
        Some(Self {
            tenant: identified.request.incoming.tenant.clone(),
            model: identified.request.model.clone(),
            chain: PrefixChain { ids, ..identified.prompt.chain },
            tokens,
            salt,
        })
    }

    /// Returns the token ids of its first blocks; `None` where it is shorter or cannot be encoded again. May take
    /// milliseconds.
    pub fn first_token_ids(&self, blocks: Blocks) -> Option<Vec<u32>> {
        let length = usize::try_from(blocks.tokens(self.chain.block).0).ok()?;
        Some(self.tokens.read(&self.chain)?.get(..length)?.to_vec())
    }

    fn size(&self) -> usize {
        self.tokens.size() + size_of_val(&*self.chain.ids) + 256
    }
}

/// Why a prompt's token ids are unavailable.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TokenIdsUnavailable {
    /// Too many prompts wait to be encoded again.
    QueueFull,
    /// They are not known, or encoding again gave another prompt.
    Unavailable,
}

/// The retained prompts, of which the oldest are evicted first, and the limited capacity for encoding prompts again.
#[derive(Debug)]
pub struct RetainedPromptStore {
    by_session: Mutex<FairLru<TenantId, SessionId, Arc<RetainedPrompt>>>,
    slots: Arc<Semaphore>,
    queue: Arc<Semaphore>,
}

impl Default for RetainedPromptStore {
    fn default() -> Self {
        let [slots, queue] =
            [MAX_CONCURRENT_ENCODINGS, MAX_QUEUED_ENCODINGS].map(|most| Arc::new(Semaphore::new(most)));
        Self { by_session: Mutex::new(FairLru::new(MAX_BYTES)), slots, queue }
    }
}

impl RetainedPromptStore {
    /// Reads a prompt's token ids, which may mean encoding it again: on a blocking thread, a few at once.
    pub async fn read<T: Send + 'static>(
        &self,
        ids: impl FnOnce() -> Option<T> + Send + 'static,
    ) -> Result<T, TokenIdsUnavailable> {
        let queue_permit = self.queue.clone().try_acquire_owned().map_err(|_| TokenIdsUnavailable::QueueFull)?;
        let slot = self.slots.clone().acquire_owned().await.map_err(|_| TokenIdsUnavailable::QueueFull)?;
        // A caller that leaves does not stop running work.
        let read = move || (ids(), queue_permit, slot).0;
        spawn_blocking(read).await.ok().flatten().ok_or(TokenIdsUnavailable::Unavailable)
    }

    #[cfg(test)]
    pub(crate) fn has_room(&self) -> bool {
        self.queue.available_permits() > 0
    }

    /// Returns a store whose queue is full, so that nothing is encoded.
    #[cfg(test)]
    pub(crate) fn with_full_queue() -> Self {
        Self { queue: Arc::new(Semaphore::new(0)), ..Self::default() }
    }

    /// Stores a session's newest prompt in place of its previous one.
    pub fn insert(&self, session: SessionId, prompt: impl Into<Arc<RetainedPrompt>>) {
        let prompt = prompt.into();
        let (tenant, size) = (prompt.tenant.clone(), prompt.size());
        let gone = self.by_session.lock().insert(tenant, session, (prompt, size));
        // Freed after the lock is released.
        drop(gone);
    }

    /// Returns the tenant's newest prompt whose chain contains `point`.
    pub fn find_containing(&self, tenant: &TenantId, point: PrefixPoint) -> Option<Arc<RetainedPrompt>> {
        let by_session = self.by_session.lock();
        let mut newest_first = by_session.iter_owner(tenant).map(|(_, kept)| kept);
        newest_first.find(|kept| point.is_on_chain(&kept.chain)).cloned()
    }
}

#[cfg(test)]
mod tests {
    use vocabulary::{HashSeed, PrefixId, Tokens};

    use super::*;

    fn retained_prompt(tenant: &str, tokens: u32, first: u32) -> RetainedPrompt {
        let tokens: Vec<u32> = (first..first + tokens).collect();
        let chain = PrefixChain::over_tokens(PrefixId(1), HashSeed(0), Tokens(16), &tokens);
        let tokens = LazyTokenIds::Known(tokens);
        RetainedPrompt { tenant: TenantId(tenant.into()), model: ModelId::from("m"), chain, tokens, salt: None }
    }

    #[test]
    fn a_retained_prompt_is_found_by_any_prefix_and_only_by_its_tenant() {
        let prompts = RetainedPromptStore::default();
        prompts.insert(SessionId(1), retained_prompt("a", 64, 0));
        let point = PrefixPoint::on_chain(&retained_prompt("a", 64, 0).chain, Blocks(2)).unwrap();
        assert_eq!(prompts.find_containing(&TenantId("a".into()), point).unwrap().tokens.size(), 256);
        assert!(prompts.find_containing(&TenantId("b".into()), point).is_none());
        prompts.insert(SessionId(1), retained_prompt("a", 64, 500));
        assert!(
            prompts.find_containing(&TenantId("a".into()), point).is_none(),
            "a session's newest prompt takes its place"
        );
    }

    #[tokio::test]
    async fn concurrent_and_queued_encodings_are_limited() {
        let prompts = Arc::<RetainedPromptStore>::default();
        let (go, gate) = std::sync::mpsc::channel::<()>();
        let (gate, running) = (Arc::new(Mutex::new(gate)), Arc::new(Mutex::new((0, 0))));
        let read = || {
            let (prompts, gate, running) = (prompts.clone(), gate.clone(), running.clone());
            let ids = move || {
                let at_once = {
                    let mut running = running.lock();
                    running.0 += 1;
                    running.1 = running.0.max(running.1);
                    running.1
                };
                gate.lock().recv().unwrap();
                running.lock().0 -= 1;
                Some(at_once)
            };
            tokio::spawn(async move { prompts.read(ids).await })
        };
        let all: Vec<_> = (0..MAX_QUEUED_ENCODINGS).map(|_| read()).collect();
        crate::testing::wait_until("all of them wait", || prompts.queue.available_permits() == 0).await;
        assert_eq!(prompts.read(|| Some(())).await, Err(TokenIdsUnavailable::QueueFull), "one too many");
        (0..MAX_QUEUED_ENCODINGS).for_each(|_| go.send(()).unwrap());
        for one in all {
            assert!(one.await.unwrap().is_ok_and(|at_once| at_once <= MAX_CONCURRENT_ENCODINGS));
        }
        assert_eq!(prompts.read(|| Some(7)).await, Ok(7), "there is room again");
        assert_eq!(prompts.read(|| None::<()>).await, Err(TokenIdsUnavailable::Unavailable));
    }

    #[test]
    fn the_oldest_prompts_are_evicted_beyond_the_byte_limit() {
        let prompts = RetainedPromptStore::default();
        let size = retained_prompt("a", 1 << 20, 0).size();
        let fit = MAX_BYTES / size;
        for n in 0..=fit {
            prompts.insert(SessionId(n as u128), retained_prompt("a", 1 << 20, n as u32));
        }
        let by_session = prompts.by_session.lock();
        assert_eq!((by_session.len(), by_session.bytes()), (fit, fit * size));
        assert!(!by_session.contains(&SessionId(0)));
    }
}
