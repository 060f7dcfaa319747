//! Exposed listeners, which strangers on the network can use or overhear: logged at start, and shown in red by
//! `ctl cluster status`.
//!
//! Decides from the configuration alone and refuses nothing: a firewall or a proxy in front may make it safe.

use std::net::SocketAddr;

use crate::config::Config;
use crate::operator::exposure::{
    CLIENTS_NO_TLS, CLIENTS_UNAUTHENTICATED, ExposedListener, OPERATORS_NO_TLS, OPERATORS_UNAUTHENTICATED,
};

/// Returns the exposed listeners.
pub(crate) fn exposures(config: &Config) -> Vec<ExposedListener> {
    let is_reached = |address: SocketAddr| !address.ip().to_canonical().is_loopback();
    let mut found = Vec::new();
    if is_reached(config.proxy.listen) {
        match (&config.auth.keys_file, config.client_scheme()) {
            (None, _) => found.push(CLIENTS_UNAUTHENTICATED),
            (Some(_), "http") => found.push(CLIENTS_NO_TLS),
            (Some(_), _) => {}
        }
    }
    if is_reached(config.operator.listen) {
        match (&config.operator.tokens_file, config.operator_scheme()) {
            (None, _) => found.push(OPERATORS_UNAUTHENTICATED),
            (Some(_), "http") => found.push(OPERATORS_NO_TLS),
            (Some(_), _) => {}
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Overrides;

    fn exposed(settings: &[&str]) -> Vec<ExposedListener> {
        let settings = settings.iter().map(|setting| (*setting).to_owned()).collect();
        exposures(&Config::load(None, &Overrides { settings, workers: Vec::new() }).unwrap())
    }

    #[test]
    fn loopback_listeners_are_not_exposed() {
        assert_eq!(exposed(&[]), []);
        assert_eq!(exposed(&["proxy.listen=[::1]:1", "operator.listen=127.0.0.9:1"]), []);
        assert_eq!(exposed(&["proxy.listen=[::ffff:127.0.0.1]:1"]), []);
    }

    #[test]
    fn network_listeners_are_exposed_without_keys_or_tls() {
        let network = ["proxy.listen=0.0.0.0:1", "operator.listen=[::]:1"];
        assert_eq!(exposed(&network), [CLIENTS_UNAUTHENTICATED, OPERATORS_UNAUTHENTICATED]);
        let guarded = [&network[..], &["auth.keys_file=k", "operator.tokens_file=t"]].concat();
        assert_eq!(exposed(&guarded), [CLIENTS_NO_TLS, OPERATORS_NO_TLS]);
        let with_tls = [&guarded[..], &["operator.tls={certificate=\"c\", key=\"k\"}"]].concat();
        assert_eq!(exposed(&with_tls), [CLIENTS_NO_TLS]);
        let with_both = [&with_tls[..], &["proxy.tls={certificate=\"c\", key=\"k\"}"]].concat();
        assert_eq!(exposed(&with_both), []);
        assert_eq!(exposed(&["proxy.listen=10.0.0.7:1"]), [CLIENTS_UNAUTHENTICATED], "one says nothing of the other");
        for exposure in [CLIENTS_UNAUTHENTICATED, CLIENTS_NO_TLS, OPERATORS_UNAUTHENTICATED, OPERATORS_NO_TLS] {
            assert!(exposure.detail.contains("set "), "{}", exposure.detail);
        }
    }
}
