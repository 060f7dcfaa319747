//! Who belongs to a cluster, and how that changes.

use ownership::{Consistency, MemberError, Standing};
use vocabulary::{NodeId, SessionId};

use crate::nodes::{Nodes, open_session};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_becomes_three_with_a_learner_and_two_are_refused() {
    let mut nodes = Nodes::found().await;
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
    let standing: Vec<_> = members.iter().map(|member| (member.node.0, member.voter)).collect();
    use Standing::{Learner, Voter};
    assert_eq!(standing, [(1, Voter), (2, Voter), (3, Voter), (4, Learner)]);
    assert!(members.iter().all(|member| member.matched.is_some() && member.level.is_some()), "{members:?}");
    nodes.converge().await;
    nodes.close().await;
}
