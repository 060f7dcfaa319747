//! Prompts by their token ids, between routers: any of them can move a session's blocks, whoever served its last step.
//!
//! What is borrowed is used only where it leads to the very prefix that the ledger shows. In MessagePack, after a first
//! byte that names the version.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::future::BoxFuture;
use futures::{FutureExt as _, StreamExt as _, stream};
use ownership::ledger::Point;
use ownership::{Directory, MAX_CALL, PeerError, PeerService, Topic};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::time::timeout;
use vocabulary::{Blocks, Chain, ModelId, NodeId, PrefixId, Seed, TenantId, Tokens};

use super::Neighbours;
use crate::pipeline::prompts::{Kept, Prompts, Unread};
use crate::pipeline::token_ids::TokenIds;
use crate::telemetry::exchange::ExchangeMetrics;

const VERSION: u8 = 1;
/// Neighbours that are asked at once.
const AT_ONCE: usize = 4;
/// Longest wait for one of them.
const PATIENCE: Duration = Duration::from_secs(3);
/// Most token ids that are lent: as many as fit into an answer, at up to five bytes each.
const MOST_TOKENS: usize = MAX_CALL / 5 - (64 << 10);

/// Which prompt: of this tenant, through this point.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Wanted {
    /// Whose.
    pub tenant: TenantId,
    /// What it goes through.
    pub point: Point,
}

#[derive(Serialize, Deserialize)]
struct Question {
    tenant: TenantId,
    blocks: Blocks,
    prefix: PrefixId,
}

/// A prompt up to the point that was asked for.
#[derive(Serialize, Deserialize)]
struct Lent {
    model: ModelId,
    root: PrefixId,
    block: Tokens,
    tokens: Vec<u32>,
    salt: Option<String>,
}

impl Lent {
    /// None where there are more tokens than can be lent, before they are encoded.
    fn of(kept: &Kept, point: Point) -> Option<Self> {
        let can_be_lent = point.blocks.tokens(kept.chain.block).0 <= MOST_TOKENS as u64;
        let tokens = can_be_lent.then(|| kept.first(point.blocks))??;
        let Chain { root, block, .. } = kept.chain;
        Some(Self { model: kept.model.clone(), root, block, tokens, salt: kept.salt.clone() })
    }

    /// As if it had been kept here; none where it does not lead to the point.
    fn kept(self, wanted: &Wanted, seed: Seed) -> Option<Kept> {
        let Self { model, root, block, tokens, salt } = self;
        if block == Tokens::ZERO {
            return None;
        }
        let chain = Chain::over_tokens(root, seed, block, &tokens);
        let tokens = TokenIds::Here(tokens);
        let kept = Kept { tenant: wanted.tenant.clone(), model, chain, tokens, salt };
        wanted.point.is_on(&kept.chain).then_some(kept)
    }
}

/// Lends what is kept here.
struct Lender {
    prompts: Arc<Prompts>,
    metrics: ExchangeMetrics,
}

impl PeerService for Lender {
    fn answer(&self, _from: NodeId, question: Bytes) -> BoxFuture<'static, Result<Bytes, PeerError>> {
        let answer = read::<Question>(&question).ok_or_else(|| PeerError::Garbled("a question about a prompt".into()));
        let (prompts, metrics) = (self.prompts.clone(), self.metrics.clone());
        async move {
            let Question { tenant, blocks, prefix } = answer?;
            let point = Point { blocks, id: prefix };
            let lent = match prompts.through(&tenant, point) {
                Some(kept) => prompts.read(move || Lent::of(&kept, point)).await,
                None => Err(Unread::Unknown),
            };
            if lent.as_ref().err() == Some(&Unread::NoRoom) {
                metrics.prompts.with_label_values(&["no_room"]).inc();
                return Err(PeerError::Failed("too many prompts wait to be encoded here; ask again shortly".into()));
            }
            let lent = lent.ok();
            if lent.is_some() {
                metrics.prompts.with_label_values(&["lent"]).inc();
            }
            write(&lent).ok_or_else(|| PeerError::Failed("the prompt could not be written".into()))
        }
        .boxed()
    }
}

