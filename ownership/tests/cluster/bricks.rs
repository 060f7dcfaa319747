//! Messages that would stop voters for good, from callers that may not say them and from members that say them.

use std::net::Ipv4Addr;
use std::sync::Arc;

use openraft::raft::{TransferLeaderRequest, TransferLeaderResponse, VoteResponse};
use ownership::{Directory, Member, OwnershipError, PeerError, Refusal};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

use crate::nodes::{Nodes, address, eventually, open_session, options, steady};
use crate::strangers::Authority;
use crate::wire::{ENROL, MEMBERS, TRANSFER_LEADER, Types, VOTE, Wire, vote};

/// Says to one node what the audit's caller said, in every way in which it could be let in.
async fn brick(node: &Directory, known: u64) {
    let (at, cluster) = (address(node), node.cluster());
    let (_, greeted) = Wire::greet(&at, None, Some(known)).await.unwrap();
    assert_eq!(greeted.unwrap_err(), Refusal::Unproven);
    let brick = |from| vote(u64::MAX, from, 1 << 62);
    // Not a member, but in possession of the cluster's id.
    let (mut stranger, greeted) = Wire::greet(&at, Some(cluster), Some(999)).await.unwrap();
    assert_eq!(greeted.unwrap().cluster, cluster);
    let refused = stranger.ask::<VoteResponse<Types>>(VOTE, &brick(999)).await.unwrap().unwrap_err();
    assert!(refused.to_string().contains("not a member"), "{refused}");
    // Without an id, it may only ask to join.
    let (mut nobody, _) = Wire::greet(&at, None, None).await.unwrap();
    let refused = nobody.ask::<VoteResponse<Types>>(VOTE, &brick(999)).await.unwrap().unwrap_err();
    assert!(refused.to_string().contains("only members"), "{refused}");
    // As a member, or who says that it is one.
    let (mut member, _) = Wire::greet(&at, Some(cluster), Some(known)).await.unwrap();
    let own = node.view().quorum().term;
    for term in [u64::MAX, (1 << 62) + 1, own + (1 << 20) + 1000] {
        let refused = member.ask::<VoteResponse<Types>>(VOTE, &vote(term, known, 1)).await.unwrap().unwrap_err();
        assert!(refused.to_string().contains("not believed"), "{refused}");
    }
    let refused = member.ask::<VoteResponse<Types>>(VOTE, &vote(own + 9, known, u64::MAX)).await.unwrap().unwrap_err();
    assert!(refused.to_string().contains("not believed"), "{refused}");
    let other = vote(own + 9, 998, 1);
    let refused = member.ask::<VoteResponse<Types>>(VOTE, &other).await.unwrap().unwrap_err();
    assert!(refused.to_string().contains("speaks for node 998"), "{refused}");
    assert!(node.readings().implausible >= 5 && node.readings().outsiders >= 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_frame_that_would_end_elections_is_refused_by_the_only_voter_which_leads_on() {
    let mut nodes = Nodes::found().await;
    let learner = nodes.join().await;
    brick(nodes.node(1), learner).await;
    nodes.node(1).submit(open_session(1)).unwrap().await.unwrap();
    nodes.kill(1).await;
    nodes.restart(1).await;
    eventually("its own leadership", || async { nodes.node(1).view().quorum().leader.map(drop) }).await;
    nodes.node(1).submit(open_session(2)).unwrap().await.unwrap();
    nodes.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_frame_that_would_end_elections_is_refused_by_two_voters_of_three_which_lead_on() {
    let nodes = Nodes::three_with(0, steady).await;
    let leader = nodes.leader().await;
    let followers: Vec<u64> = (1..=3).filter(|id| *id != leader).collect();
    let term = nodes.node(leader).view().quorum().term;
    brick(nodes.node(followers[0]), followers[1]).await;
    brick(nodes.node(leader), followers[0]).await;
    for id in 1..=3 {
        assert_eq!(nodes.node(id).view().quorum().term, term, "node {id}");
    }
    nodes.node(followers[1]).submit(open_session(1)).unwrap().await.unwrap();
    nodes.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_vote_that_ignores_the_leader_counts_only_for_whom_the_leader_named() {
    let nodes = Nodes::three_with(0, steady).await;
    let leader = nodes.leader().await;
    let followers: Vec<u64> = (1..=3).filter(|id| *id != leader).collect();
    let (asked, candidate) = (nodes.node(followers[0]), followers[1]);
    let term = asked.view().quorum().term;
    let (mut caller, _) = Wire::greet(&address(asked), Some(asked.cluster()), Some(candidate)).await.unwrap();
    let vote = vote(term + 1, candidate, 1 << 40);
    let answer = caller.ask::<VoteResponse<Types>>(VOTE, &vote).await.unwrap().unwrap();
    assert!(!answer.vote_granted, "the leader is there");
    // Nor may it name itself.
    let transfer = TransferLeaderRequest::<Types>::new(consensus::Vote::new_committed(term, leader), candidate, None);
    let refused = caller.ask::<TransferLeaderResponse<Types>>(TRANSFER_LEADER, &transfer).await.unwrap().unwrap_err();
    assert!(refused.to_string().contains("speaks for node"), "{refused}");
    let answer = caller.ask::<VoteResponse<Types>>(VOTE, &vote).await.unwrap().unwrap();
    assert!(!answer.vote_granted);
    assert_eq!(nodes.leader().await, leader);
    // The leader itself does.
    nodes.node(leader).transfer_leader(vocabulary::NodeId(candidate)).await.unwrap();
    assert_eq!(nodes.leader().await, candidate);
    nodes.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_missed_who_its_leader_became_follows_it_all_the_same() {
    let mut nodes = Nodes::three(2).await;
    nodes.kill(3).await;
    for (old, new) in [(1, 4), (2, 5)] {
        eventually("the replacement", || async {
            let (old, new) = (vocabulary::NodeId(old), vocabulary::NodeId(new));
            let done = nodes.node(5).replace(old, new).await;
            let members = nodes.node(5).members();
            let is_voter = |member: &Member| member.node == new && member.voter == ownership::Standing::Voter;
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
async fn under_tls_a_certificate_makes_a_caller_only_the_node_whose_host_it_names() {
    let authority = Authority::new();
    let [first, second, third] = [(); 3].map(|()| tempfile::tempdir().unwrap());
    let mut founder = options(&first);
    founder.peering.tls = Some(authority.files(first.path()));
    let founder = Directory::open(founder).await.unwrap();
    let mut learner = options(&second);
    learner.peering.listen = Some("127.0.0.2:0".into());
    learner.peering.join = vec![address(&founder)];
    learner.peering.tls = Some(authority.files_for(second.path(), &["127.0.0.2"], |_| {}));
    let learner = Directory::open(learner).await.unwrap();
    let id = learner.node();
    // A member's certificate of the same authority, for another host.
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
    let (mut impostor, _) = Wire::greet_over(stream, Some(founder.cluster()), Some(id.0)).await.unwrap();
    let term = founder.view().quorum().term;
    let refused = impostor.ask::<VoteResponse<Types>>(VOTE, &vote(term + 1, id.0, 1)).await.unwrap().unwrap_err();
    assert!(refused.to_string().contains("does not name the host of 127.0.0.2"), "{refused}");
    // Nor can it say that the node has moved there.
    let levels = consensus::Levels { lowest: 1, highest: ledger::NEXT_LEVEL };
    let moved = (id, "127.0.0.3:7400", levels);
    let refused = impostor.ask::<Result<(), PeerError>>(ENROL, &moved).await.unwrap().unwrap_err();
    assert!(refused.to_string().contains("does not name the host of 127.0.0.2"), "{refused}");
    assert_eq!(impostor.ask::<Vec<Member>>(MEMBERS, &()).await.unwrap().unwrap().len(), 2);
    assert!(founder.readings().outsiders >= 2);
    // The node itself moves with a certificate that names both.
    learner.close().await.unwrap();
    drop(learner);
    let mut moved = options(&second);
    moved.peering.listen = Some("127.0.0.3:0".into());
    moved.peering.tls = Some(authority.files_for(second.path(), &["127.0.0.2", "127.0.0.3"], |_| {}));
    let moved = Directory::open(moved).await.unwrap();
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
async fn without_certificates_only_the_loopback_is_listened_on_unless_that_is_asked_for() {
    let folder = tempfile::tempdir().unwrap();
    let mut open = options(&folder);
    open.peering.listen = Some("0.0.0.0:0".into());
    open.peering.advertise = Some("router-1:7400".into());
    let error = Directory::open(open.clone()).await.unwrap_err();
    assert!(matches!(error, OwnershipError::Options(_)), "{error}");
    for setting in ["cluster.listen", "cluster.tls", "cluster.insecure"] {
        assert!(error.to_string().contains(setting), "{error}");
    }
    assert!(!folder.path().join("log").exists(), "nothing was founded");
    open.peering.insecure = true;
    Directory::open(open).await.unwrap().close().await.unwrap();
}
