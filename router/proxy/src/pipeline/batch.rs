//! Batches: several prompts in one request. One worker serves all of them, so its overlaps with each prompt are added
//! up.

use std::collections::BTreeMap;

use vocabulary::{Blocks, DpRank, Overlap, Tier, WorkerId};

const TIERS: [Tier; 3] = [Tier::Hbm, Tier::Host, Tier::Disk];

/// Sums the overlaps of several prompts. Each list follows the index's convention: a slower tier appears only where it
/// reaches further.
pub(super) fn sum_overlaps(each: impl Iterator<Item = Vec<Overlap>>) -> Vec<Overlap> {
    let mut sums: BTreeMap<(WorkerId, DpRank), [Blocks; 3]> = BTreeMap::new();
    for overlaps in each {
        let mut depths: BTreeMap<(WorkerId, DpRank), [Blocks; 3]> = BTreeMap::new();
        for Overlap { worker, rank, tier, blocks } in overlaps {
            let reached = depths.entry((worker, rank)).or_default();
            // Blocks in a faster tier also count for the slower tiers.
            let slower = TIERS.iter().zip(reached).filter(|(other, _)| **other >= tier);
            slower.for_each(|(_, depth)| *depth = blocks.max(*depth));
        }
        for (holder, depths) in depths {
            let sum = sums.entry(holder).or_default();
            sum.iter_mut().zip(depths).for_each(|(sum, depth)| *sum = Blocks(sum.0 + depth.0));
        }
    }
    let listed = |((worker, rank), sum): ((WorkerId, DpRank), [Blocks; 3])| {
        let mut least = Blocks::ZERO;
        TIERS.iter().zip(sum).filter_map(move |(&tier, blocks)| {
            let reaches_further = blocks > least;
            least = blocks.max(least);
            reaches_further.then_some(Overlap { worker, rank, tier, blocks })
        })
    };
    sums.into_iter().flat_map(listed).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::lab::sim_command::tests::{sim, url};
    use crate::testing::{post, start_router_at, wait_until};
    use vocabulary::{KvIndexState, Tokens};

    fn overlap(worker: u64, tier: Tier, blocks: u64) -> Overlap {
        Overlap { worker: WorkerId(worker), rank: DpRank(0), tier, blocks: Blocks(blocks) }
    }

    #[test]
    fn the_overlaps_of_a_batch_add_up_by_tier() {
        let first = vec![overlap(1, Tier::Hbm, 4), overlap(1, Tier::Disk, 9), overlap(2, Tier::Host, 3)];
        let second = vec![overlap(1, Tier::Hbm, 2), overlap(3, Tier::Hbm, 1)];
        let sum = sum_overlaps([first, second, Vec::new()].into_iter());
        let expected =
            [overlap(1, Tier::Hbm, 6), overlap(1, Tier::Disk, 11), overlap(2, Tier::Host, 3), overlap(3, Tier::Hbm, 1)];
        assert_eq!(sum, expected);
        assert_eq!(sum_overlaps(std::iter::empty()), []);
    }

    #[tokio::test]
    async fn a_batch_is_planned_as_a_whole_and_limited_by_its_longest_prompt() {
        let worker = sim(&["--speed-up=50"]).await;
        let router = start_router_at(&[url(&worker)], &["models.tiny.tokenizer_dir=builtin"]).await;
        wait_until("its events are followed", || {
            router.gateway.fleet().snapshot()[0].kv_index_state == KvIndexState::Exact
        })
        .await;
        let ask = async |prompt: serde_json::Value| {
            let body = json!({"model": "tiny", "max_tokens": 2, "prompt": prompt}).to_string();
            let response = post(router.proxy_address(), "/v1/completions", body).await;
            assert_eq!(response.status, 200, "{:?}", response.body);
            router.gateway.decisions.receipts.newest(1, |_| true).remove(0)
        };
        let said = |n: usize| format!("{n} what is in the sea? ").repeat(40 * (n + 1));
        let mut alone = Tokens::ZERO;
        for n in 0..3 {
            alone += ask(json!(said(n))).await.lookup.prompt_tokens;
        }
        let whole = ask(json!([said(0), said(1), said(2)])).await;
        assert_eq!(whole.lookup.prompt_tokens, alone);
        assert!(whole.lookup.max_overlap_tokens + Tokens(3 * 16) > alone, "all but each tail: {:?}", whole.lookup);
        let seen = whole.observed.unwrap();
        assert_eq!((seen.token_count_mismatch, whole.attempts[0].kv_index_state), (None, KvIndexState::Exact));
        assert!(seen.predicted_cached_tokens > alone - Tokens(4 * 16), "{seen:?}");
        let agreed = router.gateway.metrics.prefix_cache.token_count_checks.with_label_values(&["match"]);
        assert_eq!(agreed.get(), 4, "the engine counts the sum, too");
        let context = router.gateway.fleet().snapshot()[0].capacity.context;
        let many = vec![said(9); 16];
        assert!(ask(json!(many)).await.lookup.prompt_tokens > context, "none of them is too long by itself");
    }
}
