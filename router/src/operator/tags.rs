//! Entity tags: what a reader saw, and what a writer bases its write on.
//!
//! A tag is `"EPOCH-DIGEST"`, after a write `"EPOCH"`. The epoch is the fencing token that goes into the command, so that the ledger itself refuses
//! a write that was based on an older one; the digest tells readers whether anything else changed.

use std::fmt;

use axum::extract::FromRequestParts;
use http::HeaderValue;
use http::header::{IF_MATCH, IF_NONE_MATCH};
use http::request::Parts;
use serde::Serialize;
use vocabulary::Epoch;
use xxhash_rust::xxh3::xxh3_64;

use super::problem::{Kind, Problem};

/// What a single resource looked like.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Tag {
    epoch: Epoch,
    /// None where the answer is not the resource itself.
    digest: Option<u64>,
}

impl Tag {
    /// Of what was granted at `epoch` and reads as `settled`, which holds nothing that changes by waiting.
    pub(super) fn of(epoch: Epoch, settled: &impl Serialize) -> Self {
        let text = serde_json::to_vec(settled).unwrap_or_default();
        Self { epoch, digest: Some(xxh3_64(&text)) }
    }

    /// Of what a write granted at `epoch`: a fence for the next one, which no read has.
    pub(super) fn granted(epoch: Epoch) -> Self {
        Self { epoch, digest: None }
    }

    pub(super) fn header(self) -> HeaderValue {
        HeaderValue::try_from(self.to_string()).expect("digits, dots and quotes can stand in a header")
    }
}

impl fmt::Display for Tag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.digest {
            Some(digest) => write!(f, "\"{}-{digest:016x}\"", self.epoch),
            None => write!(f, "\"{}\"", self.epoch),
        }
    }
}

/// Whether `If-None-Match` names this tag.
pub(super) fn is_known(headers: &http::HeaderMap, tag: &HeaderValue) -> bool {
    let weak = |text: &str| text.trim().trim_start_matches("W/").to_owned();
    let tag = tag.to_str().map(weak).unwrap_or_default();
    let asked = headers.get_all(IF_NONE_MATCH).iter().filter_map(|value| value.to_str().ok());
    asked.flat_map(|value| value.split(',')).any(|one| one.trim() == "*" || weak(one) == tag)
}

/// What a write says it was based on: `If-Match`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Fence {
    Absent,
    /// `*`: whatever is there now.
    Any,
    Granted(Epoch),
}

impl Fence {
    /// The epoch for a command that depends on what was seen; `current` is what this node sees now.
    pub(super) fn needed(self, current: Epoch) -> Result<Epoch, Problem> {
        match self {
            Fence::Granted(epoch) => Ok(epoch),
            Fence::Any => Ok(current),
            Fence::Absent => {
                let detail = "This write depends on what was seen: read the resource and send its ETag as If-Match; \
                              If-Match: * takes whatever is there now.";
                Err(Problem::new(Kind::PreconditionRequired, detail).at(current))
            }
        }
    }

    /// For a write that may be repeated by anyone: refused only where it names another epoch than the current one.
    pub(super) fn allowed(self, current: Epoch) -> Result<(), Problem> {
        match self {
            Fence::Granted(epoch) if epoch != current => {
                let detail = format!("If-Match names epoch {epoch}, the current one is {current}. Read it again.");
                Err(Problem::new(Kind::Stale, detail).at(current))
            }
            _ => Ok(()),
        }
    }

    fn parse(text: &str) -> Option<Self> {
        let text = text.trim();
        if text == "*" {
            return Some(Fence::Any);
        }
        let inner = text.strip_prefix('"')?.strip_suffix('"')?;
        let epoch = inner.split_once('-').map_or(inner, |(epoch, _)| epoch);
        let mut parts = epoch.split('.');
        let mut digits = || parts.next().filter(|part| part.bytes().all(|byte| byte.is_ascii_digit()));
        let (generation, index, position) = (digits()?.parse().ok()?, digits()?.parse().ok()?, digits()?.parse().ok()?);
        parts.next().is_none().then_some(Fence::Granted(Epoch { generation, index, position }))
    }
}

impl<S: Sync> FromRequestParts<S> for Fence {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _state: &S) -> Result<Self, Problem> {
        let mut values = parts.headers.get_all(IF_MATCH).iter();
        let Some(first) = values.next() else { return Ok(Fence::Absent) };
        let fence = first.to_str().ok().and_then(Fence::parse).filter(|_| values.next().is_none());
        fence.ok_or_else(|| {
            let accepted = "If-Match: accepted is one ETag as a read gave it, \"EPOCH\" in quotes, or *.";
            Problem::new(Kind::InvalidHeader, accepted)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EPOCH: Epoch = Epoch { generation: 1, index: 20, position: 3 };

    #[test]
    fn a_tag_fences_by_its_epoch_and_bare_epochs_do_too() {
        let tag = Tag::of(EPOCH, &"x");
        assert_eq!(Fence::parse(tag.header().to_str().unwrap()), Some(Fence::Granted(EPOCH)));
        assert_eq!(Fence::parse("\"1.20.3\""), Some(Fence::Granted(EPOCH)));
        assert_eq!(Fence::parse(" * "), Some(Fence::Any));
        for bad in
            ["", "1.20.3", "\"1.20\"", "\"1.20.3.4\"", "\"1.20.+3\"", "\"x\"", "\"1.20.3\", \"1.20.4\"", "W/\"1.20.3\""]
        {
            assert_eq!(Fence::parse(bad), None, "{bad}");
        }
    }

    #[test]
    fn a_write_that_depends_on_what_was_seen_needs_to_say_so() {
        let newer = Epoch { index: 21, ..EPOCH };
        assert_eq!(Fence::Granted(EPOCH).needed(newer), Ok(EPOCH), "the ledger refuses it, not this node's view");
        assert_eq!(Fence::Any.needed(newer), Ok(newer));
        assert_eq!(Fence::Absent.needed(newer).unwrap_err().kind(), Kind::PreconditionRequired);
        assert_eq!(Fence::Granted(EPOCH).allowed(newer).unwrap_err().kind(), Kind::Stale);
        assert!(Fence::Absent.allowed(newer).is_ok() && Fence::Any.allowed(newer).is_ok());
    }

    #[test]
    fn a_reader_that_has_it_is_recognised_weakly_too() {
        let tag = Tag::of(EPOCH, &7);
        let known = |value: &str| {
            is_known(&http::HeaderMap::from_iter([(IF_NONE_MATCH, value.parse().unwrap())]), &tag.header())
        };
        assert!(known(&tag.to_string()) && known(&format!("\"a\", W/{tag}")) && known("*"));
        assert!(!known(&Tag::of(EPOCH, &8).to_string()) && !known(""));
    }
}
