//! Exchange of prompts by token ids: any router can move a session's blocks, whichever router served its last step.
//!
//! A received prompt is used only if it leads to exactly the prefix that the ledger shows. Messages are MessagePack
//! after a version byte.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::future::BoxFuture;
use futures::{FutureExt as _, StreamExt as _, stream};
use ownership::ledger::PrefixPoint;
use ownership::{MAX_CALL_BYTES, OwnershipDirectory, PeerError, PeerService, RouterTopic};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::time::timeout;
use vocabulary::{Blocks, HashSeed, ModelId, NodeId, PrefixChain, PrefixId, TenantId, Tokens};

use super::RouterPeers;
use crate::prompts::{RetainedPrompt, RetainedPromptStore, TokenIdsUnavailable};
use crate::telemetry::peer_exchange_metrics::ExchangeMetrics;
use crate::token_ids::LazyTokenIds;

const VERSION: u8 = 1;
/// Number of peers asked at once.
const MAX_CONCURRENT_REQUESTS: usize = 4;
/// Timeout for one peer.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(3);
/// Maximum number of token ids in an answer: as many as fit into it, at up to five bytes each.
const MAX_TOKENS: usize = MAX_CALL_BYTES / 5 - (64 << 10);

/// Identifies a prompt by its tenant and a point on its chain.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PromptKey {
    /// The tenant.
    pub tenant: TenantId,
    /// A point that the prompt's chain contains.
    pub point: PrefixPoint,
}

#[derive(Serialize, Deserialize)]
struct PromptRequest {
    tenant: TenantId,
    blocks: Blocks,
    prefix: PrefixId,
}

/// A prompt up to the requested point.
#[derive(Serialize, Deserialize)]
struct PromptReply {
    model: ModelId,
    root: PrefixId,
    block: Tokens,
    tokens: Vec<u32>,
    salt: Option<String>,
}

impl PromptReply {
    /// Builds the answer; `None`, before anything is encoded, where there are too many tokens for one.
    fn of(prompt: &RetainedPrompt, point: PrefixPoint) -> Option<Self> {
        let can_be_lent = point.blocks.tokens(prompt.chain.block).0 <= MAX_TOKENS as u64;
        let tokens = can_be_lent.then(|| prompt.first_token_ids(point.blocks))??;
        let PrefixChain { root, block, .. } = prompt.chain;
        Some(Self { model: prompt.model.clone(), root, block, tokens, salt: prompt.salt.clone() })
    }

    /// Converts the answer into a retained prompt; `None` where it does not lead to the point.
    fn into_stored_prompt(self, key: &PromptKey, seed: HashSeed) -> Option<RetainedPrompt> {
        let Self { model, root, block, tokens, salt } = self;
        if block == Tokens::ZERO {
            return None;
        }
        let chain = PrefixChain::over_tokens(root, seed, block, &tokens);
        let tokens = LazyTokenIds::Known(tokens);
        let prompt = RetainedPrompt { tenant: key.tenant.clone(), model, chain, tokens, salt };
        key.point.is_on_chain(&prompt.chain).then_some(prompt)
    }
}

/// Serves this router's retained prompts to its peers.
struct PromptService {
    prompts: Arc<RetainedPromptStore>,
    metrics: ExchangeMetrics,
}

impl PeerService for PromptService {
    fn answer(&self, _from: NodeId, question: Bytes) -> BoxFuture<'static, Result<Bytes, PeerError>> {
        let answer =
            decode::<PromptRequest>(&question).ok_or_else(|| PeerError::Garbled("a question about a prompt".into()));
        let (prompts, metrics) = (self.prompts.clone(), self.metrics.clone());
        async move {
            let PromptRequest { tenant, blocks, prefix } = answer?;
            let point = PrefixPoint { blocks, id: prefix };
            let lent = match prompts.find_containing(&tenant, point) {
                Some(kept) => prompts.read(move || PromptReply::of(&kept, point)).await,
                None => Err(TokenIdsUnavailable::Unavailable),
            };
            if lent.as_ref().err() == Some(&TokenIdsUnavailable::QueueFull) {
                metrics.prompts.with_label_values(&["busy"]).inc();
                return Err(PeerError::Failed("too many prompts wait to be encoded here; ask again shortly".into()));
            }
            let lent = lent.ok();
            if lent.is_some() {
                metrics.prompts.with_label_values(&["sent"]).inc();
            }
            encode(&lent).ok_or_else(|| PeerError::Failed("the prompt could not be written".into()))
        }
        .boxed()
    }
}

