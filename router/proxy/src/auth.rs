//! Authentication of clients: API keys from a file determine the tenant.
//!
//! Keys are stored and compared only as SHA-256 digests, so that neither timing nor a log can reveal one.

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwapOption;
use http::header::AUTHORIZATION;
use http::{HeaderMap, HeaderValue};
use serde::Deserialize;
use sha2::{Digest as _, Sha256};
use smart_default::SmartDefault;
use vocabulary::{Secret, TenantId};

use crate::error::ApiError;
use crate::toml_errors::line_and_column;
use crate::watched_files::{FileStamp, ReloadReporter, follow, stamp_of};

/// Maximum number of tenants named in one log line.
pub const MAX_NAMED_TENANTS: usize = 8;

/// Minimum length of a key without a warning, in characters.
const SHORT_KEY: usize = 8;

/// Section `[auth]`.
#[derive(Clone, Debug, Deserialize, SmartDefault)]
#[serde(deny_unknown_fields, default)]
pub struct AuthConfig {
    /// File of API keys, reloaded when it changes: edit it to revoke a key. An empty table `[keys]` revokes all keys. If
    /// the file is removed or has an error, the old keys stay valid.
    /// Without a file every caller is the tenant `default`.
    ///
    /// ```toml
    /// [keys]
    /// "sk-a-long-random-text" = "team-a"
    /// "sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08" = "team-b"
    /// ```
    pub keys_file: Option<PathBuf>,
    /// Secret from which each tenant's cache salt is derived.
    pub cache_salt_secret: Option<Secret>,
    /// Whether each worker must prove once, with two requests of the router's own, that it isolates prompts of
    /// different salts. A worker that does not serves no requests while keys name more than one tenant.
    #[default(true)]
    pub verify_cache_salt: bool,
}

impl AuthConfig {
    /// Returns the first setting that is out of bounds, and what is accepted.
    pub fn problem(&self) -> Option<(&'static str, &'static str)> {
        self.cache_salt_secret.as_ref().is_some_and(Secret::is_short).then_some((
            "auth.cache_salt_secret",
            "accepted are 16 characters or more, the same at every router: whoever guesses the secret can probe which prompts \
             other tenants have cached",
        ))
    }
}

/// Why a keys file was rejected. Never contains a key.
#[derive(Debug, thiserror::Error)]
pub enum KeysError {
    /// The file cannot be read.
    #[error("cannot read the API keys file {path}: {source}")]
    Unreadable {
        /// Which file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The file's content is invalid.
    #[error(
        "the API keys file {path} {problem}; accepted is a table [keys] with lines \"KEY\" = \"TENANT\" or \"sha256:HEX\" = \"TENANT\""
    )]
    Malformed {
        /// Which file.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
}

/// SHA-256 of a key.
pub type KeyDigest = [u8; 32];
type KeyTable = HashMap<KeyDigest, TenantId>;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct KeysFile {
    keys: HashMap<String, String>,
}

/// The accepted API keys.
#[derive(Default)]
pub struct ApiKeys {
    file: Option<PathBuf>,
    /// Stamp of the file, taken before it was read.
    stamp: Option<FileStamp>,
    table: ArcSwapOption<KeyTable>,
}

impl std::fmt::Debug for ApiKeys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ApiKeys").field("file", &self.file).finish_non_exhaustive()
    }
}

impl ApiKeys {
    /// Reads the configured file; without one every caller is the default tenant.
    pub fn open(config: &AuthConfig) -> Result<Self, KeysError> {
        let stamp = config.keys_file.as_deref().and_then(stamp_of);
        let keys = Self { file: config.keys_file.clone(), stamp, table: ArcSwapOption::empty() };
        if let Some(path) = &keys.file {
            keys.table.store(Some(Arc::new(read(path)?)));
        }
        Ok(keys)
    }

    /// Whether clients need a key.
    pub fn required(&self) -> bool {
        self.file.is_some()
    }

    /// Whether keys name more than one tenant.
    pub fn has_several_tenants(&self) -> bool {
        let table = self.table.load();
        let mut tenants = table.iter().flat_map(|table| table.values());
        let first = tenants.next();
        tenants.any(|tenant| Some(tenant) != first)
    }