/// Lends prompts to the other nodes of this directory from now on.
pub fn lend(directory: &Directory, prompts: Arc<Prompts>, metrics: ExchangeMetrics) {
    directory.serve_peers(Topic::Prompts, Arc::new(Lender { prompts, metrics }));
}

/// Asks all neighbours for a prompt, a few at a time; the first that knows it answers for all.
pub async fn borrow(
    neighbours: &dyn Neighbours,
    wanted: &Wanted,
    seed_of: impl Fn(&ModelId) -> Seed,
    metrics: &ExchangeMetrics,
) -> Option<Kept> {
    let question = Question { tenant: wanted.tenant.clone(), blocks: wanted.point.blocks, prefix: wanted.point.id };
    let question = write(&question)?;
    let ask = |node| {
        let call = neighbours.call(node, Topic::Prompts, question.clone());
        async move { (node, timeout(PATIENCE, call).await) }
    };
    let mut answers = stream::iter(neighbours.others()).map(ask).buffer_unordered(AT_ONCE);
    while let Some((node, answer)) = answers.next().await {
        let kept = match answer {
            Err(_) => Err("timed_out"),
            Ok(Err(error)) => Err(error.cause()),
            Ok(Ok(answer)) => match read::<Option<Lent>>(&answer) {
                None => Err("garbled"),
                Some(None) => Err("not_known"),
                Some(Some(lent)) => {
                    let seed = seed_of(&lent.model);
                    lent.kept(wanted, seed).ok_or("another")
                }
            },
        };
        let outcome = kept.as_ref().err().copied().unwrap_or("borrowed");
        metrics.prompts.with_label_values(&[outcome]).inc();
        match kept {
            Ok(kept) => return Some(kept),
            Err("not_known") => {}
            Err(cause) => tracing::warn!(%node, cause, "another router could not be asked for a prompt"),
        }
    }
    None
}

fn write(message: &impl Serialize) -> Option<Bytes> {
    let mut bytes = vec![VERSION];
    rmp_serde::encode::write(&mut bytes, message).ok()?;
    Some(bytes.into())
}

