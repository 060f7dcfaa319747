//! Callers that are rejected.

use std::path::Path;

use bytes::Bytes;
use ownership::{HandshakeRefusal, LedgerNodeError, OwnershipDirectory, PeerError, RouterTopic, TlsFiles};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, ExtendedKeyUsagePurpose, IsCa, KeyPair};
use vocabulary::NodeId;

use crate::nodes::{TestCluster, address, eventually, open_session, options, without_elections};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_of_another_cluster_is_refused_on_every_connection() {
    let mut nodes = TestCluster::found().await;
    nodes.join().await;
    nodes.kill(1).await;
    // Another cluster's founder at the address of the first one's.
    let folder = tempfile::tempdir().unwrap();
    let mut other = options(&folder);
    other.peering.listen = Some(nodes.addresses[&1].clone());
    let other = OwnershipDirectory::open(other).await.unwrap();
    let cluster = other.cluster();
    let error = eventually("the refusal", || async {
        let called = nodes.node(2).peers().call(NodeId(1), RouterTopic::Exchange, Bytes::new()).await;
        called.err().filter(|error| matches!(error, PeerError::Refused { .. }))
    })
    .await;
    let PeerError::Refused { refusal, .. } = error else { panic!("{error}") };
    assert_eq!(refusal, HandshakeRefusal::OtherCluster { cluster });
    assert_eq!(other.members().len(), 1);
    eventually("a stale view", || async { nodes.node(2).view().quorum().stale.then_some(()) }).await;
    other.close().await.unwrap();
}