    /// Returns those of `tenants` that have no key.
    pub fn tenants_without_key<'a>(&self, tenants: impl Iterator<Item = &'a str>) -> Vec<&'a str> {
        let named: HashSet<TenantId> = match &*self.table.load() {
            Some(table) => table.values().cloned().collect(),
            None => HashSet::from([TenantId::default()]),
        };
        tenants.filter(|tenant| !named.contains(&TenantId((*tenant).into()))).collect()
    }

    /// Warns of quotas without effect, because no key names these of `tenants`.
    pub fn warn_tenants_without_key<'a>(&self, tenants: impl Iterator<Item = &'a str>) {
        let without = self.tenants_without_key(tenants);
        if !without.is_empty() {
            let (count, first) = (without.len(), &without[..without.len().min(MAX_NAMED_TENANTS)]);
            tracing::warn!(count, tenants = first.join(" "), "quotas limit nobody, because no key names their tenants");
        }
    }

    /// Returns the tenant of a request by `Authorization: Bearer KEY`, or Anthropic's `x-api-key: KEY`.
    pub fn tenant(&self, headers: &HeaderMap) -> Result<TenantId, ApiError> {
        let table = self.table.load();
        let Some(table) = &*table else { return Ok(TenantId::default()) };
        let bearer = headers.get(AUTHORIZATION).map(|value| bearer_key(value.as_bytes()));
        let key = bearer.or_else(|| headers.get("x-api-key").map(|value| value.as_bytes()));
        let key = key.ok_or(ApiError::NoKey)?;
        table.get(&digest(key)).cloned().ok_or(ApiError::BadKey)
    }

    /// Reloads the file whenever its time or size changes; an invalid file leaves the keys unchanged. `tenants` are
    /// those with quotas.
    pub async fn follow_file(self: Arc<Self>, every: Duration, files: ReloadReporter, tenants: Vec<String>) {
        let Some(path) = self.file.clone() else { return };
        let take = || {
            let table = read(&path)?;
            tracing::info!(keys = table.len(), "API keys were read again");
            self.table.store(Some(Arc::new(table)));
            self.warn_tenants_without_key(tenants.iter().map(String::as_str));
            Ok::<_, KeysError>(())
        };
        follow((self.stamp, || stamp_of(&path)), (every, &files), take).await;
    }
}

/// Returns the digest of a key.
pub fn digest(key: &[u8]) -> KeyDigest {
    Sha256::digest(key).into()
}

/// Returns the key of an `Authorization` header, without its scheme.
pub fn bearer_key(value: &[u8]) -> &[u8] {
    match value.split_at_checked(7) {
        Some((scheme, key)) if scheme.eq_ignore_ascii_case(b"bearer ") => key.trim_ascii(),
        _ => value,
    }
}

fn read(path: &Path) -> Result<KeyTable, KeysError> {
    let malformed = |problem: &str| KeysError::Malformed { path: path.into(), problem: problem.into() };
    let text = std::fs::read_to_string(path).map_err(|source| KeysError::Unreadable { path: path.into(), source })?;
    // The parser's own message would quote a line, and with it a key.
    let file: KeysFile = toml::from_str(&text).map_err(|error| {
        let (line, column) = line_and_column(&text, &error);
        malformed(&format!("is not valid at line {line}, column {column}"))
    })?;
    if file.keys.is_empty() {
        tracing::warn!(path = %path.display(), "the keys file has no keys: all clients get 401 until it has one");
    }
    let short = file.keys.keys().filter(|key| !key.starts_with("sha256:") && key.chars().count() < SHORT_KEY).count();
    if short > 0 {
        tracing::warn!(path = %path.display(), keys = short, "API keys have fewer than {SHORT_KEY} characters, which can be guessed");
    }
    let mut table = KeyTable::with_capacity(file.keys.len());
    for (key, tenant) in file.keys {
        if tenant.is_empty() || tenant.len() > 128 {
            return Err(malformed("has a tenant name that is empty or longer than 128 bytes"));
        }
        let digest = match key.strip_prefix("sha256:") {
            Some(hex) => {
                parse_digest(hex).ok_or_else(|| malformed("has a sha256 that is not 64 hexadecimal digits"))?
            }
            None if key.is_empty() => return Err(malformed("has an empty key")),
            None => digest(key.as_bytes()),
        };
        if table.insert(digest, TenantId(tenant.into())).is_some() {
            return Err(malformed("has the same key twice"));
        }
    }
    Ok(table)
}

/// Reads a digest in hex; `None` where it is none.
pub fn parse_digest(hex: &str) -> Option<KeyDigest> {
    if hex.len() != 64 || !hex.bytes().all(|b| b.is_ascii_hexdigit()) {
        return None;
    }
    let mut digest = KeyDigest::default();
    for (byte, pair) in digest.iter_mut().zip(hex.as_bytes().chunks_exact(2)) {
        *byte = u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()?;
    }
    Some(digest)
}

