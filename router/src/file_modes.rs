//! Checks for files with secrets that other users of this machine can read. Only warns: container platforms mount
//! secrets with modes of their own.

use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use crate::config::Config;
use proxy::shared_cache::RedisUrl;

/// Returns the files with keys, tokens and private keys that `config` names, each with its setting.
fn secret_files(config: &Config) -> impl Iterator<Item = (&'static str, &Path)> {
    let proxy_key = config.proxy.tls.as_ref().map(|tls| &tls.key);
    let operator_key = config.operator.tls.as_ref().map(|tls| &tls.key);
    let node_key = config.cluster.tls.as_ref().map(|tls| &tls.key);
    let named = [
        ("auth.keys_file", config.auth.keys_file.as_ref()),
        ("operator.tokens_file", config.operator.tokens_file.as_ref()),
        ("proxy.tls.key", proxy_key),
        ("operator.tls.key", operator_key),
        ("cluster.tls.key", node_key),
    ];
    named.into_iter().filter_map(|(setting, path)| Some((setting, path?.as_path())))
}

/// Whether the mode gives any access to the group or to others.
fn is_shared(mode: u32) -> bool {
    mode & 0o077 != 0
}

/// Returns one sentence per secret file that others can access.
pub(crate) fn warnings(config: &Config) -> Vec<String> {
    secret_files(config).filter_map(|(setting, path)| warning(setting, path)).collect()
}

/// Returns one sentence if the configuration in `file` has secrets and others can access the file. `in_file` is the
/// configuration without what the command line adds.
pub(crate) fn config_file_warning(in_file: &Config, file: &Path) -> Option<String> {
    let Config { auth, shared_cache, discovery, workers, .. } = in_file;
    let has_secrets = auth.cache_salt_secret.is_some()
        || shared_cache.encryption_secret.is_some()
        || shared_cache.redis_url.as_ref().is_some_and(RedisUrl::has_password)
        || workers.iter().any(|worker| worker.api_key.is_some())
        || discovery.dns.iter().any(|dns| dns.api_key.is_some())
        || discovery.kubernetes.iter().any(|service| service.api_key.is_some());
    has_secrets.then(|| warning("the configuration file", file)).flatten()
}

fn warning(what: &str, path: &Path) -> Option<String> {
    let mode = std::fs::metadata(path).ok()?.permissions().mode() & 0o777;
    let path = path.display();
    is_shared(mode).then(|| {
        format!("{what} {path} holds secrets, and other users of this machine can reach it (mode {mode:03o}): chmod 600 {path}")
    })
}

#[cfg(test)]
mod tests {
    use std::fs::Permissions;

    use super::*;
    use crate::config::Overrides;

    #[test]
    fn a_secret_file_that_others_can_access_is_warned_about() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("secret");
        std::fs::write(&path, "").unwrap();
        for (mode, is_told) in
            [(0o600, false), (0o400, false), (0o640, true), (0o604, true), (0o644, true), (0o620, true)]
        {
            std::fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
            let tls = |more: &str| format!("{{certificate=\"c\", key={path:?}{more}}}");
            let settings = vec![
                format!("auth.keys_file={path:?}"),
                format!("operator.tokens_file={path:?}"),
                format!("proxy.tls={}", tls("")),
                format!("operator.tls={}", tls("")),
                format!("cluster.tls={}", tls(", ca=\"a\"")),
            ];
            let config = Config::load(None, &Overrides { settings, workers: Vec::new() }).unwrap();
            let told = warnings(&config);
            assert_eq!(told.len(), if is_told { 5 } else { 0 }, "{mode:o}: {told:?}");
            assert!(told.iter().all(|told| told.contains(&format!("chmod 600 {}", path.display()))), "{told:?}");
        }
    }

    #[test]
    fn a_configuration_with_secrets_that_others_can_access_is_warned_about() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ownerserve.toml");
        let told = |text: &str, mode: u32| {
            std::fs::write(&path, text).unwrap();
            std::fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
            let config = Config::load(Some(&path), &Overrides::default()).unwrap();
            config_file_warning(&config, &path)
        };
        for secret in [
            "auth.cache_salt_secret = \"0123456789abcdef\"",
            "[shared_cache]\nredis_url = \"redis://:word@127.0.0.1\"\nallow_plaintext = true",
            "shared_cache.encryption_secret = \"0123456789abcdef\"",
            "[[workers]]\nurl = \"http://127.0.0.1:1\"\napi_key = \"sk-upstream\"",
            "[[discovery.dns]]\naddress = \"engines.example:8000\"\napi_key = \"sk-upstream\"",
        ] {
            let sentence = told(secret, 0o644).unwrap_or_default();
            assert!(sentence.contains("(mode 644): chmod 600"), "{secret}: {sentence:?}");
            assert_eq!(told(secret, 0o600), None, "{secret}");
        }
        for none in [
            "proxy.listen = \"127.0.0.1:0\"",
            "[shared_cache]\nredis_url = \"redis://127.0.0.1\"\nallow_plaintext = true",
        ] {
            assert_eq!(told(none, 0o644), None, "{none}");
        }
    }

    #[test]
    fn a_missing_secret_file_yields_no_warning() {
        let settings = vec!["auth.keys_file=/nonexistent/keys".to_owned()];
        assert_eq!(warnings(&Config::load(None, &Overrides { settings, workers: Vec::new() }).unwrap()), [""; 0]);
    }
}