/// Raises the limit of sockets per process: 1,100 callers and as many accepted connections.
fn raise_socket_limit() {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    let wanted = limit.maximum.unwrap_or(8_192).min(8_192);
    assert!(wanted >= 4_096, "this test needs 4,096 file handles (ulimit -Hn)");
    let raised = rustix::process::Rlimit { current: limit.current.map(|now| now.max(wanted)), ..limit };
    rustix::process::setrlimit(rustix::process::Resource::Nofile, raised).unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn idle_unknown_connections_block_no_join_or_write() {
    raise_socket_limit();
    let mut nodes = TestCluster::three_with(0, without_elections).await;
    let leader = nodes.leader().await;
    let follower = (1..=3).find(|id| *id != leader).unwrap();
    let at = address(nodes.node(leader));
    let mut idle = Vec::new();
    for _ in 0..1_100 {
        idle.push(tokio::net::TcpStream::connect(&at).await.unwrap());
    }
    // And callers that greet and then stay silent.
    for _ in 0..100 {
        idle.push(crate::wire::RawConnection::greet(&at, None, None).await.unwrap().0.into_stream());
    }
    let since = std::time::Instant::now();
    nodes.kill(follower).await;
    nodes.restart(follower).await;
    nodes.node(follower).submit(open_session(1)).unwrap().await.unwrap();
    let joined = nodes.join().await;
    nodes.node(joined).submit(open_session(2)).unwrap().await.unwrap();
    let waited = since.elapsed();
    assert!(waited < std::time::Duration::from_secs(30), "{waited:?}");
    // Most idle callers were evicted.
    let mut open = 0;
    for stream in &mut idle {
        let gone = tokio::time::timeout(std::time::Duration::from_millis(1), tokio::io::AsyncReadExt::read_u8(stream));
        open += usize::from(gone.await.is_err());
    }
    assert!(open <= 128 + 64, "{open} are still served");
    drop(idle);
    nodes.close().await;
}

/// Certificate authority, and certificate files for nodes on loopback.
pub(crate) struct TestAuthority(CertifiedIssuer<'static, KeyPair>);

impl TestAuthority {
    pub(crate) fn new() -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        Self(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
    }

    pub(crate) fn files(&self, folder: &Path) -> TlsFiles {
        self.files_for(folder, &["127.0.0.1"], |_| {})
    }

    /// Writes the files of a certificate that names these hosts.
    pub(crate) fn files_for(
        &self,
        folder: &Path,
        names: &[&str],
        change: impl FnOnce(&mut CertificateParams),
    ) -> TlsFiles {
        let key = KeyPair::generate().unwrap();
        let names = names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        let mut params = CertificateParams::new(names).unwrap();
        change(&mut params);
        let certificate = params.signed_by(&key, &self.0).unwrap();
        let file = |name: &str, text: String| {
            let path = folder.join(name);
            std::fs::write(&path, text).unwrap();
            path
        };
        TlsFiles {
            ca: file("ca.pem", self.0.pem()),
            certificate: file("node.pem", certificate.pem()),
            key: file("node.key", key.serialize_pem()),
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn with_tls_only_callers_with_a_certificate_of_the_authority_are_accepted() {
    let authority = TestAuthority::new();
    let (first, second) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let mut founder = options(&first);
    founder.peering.tls = Some(authority.files(first.path()));
    let founder = OwnershipDirectory::open(founder).await.unwrap();
    let seed = address(&founder);
    let mut learner = options(&second);
    learner.peering.join = vec![seed.clone()];
    learner.peering.tls = Some(authority.files(second.path()));
    let learner = OwnershipDirectory::open(learner).await.unwrap();
    learner.submit(open_session(1)).unwrap().await.unwrap();

    for files in [None, Some(TestAuthority::new())] {
        let folder = tempfile::tempdir().unwrap();
        let mut stranger = options(&folder);
        stranger.peering.join = vec![seed.clone()];
        stranger.peering.join_timeout = std::time::Duration::from_millis(1);
        stranger.peering.tls = files.map(|authority| authority.files(folder.path()));
        let error = OwnershipDirectory::open(stranger).await.unwrap_err();
        assert!(matches!(error, LedgerNodeError::NotJoined { .. }), "{error}");
    }
    assert_eq!(founder.members().len(), 2);
    learner.close().await.unwrap();
    founder.close().await.unwrap();
}

#[tokio::test]
async fn unusable_certificates_are_refused_at_start_with_the_file_name() {
    let folder = tempfile::tempdir().unwrap();
    let good = TestAuthority::new().files(folder.path());
    std::fs::write(folder.path().join("empty.pem"), "").unwrap();
    let missing = TlsFiles { ca: folder.path().join("nowhere.pem"), ..good.clone() };
    let empty = TlsFiles { certificate: folder.path().join("empty.pem"), ..good.clone() };
    let swapped = TlsFiles { key: good.certificate.clone(), ..good };
    for (files, name) in [(missing, "nowhere.pem"), (empty, "empty.pem"), (swapped, "node.pem")] {
        let mut options = options(&folder);
        options.peering.tls = Some(files);
        let error = OwnershipDirectory::open(options).await.unwrap_err().to_string();
        assert!(error.contains(name) && error.contains("PEM"), "{error}");
    }
}

#[tokio::test]
async fn a_certificate_that_peers_would_refuse_is_refused_at_start() {
    let folder = tempfile::tempdir().unwrap();
    let authority = TestAuthority::new();
    let at = |name: &str| {
        let path = folder.path().join(name);
        std::fs::create_dir(&path).unwrap();
        path
    };
    let misnamed = authority.files_for(&at("misnamed"), &["router-1", "10.0.0.1"], |_| {});
    let unnamed = authority.files_for(&at("unnamed"), &[], |_| {});
    let only_client = authority.files_for(&at("only-client"), &["127.0.0.1"], |params| {
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
    });
    let only_server = authority.files_for(&at("only-server"), &["127.0.0.1"], |params| {
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    });
    let good = authority.files(&at("good"));
    let of_another = TlsFiles { ca: TestAuthority::new().files(&at("other")).ca, ..good.clone() };
    for (files, told) in [
        (misnamed.clone(), ["`127.0.0.1`", "router-1, 10.0.0.1", "subjectAltName=IP:127.0.0.1"]),
        (unnamed, ["`127.0.0.1`", "names nothing", "subjectAltName=IP:127.0.0.1"]),
        (only_client, ["would refuse it", "server and a client", "extendedKeyUsage"]),
        (only_server, ["would refuse it", "server and a client", "extendedKeyUsage"]),
        (of_another, ["not signed by the authority in", "ca.pem", "would refuse it"]),
    ] {
        let certificate = files.certificate.display().to_string();
        let mut options = options(&folder);
        options.peering.tls = Some(files);
        let error = OwnershipDirectory::open(options).await.unwrap_err().to_string();
        assert!(told.iter().all(|told| error.contains(told)) && error.contains(&certificate), "{error}");
    }
    assert!(!folder.path().join("log").exists(), "nothing was founded");
    let mut advertised = options(&folder);
    advertised.peering.tls = Some(misnamed);
    advertised.peering.advertise = Some("router-1:7400".to_owned());
    OwnershipDirectory::open(advertised).await.unwrap().close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_member_with_a_refused_certificate_is_named_until_it_is_fixed() {
    let (authority, other) = (TestAuthority::new(), TestAuthority::new());
    let (first, second, third) =
        (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let mut founder = options(&first);
    founder.peering.tls = Some(authority.files(first.path()));
    let founder = OwnershipDirectory::open(founder).await.unwrap();
    let good = authority.files(second.path());
    let mut learner = options(&second);
    learner.peering.join = vec![address(&founder)];
    learner.peering.tls = Some(good.clone());
    let learner = OwnershipDirectory::open(learner).await.unwrap();
    let (at, node) = (address(&learner), learner.node());
    learner.close().await.unwrap();
    drop(learner);
    // The node trusts both authorities itself, so that it can start.
    let foreign = other.files(third.path());
    std::fs::write(&foreign.ca, format!("{}{}", authority.0.pem(), other.0.pem())).unwrap();
    let again = |files: TlsFiles| {
        let mut again = options(&second);
        again.peering.listen = Some(at.clone());
        again.peering.tls = Some(files);
        OwnershipDirectory::open(again)
    };
    let learner = again(foreign).await.unwrap();
    let told = eventually("the founder's word for it", || async {
        founder.last_dial_error(node).filter(|why| why.contains("another authority"))
    });
    told.await;
    let told = eventually("the learner's word for it", || async {
        drop(learner.peers().call(founder.node(), RouterTopic::Exchange, Bytes::new()).await);
        learner
            .last_dial_error(founder.node())
            .filter(|why| why.contains("refused this node's certificate: another authority signed it"))
    });
    told.await;
    eventually("the founder to count who knocked", || async { (founder.stats().tls_refusals > 0).then_some(()) }).await;
    learner.close().await.unwrap();
    drop(learner);
    let learner = again(good).await.unwrap();
    eventually("both talk again", || async { founder.last_dial_error(node).is_none().then_some(()) }).await;
    learner.close().await.unwrap();
    founder.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn certificates_reload_at_runtime_and_an_invalid_reload_keeps_the_last() {
    let (before, after) = (TestAuthority::new(), TestAuthority::new());
    let [first, second, third] = [(); 3].map(|()| tempfile::tempdir().unwrap());
    let mut founder = options(&first);
    let files = before.files(first.path());
    founder.peering.tls = Some(files.clone());
    let founder = OwnershipDirectory::open(founder).await.unwrap();
    let seed = address(&founder);
    let join = |authority: &TestAuthority, folder: &tempfile::TempDir| {
        let mut learner = options(folder);
        learner.peering.join = vec![seed.clone()];
        learner.peering.tls = Some(authority.files(folder.path()));
        OwnershipDirectory::open(learner)
    };
    // The new authority's certificate, with only the old one trusted: no node would accept it.
    let ca = std::fs::read(&files.ca).unwrap();
    after.files(first.path());
    std::fs::write(&files.ca, ca).unwrap();
    let message = founder.reload_certificates().unwrap_err().to_string();
    assert!(message.contains("not signed by the authority in"), "{message}");
    let trusting = join(&before, &second).await.expect("the last one is shown and trusted");
    trusting.close().await.unwrap();
    after.files(first.path());
    founder.reload_certificates().unwrap();
    let learner = join(&after, &third).await.unwrap();
    learner.submit(open_session(1)).unwrap().await.unwrap();
    learner.close().await.unwrap();
    founder.close().await.unwrap();
}
