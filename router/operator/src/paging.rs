//! Paged lists: bounded, in key order, continued by a cursor.
//!
//! A cursor holds the revision at which the list began, the key to continue after, and a digest of the list and
//! filter. Nothing has to be kept for it: a list continues on the current state, so records added after the cursor's
//! key are included and those added before are not.

use std::fmt::Display;
use std::str::FromStr;

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};
use utoipa::{IntoParams, ToSchema};
use xxhash_rust::xxh3::xxh3_64;

use super::problem::{Problem, ProblemKind};

/// Maximum page size.
pub(super) const MAX_LIMIT: u16 = 1_000;
/// Default page size.
const DEFAULT_LIMIT: u16 = 100;
/// Maximum number of records scanned per page: with a rare filter a page ends early, and its cursor continues.
const MAX_SCANNED_RECORDS: usize = 200_000;

/// Which part of a list.
#[derive(Clone, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct PageQuery {
    /// Most records in the answer.
    #[serde(default, deserialize_with = "parse_limit")]
    #[param(minimum = 1, maximum = 1000, default = 100)]
    limit: Option<u16>,
    /// The `next_cursor` of the page before.
    #[param(max_length = 1100)]
    cursor: Option<String>,
}

/// Parses the page size; any other value is refused with what is accepted.
pub(super) fn parse_limit<'de, D: Deserializer<'de>>(given: D) -> Result<Option<u16>, D::Error> {
    let limit = String::deserialize(given)?.parse().ok().filter(|limit| (1..=MAX_LIMIT).contains(limit));
    limit.map(Some).ok_or_else(|| D::Error::custom(format!("accepted is a whole number from 1 to {MAX_LIMIT}")))
}

/// Position in a list; part of every page.
#[derive(Serialize, ToSchema)]
#[schema(as = Page)]
pub(super) struct PageMeta {
    /// Revision at which the first page was read.
    list_revision: u64,
    /// Cursor of the next page; null on the last page.
    #[schema(max_length = 1100)]
    next_cursor: Option<String>,
}

#[derive(Clone, Debug)]
pub(super) struct PageRequest<K> {
    limit: usize,
    /// Key after which the page begins.
    pub(super) after: Option<K>,
    revision: u64,
    list_digest: u64,
}

impl PageQuery {
    /// Starts a page of the list `name` under `filter`, at `revision` unless a cursor continues an earlier one.
    pub(super) fn page<K: FromStr>(
        &self,
        name: &str,
        filter: &impl Serialize,
        revision: u64,
    ) -> Result<PageRequest<K>, Problem> {
        let limit = self.limit.unwrap_or(DEFAULT_LIMIT);
        if !(1..=MAX_LIMIT).contains(&limit) {
            return Err(Problem::bad_query(format!("limit: accepted is 1 to {MAX_LIMIT}")));
        }
        let named = serde_json::to_vec(&(name, filter)).unwrap_or_default();
        let (limit, list) = (usize::from(limit), xxh3_64(&named));
        let Some(cursor) = &self.cursor else {
            return Ok(PageRequest { limit, after: None, revision, list_digest: list });
        };
        let (began, after) = parse_cursor(cursor, list)?;
        Ok(PageRequest { limit, after: Some(after), revision: began, list_digest: list })
    }
}

/// Returns the revision and the key of a cursor for this list.
fn parse_cursor<K: FromStr>(cursor: &str, list: u64) -> Result<(u64, K), Problem> {
    let malformed =
        || Problem::new(ProblemKind::InvalidCursor, "cursor: accepted is the `next_cursor` of an earlier page.");
    let mut parts = cursor.splitn(3, '.');
    let mut number =
        || u64::from_str_radix(parts.next().filter(|part| part.len() <= 16 && !part.starts_with('+'))?, 16).ok();
    let (began, made_for) = (number().ok_or_else(malformed)?, number().ok_or_else(malformed)?);
    let after = parts.next().and_then(|key| key.parse().ok()).ok_or_else(malformed)?;
    if made_for != list {
        let detail = "The cursor was made for another list or another filter. Repeat the filter of the first page, or \
                      begin without a cursor.";
        return Err(Problem::new(ProblemKind::InvalidCursor, detail));
    }
    Ok((began, after))
}

