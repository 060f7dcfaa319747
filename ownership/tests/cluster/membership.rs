//! Cluster membership and its changes.

use std::path::Path;
use std::process;

use ledger::{Command, Outcome, Refusal};
use ownership::{Consistency, LedgerNodeError, MemberError, MemberRole};
use vocabulary::{NodeId, SessionId};

use crate::nodes::{PATIENCE, TestCluster, eventually, open_session, without_elections};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_voter_becomes_three_with_a_learner_and_two_voters_are_refused() {
    let mut nodes = TestCluster::found().await;
    for expected in [2, 3, 4] {
        assert_eq!(nodes.join().await, expected);
    }
    let two = nodes.node(4).promote([NodeId(2)]).await.unwrap_err();
    assert_eq!(two, MemberError::VoterCount { voters: 2 });
    nodes.promote(&[2, 3]).await;
    let leader = nodes.leader().await;
    nodes.node(4).submit(open_session(1)).unwrap().await.unwrap();
    let view = nodes.node(3).read(Consistency::Linearizable).await.unwrap();
    assert!(view.session(SessionId(1)).is_some());
    let members = nodes.node(leader).members();
    let standing: Vec<_> = members.iter().map(|member| (member.node.0, member.role)).collect();
    use MemberRole::{Learner, Voter};
    assert_eq!(standing, [(1, Voter), (2, Voter), (3, Voter), (4, Learner)]);
    assert!(
        members.iter().all(|member| member.matched_index.is_some() && member.feature_levels.is_some()),
        "{members:?}"
    );
    nodes.assert_converged().await;
    nodes.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_removed_node_is_informed_and_its_id_is_never_reused() {
    let mut nodes = TestCluster::three(2).await;
    nodes.node(2).remove(NodeId(4)).await.unwrap();
    eventually("node 4 to learn that it was removed", || async { nodes.node(4).is_removed().then_some(()) }).await;
    assert!(nodes.node(4).view().quorum().stale || nodes.node(4).is_removed());
    nodes.kill(4).await;
    // A removed node's folder does not let it back in.
    let again = nodes.reopen(4).await.unwrap();
    eventually("the restarted node to learn it too", || async { again.is_removed().then_some(()) }).await;
    again.halt().await.unwrap();
    // A node with an emptied folder joins as a new one.
    nodes.kill(5).await;
    nodes.folders.remove(&5);
    assert_eq!(nodes.join().await, 6);
    let known: Vec<u64> = nodes.node(1).members().iter().map(|member| member.node.0).collect();
    assert_eq!(known, [1, 2, 3, 5, 6]);
    nodes.assert_converged().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_voter_is_replaced_and_three_voters_become_five() {
    let mut nodes = TestCluster::three(1).await;
    nodes.leader().await;
    let lost = if nodes.leader().await == 3 { 2 } else { 3 };
    nodes.kill(lost).await;
    let error = nodes.node(1).remove(NodeId(lost)).await.unwrap_err();
    assert_eq!(error, MemberError::StillVoter(NodeId(lost)));
    nodes.node(1).replace(NodeId(lost), NodeId(4)).await.unwrap();
    nodes.node(1).remove(NodeId(lost)).await.unwrap();
    let (five, six) = (nodes.join().await, nodes.join().await);
    nodes.promote(&[five, six]).await;
    let voters = nodes.node(4).members().iter().filter(|member| member.role == MemberRole::Voter).count();
    assert_eq!(voters, 5);
    nodes.node(five).submit(open_session(5)).unwrap().await.unwrap();
    nodes.assert_converged().await;
    nodes.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unreachable_learner_is_not_promoted() {
    let mut nodes = TestCluster::found().await;
    nodes.join().await;
    nodes.join().await;
    nodes.kill(3).await;
    let error = eventually("the refusal", || async { nodes.node(1).promote([NodeId(2), NodeId(3)]).await.err() }).await;
    assert_eq!(error, MemberError::Unreachable(NodeId(3)));
    nodes.node(1).submit(open_session(1)).unwrap().await.unwrap();
    nodes.restart(3).await;
    nodes.promote(&[2, 3]).await;
    nodes.assert_converged().await;
    nodes.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_leader_transfers_leadership_on_request_and_on_close() {
    let mut nodes = TestCluster::three(0).await;
    let leader = nodes.leader().await;
    let next = if leader == 2 { 3 } else { 2 };
    nodes.node(1).transfer_leader(NodeId(next)).await.unwrap();
    assert_eq!(nodes.leader().await, next);
    let closing = nodes.running.remove(&next).unwrap();
    closing.close().await.unwrap();
    assert_ne!(nodes.leader().await, next);
    nodes.any().submit(open_session(1)).unwrap().await.unwrap();
    nodes.assert_converged().await;
    nodes.close().await;
}

/// Returns the voters, as the leader knows them.
async fn voters(nodes: &TestCluster) -> Vec<u64> {
    let members = nodes.node(nodes.leader().await).members().into_iter();
    members.filter(|member| member.role == MemberRole::Voter).map(|member| member.node.0).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replaced_or_demoted_leader_transfers_leadership_to_a_voter() {
    let nodes = TestCluster::three(2).await;
    let replaced = nodes.leader().await;
    nodes.node(5).replace(NodeId(replaced), NodeId(4)).await.unwrap();
    assert!(!voters(&nodes).await.contains(&replaced));
    assert!(voters(&nodes).await.contains(&nodes.leader().await));
    nodes.promote(&[replaced, 5]).await;
    let demoted = nodes.leader().await;
    let other = if demoted == 5 { 4 } else { 5 };
    nodes.node(demoted).demote([NodeId(demoted), NodeId(other)]).await.unwrap();
    assert_eq!(voters(&nodes).await.len(), 3);
    assert!(voters(&nodes).await.contains(&nodes.leader().await));
    nodes.any().submit(open_session(1)).unwrap().await.unwrap();
    nodes.assert_converged().await;
    nodes.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replacing_the_only_voter_transfers_leadership() {
    let mut nodes = TestCluster::found().await;
    nodes.join().await;
    nodes.node(1).replace(NodeId(1), NodeId(2)).await.unwrap();
    assert_eq!((nodes.leader().await, voters(&nodes).await), (2, vec![2]));
    nodes.node(1).submit(open_session(1)).unwrap().await.unwrap();
    nodes.assert_converged().await;
    nodes.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn members_show_no_leader_without_a_quorum() {
    let mut nodes = TestCluster::three(0).await;
    let leader = nodes.leader().await;
    for lost in [1, 2, 3].into_iter().filter(|node| *node != leader) {
        nodes.kill(lost).await;
    }
    eventually("the leader to miss its quorum", || async { nodes.any().view().quorum().stale.then_some(()) }).await;
    let members = nodes.any().members();
    assert!(members.iter().all(|member| !member.is_leader), "{members:?}");
    nodes.node(leader).halt().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_level_is_raised_only_when_every_member_supports_it() {
    let nodes = TestCluster::found_with(|options| options.max_level = Some(1)).await;
    assert_eq!(nodes.node(1).view().level(), 1);
    let error = nodes.node(1).raise_level(2).await.unwrap_err();
    assert!(matches!(error, MemberError::FeatureLevel { node: NodeId(1), level: 2, .. }), "{error}");
    // An entry that an older node could not read never enters the log.
    let before = nodes.node(1).view().applied();
    let outcome = nodes.node(1).submit(Command::RetireNode(NodeId(9))).unwrap().await.unwrap();
    assert_eq!(outcome, Outcome::Refused(Refusal::FeatureLevelTooLow { needed: 2, current: 1 }));
    assert_eq!(nodes.node(1).view().applied(), before);
    nodes.assert_converged().await;
    nodes.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_change_that_needs_a_silent_voter_is_not_begun() {
    let mut nodes = TestCluster::three(0).await;
    let leader = nodes.leader().await;
    let lost = if leader == 3 { 2 } else { 3 };
    nodes.kill(lost).await;
    let [one, other] = [1, 2, 3].map(NodeId).into_iter().filter(|id| id.0 != lost).collect::<Vec<_>>()[..] else {
        panic!("two are left")
    };
    let stranded = nodes.node(leader).demote([one, other]).await.unwrap_err();
    assert_eq!(stranded, MemberError::NoMajority { voters: 1, answering: 0, silent: NodeId(lost) });
    let silent = nodes.node(leader).transfer_leader(NodeId(lost)).await.unwrap_err();
    assert_eq!(silent, MemberError::Unreachable(NodeId(lost)));
    nodes.node(leader).submit(open_session(1)).unwrap().await.unwrap();
    assert_eq!(nodes.leader().await, leader);
    nodes.restart(lost).await;
    nodes.assert_converged().await;
    nodes.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_voter_that_lost_acknowledged_entries_stops_with_the_reason() {
    // Only the leader that received an acknowledgement knows of it; later leaders do not.
    let mut nodes = TestCluster::three_with(0, without_elections).await;
    let leader = nodes.leader().await;
    let put_back = if leader == 3 { 2 } else { 3 };
    let write = async |nodes: &TestCluster, n: u128| nodes.node(leader).submit(open_session(n)).unwrap().await.unwrap();
    nodes.kill(put_back).await;
    let older = tempfile::tempdir().unwrap();
    let copy = |from: &Path, to: &Path| {
        let copied = process::Command::new("cp").arg("-a").arg(from.join(".")).arg(to).status();
        assert!(copied.unwrap().success());
    };
    copy(nodes.folders[&put_back].path(), older.path());
    nodes.restart(put_back).await;
    for n in 0..20 {
        write(&nodes, n).await;
    }
    nodes.assert_converged().await;
    // A lost acknowledgement does not count: the leader sends those entries again, and nothing is missing.
    let newest = nodes.node(leader).view().applied();
    eventually("the leader to hear that the last entry is there", || async {
        let member = nodes.node(leader).members().into_iter().find(|member| member.node == NodeId(put_back))?;
        (member.matched_index >= Some(newest)).then_some(())
    })
    .await;
    nodes.kill(put_back).await;
    nodes.folders.insert(put_back, older);
    let again = nodes.reopen(put_back).await;
    let failed = match again {
        Ok(node) => {
            let failed = tokio::time::timeout(PATIENCE, node.wait_for_failure()).await.expect("it notices");
            eventually("the leader to know why it does not answer", || async {
                let missed = nodes.node(leader).last_dial_error(NodeId(put_back))?;
                (missed.contains("has stopped") && missed.contains("has acknowledged entries up to")).then_some(())
            })
            .await;
            node.halt().await.unwrap();
            failed
        }
        Err(failed) => failed,
    };
    assert!(matches!(failed, LedgerNodeError::Reverted { last, acknowledged, .. } if last < acknowledged), "{failed}");
    let again = nodes.reopen(put_back).await.unwrap_err();
    assert_eq!(again.to_string(), failed.to_string(), "it may have forgotten votes, too");
    write(&nodes, 30).await;
    assert_eq!(nodes.leader().await, leader, "nobody else was elected meanwhile");
    nodes.close().await;
}