/// Returns `Bearer KEY`, marked as sensitive so that it is not printed; `None` for a key that is not valid in a header.
pub fn bearer(key: Option<&Secret>) -> Option<HeaderValue> {
    let mut value = HeaderValue::try_from(format!("Bearer {}", key?.expose())).ok()?;
    value.set_sensitive(true);
    Some(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(text: &str) -> Result<ApiKeys, KeysError> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("keys.toml");
        std::fs::write(&path, text).unwrap();
        ApiKeys::open(&AuthConfig { keys_file: Some(path), ..AuthConfig::default() })
    }

    fn tenant(keys: &ApiKeys, name: &'static str, value: &str) -> Result<String, ApiError> {
        let mut headers = HeaderMap::new();
        headers.insert(name, value.parse().unwrap());
        keys.tenant(&headers).map(|tenant| tenant.to_string())
    }

    #[test]
    fn a_key_or_its_digest_identifies_the_tenant() {
        // sha256 of "test"
        let digest = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08";
        let keys = keys(&format!("[keys]\n\"sk-one\" = \"a\"\n\"sha256:{digest}\" = \"b\"")).unwrap();
        assert_eq!(tenant(&keys, "authorization", "Bearer sk-one").unwrap(), "a");
        assert_eq!(tenant(&keys, "authorization", "bearer test").unwrap(), "b");
        assert_eq!(tenant(&keys, "x-api-key", "test").unwrap(), "b");
        assert_eq!(tenant(&keys, "authorization", &format!("Bearer sha256:{digest}")), Err(ApiError::BadKey));
        assert_eq!(tenant(&keys, "authorization", "Bearer sk-on"), Err(ApiError::BadKey));
        assert_eq!(keys.tenant(&HeaderMap::new()), Err(ApiError::NoKey));
    }

    #[test]
    fn without_a_keys_file_every_caller_is_the_default_tenant() {
        let keys = ApiKeys::open(&AuthConfig::default()).unwrap();
        assert!(!keys.required());
        assert_eq!(keys.tenant(&HeaderMap::new()), Ok(TenantId::default()));
    }

    #[test]
    fn tenants_without_a_key_are_reported() {
        let asked = ["a", "default", "c"];
        let told = |keys: &ApiKeys| keys.tenants_without_key(asked.into_iter()).join(" ");
        assert_eq!(told(&keys("[keys]\n\"sk-one\" = \"a\"\n\"sk-two\" = \"b\"").unwrap()), "default c");
        assert_eq!(told(&ApiKeys::open(&AuthConfig::default()).unwrap()), "a c", "everybody is the default tenant");
    }

    #[test]
    fn an_invalid_keys_file_is_rejected_without_printing_its_contents() {
        for text in ["", "[keys]\n\"\" = \"a\"", "[keys]\n\"sha256:sk-secret\" = \"a\"", "[keys]\n\"sk-secret\" = 1"] {
            let error = keys(text).unwrap_err().to_string();
            assert!(!error.contains("sk-secret") && error.contains("accepted is"), "{error}");
        }
        let error = keys("[keys]\n\"sk-one\" = \"a\"\n\"sk-secret\" = = \"b\"").unwrap_err().to_string();
        assert!(error.contains("is not valid at line 3, column 15;") && !error.contains("sk-"), "{error}");
        let revoked = keys("[keys]").unwrap();
        assert!(
            matches!(tenant(&revoked, "x-api-key", "sk-one"), Err(ApiError::BadKey)),
            "an empty table revokes all keys"
        );
        let missing =
            ApiKeys::open(&AuthConfig { keys_file: Some("/nonexistent/keys".into()), ..AuthConfig::default() })
                .unwrap_err();
        assert!(missing.to_string().contains("/nonexistent/keys"));
    }

    #[test]
    fn secrets_are_redacted_in_debug_output() {
        assert_eq!(format!("{:?}", Secret::from("sk-secret")), "(secret)");
    }

    #[tokio::test]
    async fn keys_follow_a_changed_file_and_survive_a_broken_one_until_a_table_is_empty() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("keys.toml");
        std::fs::write(&path, "[keys]\n\"k1\" = \"a\"").unwrap();
        let keys =
            Arc::new(ApiKeys::open(&AuthConfig { keys_file: Some(path.clone()), ..AuthConfig::default() }).unwrap());
        let follower = tokio::spawn(keys.clone().follow_file(
            Duration::from_millis(5),
            ReloadReporter { name: "api_keys", stale: Arc::default() },
            Vec::new(),
        ));
        std::fs::write(&path, "[keys]\n\"k2-longer\" = \"b\"").unwrap();
        let deadline = std::time::Instant::now() + Duration::from_secs(5);
        while tenant(&keys, "x-api-key", "k2-longer").is_err() {
            assert!(std::time::Instant::now() < deadline, "the new key was never read");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        assert!(tenant(&keys, "x-api-key", "k1").is_err());
        for broken in ["", "broken, and as long as it will be"] {
            std::fs::write(&path, broken).unwrap();
            tokio::time::sleep(Duration::from_millis(50)).await;
            assert_eq!(tenant(&keys, "x-api-key", "k2-longer").unwrap(), "b", "{broken:?}");
        }
        // Repaired with the same time and size as the broken file, which was examined already.
        let broken = std::fs::metadata(&path).unwrap();
        let mended = folder.path().join("mended.toml");
        std::fs::write(&mended, format!("{:width$}", "[keys]\nk3=\"c\"", width = broken.len() as usize)).unwrap();
        std::fs::File::options().write(true).open(&mended).unwrap().set_modified(broken.modified().unwrap()).unwrap();
        std::fs::rename(&mended, &path).unwrap();
        let deadline = std::time::Instant::now() + Duration::from_secs(5);
        while tenant(&keys, "x-api-key", "k3").is_err() {
            assert!(std::time::Instant::now() < deadline, "the mended file was never read");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        std::fs::write(&path, "[keys]").unwrap();
        let deadline = std::time::Instant::now() + Duration::from_secs(5);
        while !matches!(tenant(&keys, "x-api-key", "k3"), Err(ApiError::BadKey)) {
            assert!(std::time::Instant::now() < deadline, "an empty table revokes all keys");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        follower.abort();
    }
}
