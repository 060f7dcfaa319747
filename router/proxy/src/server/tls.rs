//! TLS of a listener: a certificate and its key, reloaded when the files change.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use serde::Deserialize;

use crate::watched_files::{FileStamp, ReloadReporter, follow, stamp_of};

/// TLS of a listener, sections `[proxy.tls]` and `[operator.tls]`: PEM files.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ListenerTlsConfig {
    /// The certificate, followed by its chain. It must name the host or IP address that clients dial.
    pub certificate: PathBuf,
    /// Its private key.
    pub key: PathBuf,
}

/// A certificate that cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("{}: {why}; PEM files are needed, a certificate and the private key that belongs to it", path.display())]
pub struct TlsError {
    path: PathBuf,
    why: String,
}

/// The certificate that a listener presents to its clients.
#[derive(Debug)]
pub struct ListenerTls {
    config: ListenerTlsConfig,
    stamps: [Option<FileStamp>; 2],
    resolver: Arc<CertificateResolver>,
}

#[derive(Debug)]
struct CertificateResolver(ArcSwap<CertifiedKey>);

impl ResolvesServerCert for CertificateResolver {
    fn resolve(&self, _hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.0.load_full())
    }
}

impl ListenerTls {
    /// Reads and checks the files.
    pub fn load(config: &ListenerTlsConfig) -> Result<Self, TlsError> {
        let stamps = stamps(config);
        let shown = Arc::new(CertificateResolver(ArcSwap::from_pointee(read(config)?)));
        Ok(Self { config: config.clone(), stamps, resolver: shown })
    }

    pub(super) fn server(&self) -> Arc<rustls::ServerConfig> {
        let config = rustls::ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .expect("ring supports the default TLS versions")
            .with_no_client_auth()
            .with_cert_resolver(self.resolver.clone());
        Arc::new(config)
    }

    /// Reloads the files whenever they change. Logs files that cannot be used, and keeps the last certificate.
    pub async fn watch_files(self: Arc<Self>, every: Duration, files: ReloadReporter) {
        let Self { config, stamps, resolver: shown } = &*self;
        let take = || {
            shown.0.store(Arc::new(read(config)?));
            tracing::info!(certificate = %config.certificate.display(), "the certificate was read anew");
            Ok::<_, TlsError>(())
        };
        follow((*stamps, || self::stamps(config)), (every, &files), take).await;
    }
}

fn stamps(config: &ListenerTlsConfig) -> [Option<FileStamp>; 2] {
    [stamp_of(&config.certificate), stamp_of(&config.key)]
}

fn read(config: &ListenerTlsConfig) -> Result<CertifiedKey, TlsError> {
    let refused = |path: &Path, why: &dyn std::fmt::Display| TlsError { path: path.to_owned(), why: why.to_string() };
    let chain = certificates(&config.certificate)?;
    let key = PrivateKeyDer::from_pem_file(&config.key).map_err(|error| refused(&config.key, &error))?;
    let key = CertifiedKey::from_der(chain, key, &ring::default_provider());
    key.map_err(|error| refused(&config.certificate, &error))
}

/// Reads the certificates of a PEM file, at least one.
pub fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let refused = |why: &dyn std::fmt::Display| TlsError { path: path.to_owned(), why: why.to_string() };
    let read = CertificateDer::pem_file_iter(path).map_err(|error| refused(&error))?;
    let all: Vec<_> = read.collect::<Result<_, _>>().map_err(|error| refused(&error))?;
    if all.is_empty() { Err(refused(&"there is no certificate in it")) } else { Ok(all) }
}
