//! Authentication and roles: bearer tokens from a file. Tokens are stored and compared as SHA-256 digests.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwapOption;
use http::HeaderMap;
use http::header::AUTHORIZATION;
use serde::{Deserialize, Serialize};

use super::problem::{Problem, ProblemKind};
use proxy::auth::{KeyDigest, bearer_key, digest, parse_digest};
use proxy::toml_errors::line_and_column;
use proxy::watched_files::{FileStamp, ReloadReporter, follow, stamp_of};

/// Paths without authentication: liveness, readiness and the API description.
pub(super) const PUBLIC_PATHS: [&str; 3] = ["/livez", "/readyz", "/ownerserve/v1/openapi.json"];
/// Minimum length of a plain-text token in the file.
const SHORTEST: usize = 16;

/// Role of a token.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, Debug)]
#[serde(rename_all = "lowercase")]
pub(super) enum TokenRole {
    /// May read everything except snapshots.
    Read,
    /// May write, too.
    Operator,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Principal {
    /// Name of the token in the file, for the audit log.
    pub name: Arc<str>,
    /// Role of the token.
    pub role: TokenRole,
    /// Digest of the token; `None` if no tokens are configured.
    pub token: Option<KeyDigest>,
}

/// A tokens file was rejected. Never contains a token.
#[derive(Debug, thiserror::Error)]
pub enum TokensFileError {
    /// The file cannot be read.
    #[error("cannot read the operators' tokens file {path}: {source}")]
    Unreadable {
        /// Path of the file.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// The file is malformed.
    #[error(
        "the operators' tokens file {path} {problem}; accepted is a table [tokens] with lines \"TOKEN\" = \"read\", \"sha256:HEX\" = \"operator\", or {{ role = \"operator\", name = \"alice\" }}"
    )]
    Malformed {
        /// Path of the file.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
}

#[derive(Deserialize)]
#[serde(untagged)]
enum TokenEntry {
    Role(TokenRole),
    Named(NamedToken),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct NamedToken {
    role: TokenRole,
    name: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TokensFile {
    tokens: BTreeMap<String, TokenEntry>,
}

type TokenTable = Vec<(KeyDigest, Principal)>;

#[derive(Default)]
pub(super) struct OperatorTokens {
    file: Option<PathBuf>,
    /// Stamp of the file, taken before it was read.
    file_stamp: Option<FileStamp>,
    table: ArcSwapOption<TokenTable>,
}

impl std::fmt::Debug for OperatorTokens {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("OperatorTokens").field("file", &self.file).finish_non_exhaustive()
    }
}

impl OperatorTokens {
    /// Reads `file`. Without a file, everybody who reaches the listener is an operator.
    pub(super) fn open(file: Option<&Path>) -> Result<Self, TokensFileError> {
        let tokens = Self { file: file.map(Path::to_owned), file_stamp: file.and_then(stamp_of), ..Self::default() };
        if let Some(path) = file {
            tokens.table.store(Some(Arc::new(read(path)?)));
        }
        Ok(tokens)
    }

    /// Authenticates by `Authorization: Bearer TOKEN`. Every token is compared in full, so that timing reveals
    /// nothing.
    pub(super) fn authenticate(&self, headers: &HeaderMap) -> Result<Principal, Problem> {
        let table = self.table.load();
        let Some(table) = &*table else {
            return Ok(Principal { name: "anyone".into(), role: TokenRole::Operator, token: None });
        };
        let token = headers.get(AUTHORIZATION).map(|value| bearer_key(value.as_bytes()));
        let unauthorized = |detail| Problem::new(ProblemKind::Unauthorized, detail);
        let token_digest = digest(token.ok_or_else(|| unauthorized("Send a token as 'Authorization: Bearer TOKEN'."))?);
        let mut found = None;
        for (known, who) in table.iter() {
            if known.iter().zip(&token_digest).fold(0, |differs, (a, b)| differs | (a ^ b)) == 0 {
                found = Some(who);
            }
        }
        found.cloned().ok_or_else(|| unauthorized("The token is not known here. Ask who runs this for one."))
    }

