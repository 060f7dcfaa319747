//! Entity tags: the version that a reader saw and that a writer bases its write on.
//!
//! A tag is `"EPOCH-DIGEST"`, or `"EPOCH"` after a write. The epoch is the fencing token of the command, so that the
//! ledger itself refuses a write based on an older one; the digest tells readers whether anything else changed.

use std::fmt;

use axum::extract::FromRequestParts;
use http::HeaderValue;
use http::header::{IF_MATCH, IF_NONE_MATCH};
use http::request::Parts;
use serde::Serialize;
use vocabulary::Epoch;
use xxhash_rust::xxh3::xxh3_64;

use super::problem::{Problem, ProblemKind};

/// Version of a single resource.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct EntityTag {
    epoch: Epoch,
    /// `None` if the response is not the resource itself.
    digest: Option<u64>,
}

impl EntityTag {
    /// Tag of a resource granted at `epoch`. `settled` is its JSON without fields that change with time.
    pub(super) fn of(epoch: Epoch, settled: &impl Serialize) -> Self {
        let text = serde_json::to_vec(settled).unwrap_or_default();
        Self { epoch, digest: Some(xxh3_64(&text)) }
    }

    /// Tag of a write granted at `epoch`: a fence for the next write that no read returns.
    pub(super) fn of_grant(epoch: Epoch) -> Self {
        Self { epoch, digest: None }
    }

    pub(super) fn to_header(self) -> HeaderValue {
        HeaderValue::try_from(self.to_string()).expect("digits, dots and quotes can stand in a header")
    }
}

impl fmt::Display for EntityTag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.digest {
            Some(digest) => write!(f, "\"{}-{digest:016x}\"", self.epoch),
            None => write!(f, "\"{}\"", self.epoch),
        }
    }
}

/// Returns whether `If-None-Match` contains this tag.
pub(super) fn matches_if_none_match(headers: &http::HeaderMap, tag: &HeaderValue) -> bool {
    let weak = |text: &str| text.trim().trim_start_matches("W/").to_owned();
    let tag = tag.to_str().map(weak).unwrap_or_default();
    let tags = headers.get_all(IF_NONE_MATCH).iter().filter_map(|value| value.to_str().ok());
    tags.flat_map(|value| value.split(',')).any(|one| one.trim() == "*" || weak(one) == tag)
}

/// The `If-Match` header: what a write was based on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum IfMatch {
    Absent,
    /// `*`: whatever is there now.
    Any,
    Granted(Epoch),
}

impl IfMatch {
    /// Returns the epoch for a command that must be fenced; `current` is the one this node sees now.
    pub(super) fn required_epoch(self, current: Epoch) -> Result<Epoch, Problem> {
        match self {
            IfMatch::Granted(epoch) => Ok(epoch),
            IfMatch::Any => Ok(current),
            IfMatch::Absent => {
                let detail = "This write depends on what was seen: read the resource and send its ETag as If-Match; \
                              If-Match: * takes whatever is there now.";
                Err(Problem::new(ProblemKind::PreconditionRequired, detail).with_epoch(current))
            }
        }
    }

    /// Checks a write for which the fence is optional: refused only if it names another epoch than the current one.
    pub(super) fn check_optional(self, current: Epoch) -> Result<(), Problem> {
        match self {
            IfMatch::Granted(epoch) if epoch != current => {
                let detail = format!("If-Match names epoch {epoch}, the current one is {current}. Read it again.");
                Err(Problem::new(ProblemKind::PreconditionFailed, detail).with_epoch(current))
            }
            _ => Ok(()),
        }
    }

    fn parse(text: &str) -> Option<Self> {
        let text = text.trim();
        if text == "*" {
            return Some(IfMatch::Any);
        }
        let inner = text.strip_prefix('"')?.strip_suffix('"')?;
        let epoch = inner.split_once('-').map_or(inner, |(epoch, _)| epoch);
        let mut parts = epoch.split('.');
        let mut digits = || parts.next().filter(|part| part.bytes().all(|byte| byte.is_ascii_digit()));
        let (generation, index, position) = (digits()?.parse().ok()?, digits()?.parse().ok()?, digits()?.parse().ok()?);
        parts.next().is_none().then_some(IfMatch::Granted(Epoch { generation, index, position }))
    }
}

impl<S: Sync> FromRequestParts<S> for IfMatch {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _state: &S) -> Result<Self, Problem> {
        let mut values = parts.headers.get_all(IF_MATCH).iter();
        let Some(first) = values.next() else { return Ok(IfMatch::Absent) };
        let fence = first.to_str().ok().and_then(IfMatch::parse).filter(|_| values.next().is_none());
        fence.ok_or_else(|| {
            let accepted = "If-Match: accepted is one ETag as a read gave it, \"EPOCH\" in quotes, or *.";
            Problem::new(ProblemKind::InvalidHeader, accepted)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EPOCH: Epoch = Epoch { generation: 1, index: 20, position: 3 };

    #[test]
    fn if_match_parses_entity_tags_and_bare_epochs() {
        let tag = EntityTag::of(EPOCH, &"x");
        assert_eq!(IfMatch::parse(tag.to_header().to_str().unwrap()), Some(IfMatch::Granted(EPOCH)));
        assert_eq!(IfMatch::parse("\"1.20.3\""), Some(IfMatch::Granted(EPOCH)));
        assert_eq!(IfMatch::parse(" * "), Some(IfMatch::Any));
        for bad in
            ["", "1.20.3", "\"1.20\"", "\"1.20.3.4\"", "\"1.20.+3\"", "\"x\"", "\"1.20.3\", \"1.20.4\"", "W/\"1.20.3\""]
        {
            assert_eq!(IfMatch::parse(bad), None, "{bad}");
        }
    }

    #[test]
    fn conditional_writes_require_if_match() {
        let newer = Epoch { index: 21, ..EPOCH };
        assert_eq!(
            IfMatch::Granted(EPOCH).required_epoch(newer),
            Ok(EPOCH),
            "the ledger refuses it, not this node's view"
        );
        assert_eq!(IfMatch::Any.required_epoch(newer), Ok(newer));
        assert_eq!(IfMatch::Absent.required_epoch(newer).unwrap_err().kind(), ProblemKind::PreconditionRequired);
        assert_eq!(IfMatch::Granted(EPOCH).check_optional(newer).unwrap_err().kind(), ProblemKind::PreconditionFailed);
        assert!(IfMatch::Absent.check_optional(newer).is_ok() && IfMatch::Any.check_optional(newer).is_ok());
    }

    #[test]
    fn if_none_match_uses_weak_comparison() {
        let tag = EntityTag::of(EPOCH, &7);
        let known = |value: &str| {
            matches_if_none_match(
                &http::HeaderMap::from_iter([(IF_NONE_MATCH, value.parse().unwrap())]),
                &tag.to_header(),
            )
        };
        assert!(known(&tag.to_string()) && known(&format!("\"a\", W/{tag}")) && known("*"));
        assert!(!known(&EntityTag::of(EPOCH, &8).to_string()) && !known(""));
    }
}