impl<K: Display> PageRequest<K> {
    /// Collects lines until the page is full. `records` are in key order after the cursor, each with its lines, which
    /// are empty if the filter excludes it. Lines of one record stay together.
    pub(super) fn fill<T>(&self, mut records: impl Iterator<Item = (K, Vec<T>)>) -> (Vec<T>, PageMeta) {
        let mut lines = Vec::new();
        let mut last = None;
        for (key, found) in records.by_ref().take(MAX_SCANNED_RECORDS) {
            lines.extend(found);
            last = Some(key);
            if lines.len() >= self.limit {
                break;
            }
        }
        let is_over = records.next().is_none();
        let cursor = |key: K| format!("{:x}.{:x}.{key}", self.revision, self.list_digest);
        (lines, PageMeta { list_revision: self.revision, next_cursor: last.filter(|_| !is_over).map(cursor) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn query(limit: Option<u16>, cursor: Option<&str>) -> PageQuery {
        PageQuery { limit, cursor: cursor.map(str::to_owned) }
    }

    /// Lists 0..n in pages of `limit`, at increasing revisions.
    fn walk(n: u32, limit: u16) -> Vec<Vec<u32>> {
        let (mut pages, mut cursor) = (Vec::new(), None);
        for revision in 7.. {
            let page: PageRequest<u32> =
                query(Some(limit), cursor.as_deref()).page("numbers", &"even", revision).unwrap();
            let from = page.after.map_or(0, |after| after + 1);
            let (lines, listed) = page.fill((from..n).map(|k| (k, if k % 2 == 0 { vec![k] } else { vec![] })));
            assert_eq!(listed.list_revision, 7, "a list remembers where it began");
            pages.push(lines);
            cursor = listed.next_cursor;
            if cursor.is_none() {
                break;
            }
        }
        pages
    }

    #[test]
    fn pages_are_bounded_and_concatenate_to_the_full_list() {
        assert_eq!(walk(10, 2), [vec![0, 2], vec![4, 6], vec![8]]);
        assert_eq!(walk(10, 1000), [vec![0, 2, 4, 6, 8]]);
        assert_eq!(walk(0, 5), [Vec::<u32>::new()]);
    }

    #[test]
    fn record_is_never_split_and_a_full_last_page_has_no_cursor() {
        let page: PageRequest<u32> = query(Some(2), None).page("n", &(), 1).unwrap();
        let (lines, listed) = page.fill([(1, vec!["a"]), (2, vec!["b", "c", "d"])].into_iter());
        assert_eq!((lines, listed.next_cursor), (vec!["a", "b", "c", "d"], None));
    }

    #[test]
    fn foreign_and_malformed_cursors_and_limits_are_rejected() {
        let page: PageRequest<u32> = query(Some(1), None).page("n", &"tenant a", 1).unwrap();
        let next = page.fill([(1, vec![1]), (2, vec![2])].into_iter()).1.next_cursor.unwrap();
        let kind = |query: &PageQuery, name: &str, filter: &str| {
            query.page::<u32>(name, &filter, 9).map(drop).map_err(|it| it.kind())
        };
        assert_eq!(kind(&query(None, Some(&next)), "n", "tenant a"), Ok(()));
        assert_eq!(kind(&query(None, Some(&next)), "n", "tenant b"), Err(ProblemKind::InvalidCursor));
        assert_eq!(kind(&query(None, Some(&next)), "m", "tenant a"), Err(ProblemKind::InvalidCursor));
        for bad in ["", "x", "1", "1.2", "1.2.x", "+1.2.3", "1.2.3.4", "11111111111111111.2.3"] {
            assert_eq!(kind(&query(None, Some(bad)), "n", ""), Err(ProblemKind::InvalidCursor), "{bad}");
        }
        for limit in [0, 1001] {
            assert_eq!(kind(&query(Some(limit), None), "n", ""), Err(ProblemKind::InvalidQuery));
        }
    }
}