    /// Re-reads the file whenever its time or size changes. If it became invalid, the old tokens stay in force.
    pub(super) async fn follow_file(self: Arc<Self>, every: Duration, files: ReloadReporter) {
        let Some(path) = self.file.clone() else { return };
        let take = || {
            let table = read(&path)?;
            tracing::info!(tokens = table.len(), "operators' tokens were read again");
            self.table.store(Some(Arc::new(table)));
            Ok::<_, TokensFileError>(())
        };
        follow((self.file_stamp, || stamp_of(&path)), (every, &files), take).await;
    }
}

fn read(path: &Path) -> Result<TokenTable, TokensFileError> {
    let malformed = |problem: &str| TokensFileError::Malformed { path: path.into(), problem: problem.into() };
    let text =
        std::fs::read_to_string(path).map_err(|source| TokensFileError::Unreadable { path: path.into(), source })?;
    // The parser's own message would quote a line, and with it a token.
    let file: TokensFile = toml::from_str(&text).map_err(|error| {
        let (line, column) = line_and_column(&text, &error);
        malformed(&format!("is not valid at line {line}, column {column}"))
    })?;
    if file.tokens.is_empty() {
        tracing::warn!(path = %path.display(), "the tokens file has no tokens: all operators get 401 until it has one");
    }
    let mut table = TokenTable::with_capacity(file.tokens.len());
    for (token, line) in file.tokens {
        let digest = match token.strip_prefix("sha256:") {
            Some(hex) => {
                parse_digest(hex).ok_or_else(|| malformed("has a sha256 that is not 64 hexadecimal digits"))?
            }
            None if token.chars().count() < SHORTEST => {
                return Err(malformed("has a token of fewer than 16 characters, which can be guessed"));
            }
            None => digest(token.as_bytes()),
        };
        let who = match line {
            TokenEntry::Role(role) => {
                let name = format!("token {:02x}{:02x}{:02x}", digest[0], digest[1], digest[2]).into();
                Principal { name, role, token: Some(digest) }
            }
            TokenEntry::Named(line) if line.name.is_empty() || line.name.chars().count() > 64 => {
                return Err(malformed("has a name that is empty or longer than 64 characters"));
            }
            TokenEntry::Named(line) => Principal { name: line.name.into(), role: line.role, token: Some(digest) },
        };
        if table.iter().any(|(known, _)| *known == digest) {
            return Err(malformed("has the same token twice"));
        }
        table.push((digest, who));
    }
    Ok(table)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokens(text: &str) -> Result<OperatorTokens, TokensFileError> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokens.toml");
        std::fs::write(&path, text).unwrap();
        OperatorTokens::open(Some(&path))
    }

    fn who(tokens: &OperatorTokens, token: Option<&str>) -> Result<(String, TokenRole), ProblemKind> {
        let headers = token.map(|token| (AUTHORIZATION, format!("Bearer {token}").parse().unwrap()));
        let found = tokens.authenticate(&HeaderMap::from_iter(headers));
        found.map(|who| (who.name.to_string(), who.role)).map_err(|problem| problem.kind())
    }

    #[test]
    fn token_or_digest_maps_to_a_role_and_name() {
        // sha256 of "test"
        let digest = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08";
        let text = format!(
            "[tokens]\n\"one-of-16-letters\" = \"read\"\n\"sha256:{digest}\" = {{ role = \"operator\", name = \"alice\" }}"
        );
        let tokens = tokens(&text).unwrap();
        assert_eq!(who(&tokens, Some("test")), Ok(("alice".into(), TokenRole::Operator)));
        let (name, role) = who(&tokens, Some("one-of-16-letters")).unwrap();
        assert!(role == TokenRole::Read && name.starts_with("token ") && !name.contains("one"), "{name}");
        for bad in [None, Some("one-of-16-letter"), Some(""), Some(&*format!("sha256:{digest}"))] {
            assert_eq!(who(&tokens, bad), Err(ProblemKind::Unauthorized), "{bad:?}");
        }
    }

    #[test]
    fn every_caller_is_an_operator_without_a_tokens_file() {
        assert_eq!(who(&OperatorTokens::open(None).unwrap(), None), Ok(("anyone".into(), TokenRole::Operator)));
    }

    #[tokio::test]
    async fn an_empty_table_revokes_all_tokens_and_a_broken_file_none() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokens.toml");
        std::fs::write(&path, "[tokens]\n\"one-of-16-letters\" = \"read\"").unwrap();
        let tokens = Arc::new(OperatorTokens::open(Some(&path)).unwrap());
        let files = ReloadReporter { name: "operator_tokens", stale: Arc::default() };
        let follower = tokio::spawn(tokens.clone().follow_file(Duration::from_millis(5), files));
        std::fs::write(&path, "[tokens]\n\"one-of-16-letters\" = \"reader\"").unwrap();
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert!(who(&tokens, Some("one-of-16-letters")).is_ok());
        std::fs::write(&path, "[tokens]").unwrap();
        let deadline = std::time::Instant::now() + Duration::from_secs(5);
        while who(&tokens, Some("one-of-16-letters")) != Err(ProblemKind::Unauthorized) {
            assert!(std::time::Instant::now() < deadline, "the empty table was never read");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        follower.abort();
    }

    #[test]
    fn invalid_tokens_file_error_does_not_print_its_contents() {
        for text in [
            "",
            "[tokens]\n\"\" = \"read\"",
            "[tokens]\n\"secret\" = \"write\"",
            "[tokens]\n\"sha256:secret\" = \"read\"",
            "[tokens]\n\"a-secret-of-letters\" = { role = \"read\", name = \"\" }",
            "[tokens]\n\"a-short-secret\" = \"read\"",
            "[tokens]\n\"secret\" = { role = \"read\", name = \"a\", more = 1 }",
        ] {
            let error = tokens(text).unwrap_err().to_string();
            assert!(!error.contains("secret") && error.contains("accepted is"), "{error}");
        }
        let error = tokens("[tokens]\n\"a-secret-of-letters\" = \"write\"").unwrap_err().to_string();
        assert!(error.contains("is not valid at line 2, column"), "{error}");
        let missing = OperatorTokens::open(Some(Path::new("/nonexistent/tokens"))).unwrap_err();
        assert!(missing.to_string().contains("/nonexistent/tokens"));
    }
}