/// Serves prompts to the other nodes of this directory from now on.
pub fn serve_prompts(directory: &OwnershipDirectory, prompts: Arc<RetainedPromptStore>, metrics: ExchangeMetrics) {
    directory.serve_peers(RouterTopic::Prompts, Arc::new(PromptService { prompts, metrics }));
}

/// Asks all peers for a prompt, a few at a time; returns the first valid answer.
pub async fn fetch_prompt(
    peers: &dyn RouterPeers,
    key: &PromptKey,
    seed_of: impl Fn(&ModelId) -> HashSeed,
    metrics: &ExchangeMetrics,
) -> Option<RetainedPrompt> {
    let question = PromptRequest { tenant: key.tenant.clone(), blocks: key.point.blocks, prefix: key.point.id };
    let question = encode(&question)?;
    let ask = |node| {
        let call = peers.call(node, RouterTopic::Prompts, question.clone());
        async move { (node, timeout(REQUEST_TIMEOUT, call).await) }
    };
    let mut answers = stream::iter(peers.peers()).map(ask).buffer_unordered(MAX_CONCURRENT_REQUESTS);
    while let Some((node, answer)) = answers.next().await {
        let prompt = match answer {
            Err(_) => Err("timed_out"),
            Ok(Err(error)) => Err(error.cause()),
            Ok(Ok(answer)) => match decode::<Option<PromptReply>>(&answer) {
                None => Err("malformed"),
                Some(None) => Err("not_found"),
                Some(Some(lent)) => {
                    let seed = seed_of(&lent.model);
                    lent.into_stored_prompt(key, seed).ok_or("mismatch")
                }
            },
        };
        let outcome = prompt.as_ref().err().copied().unwrap_or("received");
        metrics.prompts.with_label_values(&[outcome]).inc();
        match prompt {
            Ok(prompt) => return Some(prompt),
            Err("not_found") => {}
            Err(cause) => tracing::warn!(%node, reason = cause, "another router could not be asked for a prompt"),
        }
    }
    None
}

fn encode(message: &impl Serialize) -> Option<Bytes> {
    let mut bytes = vec![VERSION];
    rmp_serde::encode::write(&mut bytes, message).ok()?;
    Some(bytes.into())
}

fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Option<T> {
    let (&VERSION, content) = bytes.split_first()? else { return None };
    rmp_serde::from_slice(content).ok()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use vocabulary::SessionId;

    use super::*;
    use crate::telemetry::metrics::Metrics;

    const SEED: HashSeed = HashSeed(3);

    fn kept(tokens: std::ops::Range<u32>) -> RetainedPrompt {
        let tokens: Vec<u32> = tokens.collect();
        let chain = PrefixChain::over_tokens(PrefixId(9), SEED, Tokens(16), &tokens);
        let tokens = LazyTokenIds::Known(tokens);
        RetainedPrompt { tenant: TenantId("a".into()), model: "m".into(), chain, tokens, salt: Some("s".into()) }
    }

    fn wanted(tenant: &str, blocks: u64) -> PromptKey {
        let point = PrefixPoint::on_chain(&kept(0..64).chain, Blocks(blocks)).unwrap();
        PromptKey { tenant: TenantId(tenant.into()), point }
    }

    fn lender(prompts: Vec<RetainedPrompt>) -> Arc<dyn PeerService> {
        let kept = Arc::<RetainedPromptStore>::default();
        (0..).zip(prompts).for_each(|(session, prompt)| kept.insert(SessionId(session), prompt));
        Arc::new(PromptService { prompts: kept, metrics: Metrics::default().exchange })
    }

    /// Gives the same answer to every question.
    struct FixedReplyService(Vec<u8>);

    impl PeerService for FixedReplyService {
        fn answer(&self, _: NodeId, _: Bytes) -> BoxFuture<'static, Result<Bytes, PeerError>> {
            std::future::ready(Ok(Bytes::from(self.0.clone()))).boxed()
        }
    }

    struct StubPeers(BTreeMap<NodeId, Arc<dyn PeerService>>);

    impl RouterPeers for StubPeers {
        fn peers(&self) -> Vec<NodeId> {
            self.0.keys().copied().chain([NodeId(99)]).collect()
        }

        fn call(&self, node: NodeId, _: RouterTopic, question: Bytes) -> BoxFuture<'static, Result<Bytes, PeerError>> {
            match self.0.get(&node) {
                Some(service) => service.answer(NodeId(0), question),
                None => std::future::ready(Err(PeerError::Unknown(node))).boxed(),
            }
        }
    }

    fn stub_peers(services: Vec<Arc<dyn PeerService>>) -> StubPeers {
        StubPeers((1..).map(NodeId).zip(services).collect())
    }

    async fn borrowed(street: &StubPeers, key: &PromptKey) -> (Option<RetainedPrompt>, u64) {
        let metrics = Metrics::default().exchange;
        let found = fetch_prompt(street, key, |_| SEED, &metrics).await;
        (found, metrics.prompts.with_label_values(&["mismatch"]).get())
    }

    #[tokio::test]
    async fn prompt_is_fetched_up_to_the_requested_point_from_any_peer() {
        let street = stub_peers(vec![lender(vec![]), lender(vec![kept(500..600)]), lender(vec![kept(0..70)])]);
        let (found, _) = borrowed(&street, &wanted("a", 3)).await;
        let found = found.unwrap();
        let tokens = found.tokens.read(&found.chain).unwrap().into_owned();
        assert_eq!((tokens, &*found.model.0, found.salt.as_deref()), ((0..48).collect(), "m", Some("s")));
        assert!(borrowed(&street, &wanted("b", 3)).await.0.is_none(), "another tenant's");
        assert!(
            borrowed(
                &street,
                &PromptKey { point: PrefixPoint::on_chain(&kept(7..90).chain, Blocks(2)).unwrap(), ..wanted("a", 1) }
            )
            .await
            .0
            .is_none()
        );
    }

    #[tokio::test]
    async fn busy_peer_is_counted_and_the_next_peer_is_asked() {
        let metrics = Metrics::default().exchange;
        let full = RetainedPromptStore::with_full_queue();
        full.insert(SessionId(1), kept(0..70));
        let busy: Arc<dyn PeerService> = Arc::new(PromptService { prompts: Arc::new(full), metrics: metrics.clone() });
        let street = stub_peers(vec![busy.clone(), lender(vec![kept(0..70)])]);
        assert!(borrowed(&street, &wanted("a", 3)).await.0.is_some());
        let of = |outcome: &str| metrics.prompts.with_label_values(&[outcome]).get();
        assert_eq!((of("busy"), of("sent")), (1, 0));
        let question =
            PromptRequest { tenant: TenantId("a".into()), blocks: Blocks(3), prefix: wanted("a", 3).point.id };
        let told = busy.answer(NodeId(1), encode(&question).unwrap()).await;
        assert!(matches!(told, Err(PeerError::Failed(why)) if why.contains("encoded")));
    }

    #[tokio::test]
    async fn replies_that_do_not_reach_the_point_are_ignored() {
        let other =
            encode(&PromptReply::of(&kept(7..90), PrefixPoint::on_chain(&kept(7..90).chain, Blocks(3)).unwrap()))
                .unwrap();
        let no_blocks =
            PromptReply { block: Tokens::ZERO, ..PromptReply::of(&kept(0..64), wanted("a", 3).point).unwrap() };
        let services: Vec<Arc<dyn PeerService>> = [other.to_vec(), encode(&Some(no_blocks)).unwrap().to_vec()]
            .into_iter()
            .chain([vec![], vec![VERSION], b"nonsense".to_vec()])
            .map(|answer| Arc::new(FixedReplyService(answer)) as Arc<dyn PeerService>)
            .collect();
        let (found, others) = borrowed(&stub_peers(services), &wanted("a", 3)).await;
        assert!(found.is_none());
        assert_eq!(others, 2);
        let garbled = lender(vec![]).answer(NodeId(1), Bytes::from_static(b"\x02")).await;
        assert!(matches!(garbled, Err(PeerError::Garbled(_))));
    }
}
