//! Mutual TLS between nodes: both sides must present a certificate of the same authority.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use arc_swap::ArcSwap;
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_rustls::rustls::crypto::{CryptoProvider, ring};
use tokio_rustls::rustls::server::WebPkiClientVerifier;
use tokio_rustls::rustls::{ClientConfig, RootCertStore, ServerConfig};
use tokio_rustls::{TlsAcceptor, TlsConnector};

use crate::error::LedgerNodeError;
use crate::peers::certificate::{CertificateVerifiers, TlsFiles, host};

/// Bidirectional byte stream.
pub(crate) trait ByteStream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> ByteStream for T {}

/// TLS settings of this node for both directions. Clones share them.
#[derive(Clone)]
pub(crate) struct PeerTls {
    files: TlsFiles,
    /// Address under which others dial this node.
    address: String,
    endpoints: Arc<ArcSwap<TlsEndpoints>>,
}

/// TLS configurations made from the files.
struct TlsEndpoints {
    acceptor: TlsAcceptor,
    connector: TlsConnector,
}

impl fmt::Debug for PeerTls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Tls")
    }
}

impl PeerTls {
    /// Loads the files, and checks that other nodes will accept the certificate at `address`.
    pub(crate) fn load(files: &TlsFiles, address: &str) -> Result<Self, LedgerNodeError> {
        let sides = Arc::new(ArcSwap::from_pointee(TlsEndpoints::load(files, address)?));
        Ok(Self { files: files.clone(), address: address.to_owned(), endpoints: sides })
    }

    /// Reloads the files for new connections. If they are unusable, or others would refuse them, the old ones stay.
    pub(crate) fn reload(&self) -> Result<(), LedgerNodeError> {
        self.endpoints.store(Arc::new(TlsEndpoints::load(&self.files, &self.address)?));
        Ok(())
    }

    /// Performs the client's handshake with `address`.
    pub(crate) async fn connect(
        &self,
        address: &str,
        stream: Box<dyn ByteStream>,
    ) -> std::io::Result<Box<dyn ByteStream>> {
        let name = ServerName::try_from(host(address).to_owned()).map_err(std::io::Error::other)?;
        let connector = self.endpoints.load().connector.clone();
        let connected = connector.connect(name, stream).await;
        connected.map(|stream| Box::new(stream) as Box<dyn ByteStream>)
    }

    /// Performs the server's handshake; refuses callers without a certificate of the authority. Returns the presented
    /// certificate, too.
    pub(crate) async fn accept(
        &self,
        stream: Box<dyn ByteStream>,
    ) -> std::io::Result<(Box<dyn ByteStream>, CertificateDer<'static>)> {
        let acceptor = self.endpoints.load().acceptor.clone();
        let accepted = acceptor.accept(stream).await?;
        let shown = accepted.get_ref().1.peer_certificates().and_then(|chain| chain.first()).cloned();
        let shown = shown.ok_or_else(|| std::io::Error::other("it showed no certificate"))?;
        Ok((Box::new(accepted), shown))
    }
}

impl TlsEndpoints {
    fn load(files: &TlsFiles, address: &str) -> Result<Self, LedgerNodeError> {
        let provider = Arc::new(ring::default_provider());
        let authority = certificates(&files.ca)?;
        let mut roots = RootCertStore::empty();
        for certificate in authority {
            roots.add(certificate).map_err(|error| invalid_file_error(&files.ca, &error))?;
        }
        let roots = Arc::new(roots);
        let own = certificates(&files.certificate)?;
        let key = PrivateKeyDer::from_pem_file(&files.key).map_err(|error| invalid_file_error(&files.key, &error))?;
        let judges =
            CertificateVerifiers::new(&roots, &provider).map_err(|error| invalid_file_error(&files.ca, &error))?;
        let server = server_config(provider.clone(), roots.clone(), (own.clone(), key.clone_key()));
        let server = server.map_err(|error| invalid_file_error(&files.certificate, &error))?;
        judges.check(files, &own, address)?;
        let client = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map(|builder| builder.with_root_certificates(roots))
            .and_then(|builder| builder.with_client_auth_cert(own, key))
            .map_err(|error| invalid_file_error(&files.certificate, &error))?;
        Ok(Self { acceptor: TlsAcceptor::from(Arc::new(server)), connector: TlsConnector::from(Arc::new(client)) })
    }
}

type CertificateAndKey = (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>);

fn server_config(
    provider: Arc<CryptoProvider>,
    roots: Arc<RootCertStore>,
    (own, key): CertificateAndKey,
) -> Result<ServerConfig, Box<dyn std::error::Error>> {
    let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider.clone()).build()?;
    let builder = ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions()?;
    Ok(builder.with_client_cert_verifier(verifier).with_single_cert(own, key)?)
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, LedgerNodeError> {
    let read = CertificateDer::pem_file_iter(path).map_err(|error| invalid_file_error(path, &error))?;
    let all: Vec<_> = read.collect::<Result<_, _>>().map_err(|error| invalid_file_error(path, &error))?;
    if all.is_empty() { Err(invalid_file_error(path, &"there is no certificate in it")) } else { Ok(all) }
}

fn invalid_file_error(path: &Path, why: &dyn fmt::Display) -> LedgerNodeError {
    LedgerNodeError::Options(format!("{}: {why}; PEM files are needed for ca, certificate and key", path.display()))
}
