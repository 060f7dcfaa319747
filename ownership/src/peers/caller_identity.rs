//! Identity of a caller, as far as its connection proves it.

use rustls_pki_types::{CertificateDer, ServerName};
use tokio_rustls::rustls::client::verify_server_name;
use tokio_rustls::rustls::server::ParsedCertificate;

use crate::peers::certificate::host;
use crate::peers::handshake::Hello;

/// The remote side of an accepted connection.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct CallerIdentity {
    pub(crate) hello: Hello,
    /// Certificate that it presented; `None` without TLS.
    pub(crate) certificate: Option<CertificateDer<'static>>,
}

impl CallerIdentity {
    /// Returns whether its certificate names the host of this address. Without TLS nothing is proven, and every caller
    /// is trusted.
    pub(crate) fn certificate_covers(&self, address: &str) -> bool {
        let Some(certificate) = &self.certificate else { return true };
        let Ok(name) = ServerName::try_from(host(address)) else { return false };
        ParsedCertificate::try_from(certificate).is_ok_and(|parsed| verify_server_name(&parsed, &name).is_ok())
    }
}

#[cfg(test)]
mod tests {
    use consensus::SupportedLevels;

    use super::*;
    use crate::peers::handshake::{Lane, PROTOCOL};

    #[test]
    fn a_certificate_covers_only_the_hosts_it_names() {
        let names = ["router-1".to_owned(), "10.0.0.1".to_owned(), "*.fleet.internal".to_owned()];
        let signed = rcgen::generate_simple_self_signed(names).unwrap();
        let levels = SupportedLevels { lowest: 1, highest: 1 };
        let hello = Hello { protocol: PROTOCOL, cluster: None, node: None, to: None, levels, lane: Lane::Call };
        let caller = CallerIdentity { hello, certificate: Some(signed.cert.der().clone()) };
        for address in ["router-1:7400", "10.0.0.1:1", "a.fleet.internal:7400"] {
            assert!(caller.certificate_covers(address), "{address}");
        }
        for address in ["router-2:7400", "10.0.0.2:1", "a.b.fleet.internal:7400", "", ":7400"] {
            assert!(!caller.certificate_covers(address), "{address}");
        }
        assert!(CallerIdentity { certificate: None, ..caller }.certificate_covers("router-2:7400"));
    }
}
