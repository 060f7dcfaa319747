//! Messages that would stop voters for good: from callers that may not send them, and from members that send them.

use std::net::Ipv4Addr;
use std::sync::Arc;

use openraft::raft::{AppendEntriesResponse, TransferLeaderRequest, TransferLeaderResponse, VoteResponse};
use ownership::{ClusterMember, HandshakeRefusal, LedgerNodeError, OwnershipDirectory, PeerError};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

use crate::nodes::{TestCluster, address, eventually, open_session, options, without_elections};
use crate::rejected_callers::TestAuthority;
use crate::wire::{APPEND, ENROL, MEMBERS, RawConnection, TRANSFER_LEADER, VOTE, WireTypeConfig, append, vote};

/// Sends the poison messages to one node as every kind of caller that could be accepted.
async fn send_poison_messages(node: &OwnershipDirectory, known: u64) {
    let (at, cluster) = (address(node), node.cluster());
    let (_, greeted) = RawConnection::greet(&at, None, Some(known)).await.unwrap();
    assert_eq!(greeted.unwrap_err(), HandshakeRefusal::Unproven);
    let brick = |from| vote(u64::MAX, from, 1 << 62);
    // Not a member, but knows the cluster's id.
    let (mut stranger, greeted) = RawConnection::greet(&at, Some(cluster), Some(999)).await.unwrap();
    assert_eq!(greeted.unwrap().cluster, cluster);
    let refused = stranger.ask::<VoteResponse<WireTypeConfig>>(VOTE, &brick(999)).await.unwrap().unwrap_err();
    assert!(refused.to_string().contains("not a member"), "{refused}");
    // Without a node id a caller may only ask to join.
    let (mut nobody, _) = RawConnection::greet(&at, None, None).await.unwrap();
    let refused = nobody.ask::<VoteResponse<WireTypeConfig>>(VOTE, &brick(999)).await.unwrap().unwrap_err();
    assert!(refused.to_string().contains("only members"), "{refused}");
    // As a member, or as a caller that claims to be one.
    let (mut member, _) = RawConnection::greet(&at, Some(cluster), Some(known)).await.unwrap();
    let own = node.view().quorum().term;
    for term in [u64::MAX, (1 << 62) + 1, own + (1 << 20) + 1000] {
        let refused =
            member.ask::<VoteResponse<WireTypeConfig>>(VOTE, &vote(term, known, 1)).await.unwrap().unwrap_err();
        assert!(refused.to_string().contains("not believed"), "{refused}");
    }
    let refused =
        member.ask::<VoteResponse<WireTypeConfig>>(VOTE, &vote(own + 9, known, u64::MAX)).await.unwrap().unwrap_err();
    assert!(refused.to_string().contains("not believed"), "{refused}");
    let other = vote(own + 9, 998, 1);
    let error = member.ask::<VoteResponse<WireTypeConfig>>(VOTE, &other).await.unwrap().unwrap_err();
    assert!(error.to_string().contains("speaks for node 998"), "{error}");
    // Entries with a gap, or of a later term than the leader's: the log would refuse them as a broken disk.
    for (term, index) in [(own, 1 << 40), (own + 9, 0)] {
        let gap = append(own, known, (term, index));
        let error = member.ask::<AppendEntriesResponse<WireTypeConfig>>(APPEND, &gap).await.unwrap().unwrap_err();
        assert!(error.to_string().contains("not believed"), "{error}");
    }
    assert!(node.stats().implausible >= 7 && node.stats().non_member_calls >= 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_poison_frame_is_refused_by_the_only_voter_which_keeps_leading() {
    let mut nodes = TestCluster::found().await;
    let learner = nodes.join().await;
    send_poison_messages(nodes.node(1), learner).await;
    nodes.node(1).submit(open_session(1)).unwrap().await.unwrap();
    nodes.kill(1).await;
    nodes.restart(1).await;
    eventually("its own leadership", || async { nodes.node(1).view().quorum().leader.map(drop) }).await;
    nodes.node(1).submit(open_session(2)).unwrap().await.unwrap();
    nodes.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_poison_frame_is_refused_by_two_of_three_voters_which_keep_leading() {
    let nodes = TestCluster::three_with(0, without_elections).await;
    let leader = nodes.leader().await;
    let followers: Vec<u64> = (1..=3).filter(|id| *id != leader).collect();
    let term = nodes.node(leader).view().quorum().term;
    send_poison_messages(nodes.node(followers[0]), followers[1]).await;
    send_poison_messages(nodes.node(leader), followers[0]).await;
    for id in 1..=3 {
        assert_eq!(nodes.node(id).view().quorum().term, term, "node {id}");
    }
    nodes.node(followers[1]).submit(open_session(1)).unwrap().await.unwrap();
    nodes.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_vote_that_ignores_the_leader_counts_only_for_its_chosen_successor() {
    let nodes = TestCluster::three_with(0, without_elections).await;
    let leader = nodes.leader().await;
    let followers: Vec<u64> = (1..=3).filter(|id| *id != leader).collect();
    let (asked, candidate) = (nodes.node(followers[0]), followers[1]);
    let term = asked.view().quorum().term;
    let (mut caller, _) = RawConnection::greet(&address(asked), Some(asked.cluster()), Some(candidate)).await.unwrap();
    let vote = vote(term + 1, candidate, 1 << 40);
    let answer = caller.ask::<VoteResponse<WireTypeConfig>>(VOTE, &vote).await.unwrap().unwrap();
    assert!(!answer.vote_granted, "the leader is there");
    // The node may not name itself the successor.
    let transfer =
        TransferLeaderRequest::<WireTypeConfig>::new(consensus::Vote::new_committed(term, leader), candidate, None);
    let refused =
        caller.ask::<TransferLeaderResponse<WireTypeConfig>>(TRANSFER_LEADER, &transfer).await.unwrap().unwrap_err();
    assert!(refused.to_string().contains("speaks for node"), "{refused}");
    let answer = caller.ask::<VoteResponse<WireTypeConfig>>(VOTE, &vote).await.unwrap().unwrap();
    assert!(!answer.vote_granted);
    assert_eq!(nodes.leader().await, leader);
    // The leader itself may.
    nodes.node(leader).transfer_leader(vocabulary::NodeId(candidate)).await.unwrap();
    assert_eq!(nodes.leader().await, candidate);
    nodes.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_missed_its_leaders_promotion_still_follows_it() {
    let mut nodes = TestCluster::three(2).await;
    nodes.kill(3).await;
    for (old, new) in [(1, 4), (2, 5)] {
        eventually("the replacement", || async {
            let (old, new) = (vocabulary::NodeId(old), vocabulary::NodeId(new));
            let done = nodes.node(5).replace(old, new).await;
            let members = nodes.node(5).members();
            let is_voter = |member: &ClusterMember| member.node == new && member.role == ownership::MemberRole::Voter;
            (done.is_ok() || members.iter().any(is_voter)).then_some(())
        })
        .await;
    }
    nodes.node(4).submit(open_session(1)).unwrap().await.unwrap();
    nodes.restart(3).await;
    eventually("the third voter catches up", || async { (nodes.node(3).view().session_count() == 1).then_some(()) })
        .await;
    nodes.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tls_caller_is_only_the_node_whose_host_its_certificate_names() {
    let authority = TestAuthority::new();
    let [first, second, third] = [(); 3].map(|()| tempfile::tempdir().unwrap());
    let mut founder = options(&first);
    founder.peering.tls = Some(authority.files(first.path()));
    let founder = OwnershipDirectory::open(founder).await.unwrap();
    let mut learner = options(&second);
    learner.peering.listen = Some("127.0.0.2:0".into());
    learner.peering.join = vec![address(&founder)];
    learner.peering.tls = Some(authority.files_for(second.path(), &["127.0.0.2"], |_| {}));
    let learner = OwnershipDirectory::open(learner).await.unwrap();
    let id = learner.node();
    // A certificate of the same authority for another host.
    let files = authority.files_for(third.path(), &["127.0.0.3"], |_| {});
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(&files.ca).unwrap()).unwrap();
    let own = vec![CertificateDer::from_pem_file(&files.certificate).unwrap()];
    let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_client_auth_cert(own, PrivateKeyDer::from_pem_file(&files.key).unwrap())
        .unwrap();
    let stream = TcpStream::connect(address(&founder)).await.unwrap();
    let name = ServerName::from(std::net::IpAddr::from(Ipv4Addr::LOCALHOST));
    let stream = TlsConnector::from(Arc::new(config)).connect(name, stream).await.unwrap();
    let (mut impostor, _) = RawConnection::greet_over(stream, Some(founder.cluster()), Some(id.0)).await.unwrap();
    let term = founder.view().quorum().term;
    let refused =
        impostor.ask::<VoteResponse<WireTypeConfig>>(VOTE, &vote(term + 1, id.0, 1)).await.unwrap().unwrap_err();
    assert!(refused.to_string().contains("does not name the host of 127.0.0.2"), "{refused}");
    // That caller cannot announce that the node has moved there, either.
    let levels = consensus::SupportedLevels { lowest: 1, highest: ledger::NEXT_LEVEL };
    let moved = (id, "127.0.0.3:7400", levels);
    let error = impostor.ask::<Result<(), PeerError>>(ENROL, &moved).await.unwrap().unwrap_err();
    assert!(error.to_string().contains("does not name the host of 127.0.0.2"), "{error}");
    assert_eq!(impostor.ask::<Vec<ClusterMember>>(MEMBERS, &()).await.unwrap().unwrap().len(), 2);
    assert!(founder.stats().non_member_calls >= 2);
    // The node itself moves with a certificate that names both hosts.
    learner.close().await.unwrap();
    drop(learner);
    let mut moved = options(&second);
    moved.peering.listen = Some("127.0.0.3:0".into());
    moved.peering.tls = Some(authority.files_for(second.path(), &["127.0.0.2", "127.0.0.3"], |_| {}));
    let moved = OwnershipDirectory::open(moved).await.unwrap();
    eventually("the new address", || async {
        let members = founder.members();
        members.iter().any(|member| member.node == id && member.address.starts_with("127.0.0.3:")).then_some(())
    })
    .await;
    moved.submit(open_session(1)).unwrap().await.unwrap();
    moved.close().await.unwrap();
    founder.close().await.unwrap();
}

#[tokio::test]
async fn without_tls_a_node_listens_on_loopback_unless_insecure_is_set() {
    let folder = tempfile::tempdir().unwrap();
    let mut open = options(&folder);
    open.peering.listen = Some("0.0.0.0:0".into());
    open.peering.advertise = Some("router-1:7400".into());
    let error = OwnershipDirectory::open(open.clone()).await.unwrap_err();
    assert!(matches!(error, LedgerNodeError::Options(_)), "{error}");
    for setting in ["cluster.listen", "cluster.tls", "cluster.allow_plaintext"] {
        assert!(error.to_string().contains(setting), "{error}");
    }
    assert!(!folder.path().join("log").exists(), "nothing was founded");
    open.peering.insecure = true;
    OwnershipDirectory::open(open).await.unwrap().close().await.unwrap();
}