fn read<T: DeserializeOwned>(bytes: &[u8]) -> Option<T> {
    let (&VERSION, content) = bytes.split_first()? else { return None };
    rmp_serde::from_slice(content).ok()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use vocabulary::SessionId;

    use super::*;
    use crate::telemetry::metrics::Metrics;

    const SEED: Seed = Seed(3);

    fn kept(tokens: std::ops::Range<u32>) -> Kept {
        let tokens: Vec<u32> = tokens.collect();
        let chain = Chain::over_tokens(PrefixId(9), SEED, Tokens(16), &tokens);
        let tokens = TokenIds::Here(tokens);
        Kept { tenant: TenantId("a".into()), model: "m".into(), chain, tokens, salt: Some("s".into()) }
    }

    fn wanted(tenant: &str, blocks: u64) -> Wanted {
        let point = Point::on(&kept(0..64).chain, Blocks(blocks)).unwrap();
        Wanted { tenant: TenantId(tenant.into()), point }
    }

    fn lender(prompts: Vec<Kept>) -> Arc<dyn PeerService> {
        let kept = Arc::<Prompts>::default();
        (0..).zip(prompts).for_each(|(session, prompt)| kept.keep(SessionId(session), prompt));
        Arc::new(Lender { prompts: kept, metrics: Metrics::default().exchange })
    }

    /// Says the same whatever it is asked.
    struct Stubborn(Vec<u8>);

    impl PeerService for Stubborn {
        fn answer(&self, _: NodeId, _: Bytes) -> BoxFuture<'static, Result<Bytes, PeerError>> {
            std::future::ready(Ok(Bytes::from(self.0.clone()))).boxed()
        }
    }

    struct Street(BTreeMap<NodeId, Arc<dyn PeerService>>);

    impl Neighbours for Street {
        fn others(&self) -> Vec<NodeId> {
            self.0.keys().copied().chain([NodeId(99)]).collect()
        }

        fn call(&self, node: NodeId, _: Topic, question: Bytes) -> BoxFuture<'static, Result<Bytes, PeerError>> {
            match self.0.get(&node) {
                Some(service) => service.answer(NodeId(0), question),
                None => std::future::ready(Err(PeerError::Unknown(node))).boxed(),
            }
        }
    }

    fn street(services: Vec<Arc<dyn PeerService>>) -> Street {
        Street((1..).map(NodeId).zip(services).collect())
    }

    async fn borrowed(street: &Street, wanted: &Wanted) -> (Option<Kept>, u64) {
        let metrics = Metrics::default().exchange;
        let found = borrow(street, wanted, |_| SEED, &metrics).await;
        (found, metrics.prompts.with_label_values(&["another"]).get())
    }

    #[tokio::test]
    async fn a_prompt_is_borrowed_up_to_its_point_from_whoever_knows_it() {
        let street = street(vec![lender(vec![]), lender(vec![kept(500..600)]), lender(vec![kept(0..70)])]);
        let (found, _) = borrowed(&street, &wanted("a", 3)).await;
        let found = found.unwrap();
        let tokens = found.tokens.read(&found.chain).unwrap().into_owned();
        assert_eq!((tokens, &*found.model.0, found.salt.as_deref()), ((0..48).collect(), "m", Some("s")));
        assert!(borrowed(&street, &wanted("b", 3)).await.0.is_none(), "another tenant's");
        assert!(
            borrowed(&street, &Wanted { point: Point::on(&kept(7..90).chain, Blocks(2)).unwrap(), ..wanted("a", 1) })
                .await
                .0
                .is_none()
        );
    }

    #[tokio::test]
    async fn a_lender_without_room_to_encode_says_so_and_counts_it_and_the_next_one_is_asked() {
        let metrics = Metrics::default().exchange;
        let full = Prompts::full();
        full.keep(SessionId(1), kept(0..70));
        let busy: Arc<dyn PeerService> = Arc::new(Lender { prompts: Arc::new(full), metrics: metrics.clone() });
        let street = street(vec![busy.clone(), lender(vec![kept(0..70)])]);
        assert!(borrowed(&street, &wanted("a", 3)).await.0.is_some());
        let of = |outcome: &str| metrics.prompts.with_label_values(&[outcome]).get();
        assert_eq!((of("no_room"), of("lent")), (1, 0));
        let question = Question { tenant: TenantId("a".into()), blocks: Blocks(3), prefix: wanted("a", 3).point.id };
        let told = busy.answer(NodeId(1), write(&question).unwrap()).await;
        assert!(matches!(told, Err(PeerError::Failed(why)) if why.contains("encoded")));
    }

    #[tokio::test]
    async fn what_does_not_lead_to_the_point_is_not_used() {
        let other = write(&Lent::of(&kept(7..90), Point::on(&kept(7..90).chain, Blocks(3)).unwrap())).unwrap();
        let no_blocks = Lent { block: Tokens::ZERO, ..Lent::of(&kept(0..64), wanted("a", 3).point).unwrap() };
        let services: Vec<Arc<dyn PeerService>> = [other.to_vec(), write(&Some(no_blocks)).unwrap().to_vec()]
            .into_iter()
            .chain([vec![], vec![VERSION], b"nonsense".to_vec()])
            .map(|answer| Arc::new(Stubborn(answer)) as Arc<dyn PeerService>)
            .collect();
        let (found, others) = borrowed(&street(services), &wanted("a", 3)).await;
        assert!(found.is_none());
        assert_eq!(others, 2);
        let garbled = lender(vec![]).answer(NodeId(1), Bytes::from_static(b"\x02")).await;
        assert!(matches!(garbled, Err(PeerError::Garbled(_))));
    }
}
