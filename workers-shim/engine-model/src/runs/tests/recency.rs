use std::collections::VecDeque;

use super::Chance;
use crate::runs::RunId;
use crate::runs::recency::Recency;

fn order(recency: &Recency) -> Vec<u32> {
    recency.iter().map(|run| run.0).collect()
}

#[test]
fn the_last_used_comes_last() {
    let mut recency = Recency::new(4);
    assert_eq!((order(&recency), recency.oldest()), (vec![], None));
    let was: Vec<bool> = [2, 0, 3, 0].map(|run| recency.touch(RunId(run))).into();
    assert_eq!(was, [false, false, false, true]);
    assert_eq!((order(&recency), recency.oldest()), (vec![2, 3, 0], Some(RunId(2))));
}

#[test]
fn what_is_removed_is_gone_wherever_it_was() {
    for removed in 0..3 {
        let mut recency = Recency::new(3);
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
fn removing_all_leaves_nothing_and_it_can_be_filled_again() {
    let mut recency = Recency::new(5);
    for round in 0..3 {
        (0..5).for_each(|run| _ = recency.touch(RunId((run + round) % 5)));
        while let Some(run) = recency.oldest() {
            assert!(recency.remove(run));
        }
        assert_eq!(order(&recency), []);
    }
}

#[test]
fn it_is_the_list_that_one_would_write_down() {
    let (mut chance, mut recency, mut list) = (Chance::new(7), Recency::new(40), VecDeque::new());
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
