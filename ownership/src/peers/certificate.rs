//! Checks of certificates, as other nodes will make them: of this node's own before it calls anybody, and as an
//! explanation when another node's is refused. Authentication itself is rustls' task.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use rustls_pki_types::{CertificateDer, ServerName, UnixTime};
use tokio_rustls::rustls::client::danger::ServerCertVerifier;
use tokio_rustls::rustls::client::{WebPkiServerVerifier, verify_server_name};
use tokio_rustls::rustls::crypto::CryptoProvider;
use tokio_rustls::rustls::server::danger::ClientCertVerifier;
use tokio_rustls::rustls::server::{ParsedCertificate, WebPkiClientVerifier};
use tokio_rustls::rustls::{AlertDescription, CertificateError, Error, RootCertStore};

use crate::error::LedgerNodeError;

/// Files with a node's certificate and the authority that it trusts. All PEM.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TlsFiles {
    /// Certificates of the authority that signed every node's certificate.
    pub ca: PathBuf,
    /// This node's certificate, followed by intermediate ones. It must name the host or IP that others dial, and be
    /// valid for server and client authentication.
    pub certificate: PathBuf,
    /// Private key of the certificate.
    pub key: PathBuf,
}

/// Returns the host name or IP under which a node with this address is dialled.
pub(crate) fn host(address: &str) -> &str {
    let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
    host.trim_start_matches('[').trim_end_matches(']')
}

/// Checks that other nodes make when they call this node and when it calls them.
pub(crate) struct CertificateVerifiers {
    server: Arc<dyn ServerCertVerifier>,
    client: Arc<dyn ClientCertVerifier>,
}

impl CertificateVerifiers {
    /// Creates verifiers that trust this authority.
    pub(crate) fn new(
        roots: &Arc<RootCertStore>,
        provider: &Arc<CryptoProvider>,
    ) -> Result<Self, Box<dyn std::error::Error>> {
        Ok(Self {
            server: WebPkiServerVerifier::builder_with_provider(roots.clone(), provider.clone()).build()?,
            client: WebPkiClientVerifier::builder_with_provider(roots.clone(), provider.clone()).build()?,
        })
    }

