//! Who is not let in.

use std::path::Path;

use bytes::Bytes;
use ownership::{Directory, OwnershipError, PeerError, Refusal, TlsFiles, Topic};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use vocabulary::NodeId;

use crate::nodes::{Nodes, address, eventually, open_session, options};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_of_another_cluster_is_refused_on_every_connection() {
    let mut nodes = Nodes::found().await;
    nodes.join().await;
    nodes.kill(1).await;
    // Another cluster's founder, where the first one's was.
    let folder = tempfile::tempdir().unwrap();
    let mut other = options(&folder);
    other.peering.listen = Some(nodes.addresses[&1].clone());
    let other = Directory::open(other).await.unwrap();
    let cluster = other.cluster();
    let error = eventually("the refusal", || async {
        let called = nodes.node(2).peers().call(NodeId(1), Topic::Exchange, Bytes::new()).await;
        called.err().filter(|error| matches!(error, PeerError::Refused { .. }))
    })
    .await;
    let PeerError::Refused { refusal, .. } = error else { panic!("{error}") };
    assert_eq!(refusal, Refusal::OtherCluster { cluster });
    assert_eq!(other.members().len(), 1);
    eventually("a stale view", || async { nodes.node(2).view().quorum().stale.then_some(()) }).await;
    other.close().await.unwrap();
}

/// An authority, and files for nodes on the loopback.
struct Authority(CertifiedIssuer<'static, KeyPair>);

impl Authority {
    fn new() -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        Self(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
    }

    fn files(&self, folder: &Path) -> TlsFiles {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(vec!["127.0.0.1".to_owned()]).unwrap();
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
async fn under_tls_only_who_shows_a_certificate_of_the_authority_comes_in() {
    let authority = Authority::new();
    let (first, second) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let mut founder = options(&first);
    founder.peering.tls = Some(authority.files(first.path()));
    let founder = Directory::open(founder).await.unwrap();
    let seed = address(&founder);
    let mut learner = options(&second);
    learner.peering.join = vec![seed.clone()];
    learner.peering.tls = Some(authority.files(second.path()));
    let learner = Directory::open(learner).await.unwrap();
    learner.submit(open_session(1)).unwrap().await.unwrap();

    for files in [None, Some(Authority::new())] {
        let folder = tempfile::tempdir().unwrap();
        let mut stranger = options(&folder);
        stranger.peering.join = vec![seed.clone()];
        stranger.peering.join_within = std::time::Duration::from_millis(1);
        stranger.peering.tls = files.map(|authority| authority.files(folder.path()));
        let error = Directory::open(stranger).await.unwrap_err();
        assert!(matches!(error, OwnershipError::NotJoined { .. }), "{error}");
    }
    assert_eq!(founder.members().len(), 2);
    learner.close().await.unwrap();
    founder.close().await.unwrap();
}

#[tokio::test]
async fn certificates_that_cannot_be_used_are_refused_at_start_naming_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let good = Authority::new().files(folder.path());
    std::fs::write(folder.path().join("empty.pem"), "").unwrap();
    let missing = TlsFiles { ca: folder.path().join("nowhere.pem"), ..good.clone() };
    let empty = TlsFiles { certificate: folder.path().join("empty.pem"), ..good.clone() };
    let swapped = TlsFiles { key: good.certificate.clone(), ..good };
    for (files, name) in [(missing, "nowhere.pem"), (empty, "empty.pem"), (swapped, "node.pem")] {
        let mut options = options(&folder);
        options.peering.tls = Some(files);
        let error = Directory::open(options).await.unwrap_err().to_string();
        assert!(error.contains(name) && error.contains("PEM"), "{error}");
    }
}
