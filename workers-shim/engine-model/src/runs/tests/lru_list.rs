use std::collections::VecDeque;

use super::PromptRng;
use crate::runs::RunId;
use crate::runs::lru_list::LruList;

fn order(recency: &LruList) -> Vec<u32> {
    recency.iter().map(|run| run.0).collect()
}

#[test]
fn last_touched_run_is_newest() {
    let mut recency = LruList::new(4);
    assert_eq!((order(&recency), recency.oldest()), (vec![], None));
    let was: Vec<bool> = [2, 0, 3, 0].map(|run| recency.touch(RunId(run))).into();
    assert_eq!(was, [false, false, false, true]);
    assert_eq!((order(&recency), recency.oldest()), (vec![2, 3, 0], Some(RunId(2))));
}

#[test]
fn removal_works_at_every_position() {
    for removed in 0..3 {
        let mut recency = LruList::new(3);
        (0..3).for_each(|run| _ = recency.touch(RunId(run)));
        assert!(recency.remove(RunId(removed)));
        assert!(!recency.remove(RunId(removed)) && !recency.has(RunId(removed)));
        let left: Vec<u32> = (0..3).filter(|run| *run != removed).collect();
        assert_eq!(order(&recency), left);
        recency.touch(RunId(removed));
        assert_eq!(order(&recency).last(), Some(&removed));
    }
}

#[test]
fn emptied_list_can_be_refilled() {
    let mut recency = LruList::new(5);
    for round in 0..3 {
        (0..5).for_each(|run| _ = recency.touch(RunId((run + round) % 5)));
        while let Some(run) = recency.oldest() {
            assert!(recency.remove(run));
        }
        assert!(order(&recency).is_empty());
    }
}

#[test]
fn lru_list_matches_a_reference_list() {
    let (mut chance, mut recency, mut list) = (PromptRng::new(7), LruList::new(40), VecDeque::new());
    for _ in 0..20_000 {
        let run = chance.below(40) as u32;
        let was = list.iter().position(|other| *other == run);
        if let Some(at) = was {
            list.remove(at);
        }
        if chance.below(3) == 0 {
            assert_eq!(recency.remove(RunId(run)), was.is_some());
        } else {
            assert_eq!(recency.touch(RunId(run)), was.is_some());
            list.push_back(run);
        }
        assert_eq!(recency.oldest().map(|run| run.0), list.front().copied());
        assert!((0..40).all(|run| recency.has(RunId(run)) == list.contains(&run)));
    }
    assert_eq!(order(&recency), Vec::from(list));
}