    /// Refuses a certificate chain that others would refuse at `address`. A chain that is not valid yet or has expired
    /// causes only a warning: the clock may be wrong, and a router without its quorum still serves.
    pub(crate) fn check(
        &self,
        files: &TlsFiles,
        chain: &[CertificateDer<'_>],
        address: &str,
    ) -> Result<(), LedgerNodeError> {
        let host = host(address);
        let path = files.certificate.display();
        let refused = |why: String| LedgerNodeError::Options(format!("cluster.tls.certificate {path}: {why}"));
        let name = ServerName::try_from(host);
        let name =
            name.map_err(|_| refused(format!("no certificate can name `{host}`, which is no host and no IP")))?;
        let (own, leading) = chain.split_first().ok_or_else(|| refused("it is empty".into()))?;
        let parsed = ParsedCertificate::try_from(own).map_err(|error| refused(error.to_string()))?;
        if let Err(error) = verify_server_name(&parsed, &name) {
            let found = match &error {
                Error::InvalidCertificate(CertificateError::NotValidForNameContext { presented, .. }) => {
                    display_names(presented)
                }
                other => other.to_string(),
            };
            let kind = if matches!(name, ServerName::IpAddress(_)) { "IP" } else { "DNS" };
            return Err(refused(format!(
                "other nodes dial this one as `{host}` (cluster.advertise, else cluster.listen) and would refuse it: it \
                 names {found}. Let the authority sign one with subjectAltName={kind}:{host}, or advertise a name that it has"
            )));
        }
        let now = UnixTime::now();
        let as_server = self.server.verify_server_cert(own, leading, &name, &[], now).map(drop);
        let as_client = self.client.verify_client_cert(own, leading, now).map(drop);
        for judged in [as_server, as_client] {
            match judged {
                Ok(()) => {}
                Err(Error::InvalidCertificate(error)) if is_expiry(&error) => {
                    tracing::warn!(%error, certificate = %path, "other nodes will refuse this node's certificate");
                }
                Err(Error::InvalidCertificate(error)) if is_foreign_authority(&error) => {
                    let ca = files.ca.display();
                    return Err(refused(format!(
                        "it was not signed by the authority in {ca}, nor does it carry what leads there; other nodes \
                         would refuse it"
                    )));
                }
                Err(error) => {
                    return Err(refused(format!(
                        "other nodes would refuse it: {error}. It has to be good for a server and a client \
                         (extendedKeyUsage=serverAuth,clientAuth)"
                    )));
                }
            }
        }
        Ok(())
    }
}

fn is_expiry(error: &CertificateError) -> bool {
    use CertificateError::{Expired, ExpiredContext, NotValidYet, NotValidYetContext};
    matches!(error, Expired | ExpiredContext { .. } | NotValidYet | NotValidYetContext { .. })
}

/// Returns whether another authority signed the certificate. An authority with the same name but another key shows up
/// as a bad signature.
fn is_foreign_authority(error: &CertificateError) -> bool {
    matches!(error, CertificateError::UnknownIssuer | CertificateError::BadSignature)
}

/// Formats `DnsName("a")` and `IpAddress(10.0.0.1)` for people.
fn display_names(presented: &[String]) -> String {
    let plain = |name: &String| {
        let inner = name.split_once('(').map_or(name.as_str(), |(_, inner)| inner);
        inner.trim_end_matches(')').trim_matches('"').to_owned()
    };
    match presented {
        [] => "nothing (it has no subjectAltName)".to_owned(),
        all => all.iter().map(plain).collect::<Vec<_>>().join(", "),
    }
}

/// Returns the TLS error of this or the other side; `None` if the failure was not one of TLS.
pub(crate) fn tls_complaint(error: &io::Error) -> Option<String> {
    let error = error.get_ref()?.downcast_ref::<Error>()?;
    Some(match error {
        Error::InvalidCertificate(CertificateError::NotValidForNameContext { expected, presented }) => {
            let (wanted, found) = (expected.to_str(), display_names(presented));
            format!("its certificate does not name `{wanted}`, under which it was called: it names {found}")
        }
        Error::InvalidCertificate(error) if is_foreign_authority(error) => {
            "its certificate was signed by another authority than the one in cluster.tls.ca here".into()
        }
        Error::InvalidCertificate(error) => format!("its certificate is refused: {error}"),
        Error::NoCertificatesPresented => "it showed no certificate, and cluster.tls asks for one".into(),
        Error::AlertReceived(alert) => {
            format!("{} (TLS alert {alert:?}); its own log may say more", explain_alert(*alert))
        }
        Error::InvalidMessage(_) | Error::InappropriateMessage { .. } => {
            "it does not speak TLS: cluster.tls is needed at every node or at none".into()
        }
        other => format!("TLS failed: {other}"),
    })
}

/// Explains the other side's TLS alert and what to fix.
fn explain_alert(alert: AlertDescription) -> &'static str {
    use AlertDescription as Alert;
    match alert {
        // An authority with the same name but another key shows up as a bad signature.
        Alert::UnknownCA | Alert::DecryptError => {
            "it refused this node's certificate: another authority signed it than the one in cluster.tls.ca there"
        }
        Alert::CertificateExpired => {
            "it refused this node's certificate: it is expired, or not valid yet, by the clock there"
        }
        Alert::CertificateRevoked => "it refused this node's certificate: it was revoked",
        Alert::UnsupportedCertificate => {
            "it refused this node's certificate: it has to be good for a server and a client \
             (extendedKeyUsage=serverAuth,clientAuth)"
        }
        Alert::BadCertificate | Alert::CertificateUnknown | Alert::AccessDenied => {
            "it refused this node's certificate: see that it names the address that others dial, and is whole"
        }
        Alert::CertificateRequired | Alert::NoCertificate => {
            "it asks for a certificate, and this node showed none that it asked for: set cluster.tls, with one of its authority"
        }
        Alert::HandshakeFailure | Alert::InsufficientSecurity => {
            "both have no cipher or signature scheme in common: see what signed the certificates, and what is between both"
        }
        Alert::ProtocolVersion => "both have no version of TLS in common: 1.2 and 1.3 are spoken here",
        Alert::UnrecognisedName => "it knows no certificate for the name under which it was called",
        Alert::InternalError => "it failed by itself",
        _ => "it broke off TLS",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tls_alerts_are_explained_with_their_fix() {
        let complaint = |alert| tls_complaint(&io::Error::other(Error::AlertReceived(alert))).unwrap();
        for (alert, words) in [
            (AlertDescription::UnknownCA, "another authority"),
            (AlertDescription::DecryptError, "another authority"),
            (AlertDescription::CertificateExpired, "expired, or not valid yet"),
            (AlertDescription::CertificateRevoked, "revoked"),
            (AlertDescription::UnsupportedCertificate, "extendedKeyUsage=serverAuth,clientAuth"),
            (AlertDescription::BadCertificate, "names the address"),
            (AlertDescription::CertificateRequired, "showed none"),
            (AlertDescription::HandshakeFailure, "no cipher"),
            (AlertDescription::ProtocolVersion, "no version of TLS"),
        ] {
            let complaint = complaint(alert);
            assert!(complaint.contains(words) && complaint.contains(&format!("TLS alert {alert:?}")), "{complaint}");
        }
        for alert in
            [AlertDescription::HandshakeFailure, AlertDescription::ProtocolVersion, AlertDescription::InternalError]
        {
            assert!(!complaint(alert).contains("refused this node's certificate"), "{}", complaint(alert));
        }
    }

    #[test]
    fn certificate_names_print_as_hosts_and_addresses() {
        let found = ["DnsName(\"router-1\")".to_owned(), "IpAddress(10.0.0.1)".to_owned()];
        assert_eq!(display_names(&found), "router-1, 10.0.0.1");
        assert!(display_names(&[]).contains("no subjectAltName"));
        assert_eq!((host("[::1]:7400"), host("router-1:7400"), host("alone")), ("::1", "router-1", "alone"));
    }

    #[test]
    fn only_tls_errors_are_certificate_complaints() {
        assert_eq!(tls_complaint(&io::Error::other("broken pipe")), None);
        assert_eq!(tls_complaint(&io::ErrorKind::ConnectionRefused.into()), None);
        let none = io::Error::other(Error::NoCertificatesPresented);
        assert!(tls_complaint(&none).unwrap().contains("no certificate"));
    }
}
