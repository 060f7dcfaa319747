//! Whether KV arrives as what was sent: some transfers are checked, and a link that fails a check is barred until an operator clears it.
//!
//! It holds what is known, and judges; who is asked is in `pipeline/verify`.

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::Mutex;
use planner::{Action, BarredLink};
use serde::Deserialize;
use serde_json::Value;
use smart_default::SmartDefault;
use strum::{AsRefStr, VariantArray};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use vocabulary::Tokens;

/// Section `[correctness]`.
#[derive(Clone, Copy, PartialEq, Debug, Deserialize, SmartDefault)]
#[serde(deny_unknown_fields, default)]
pub struct CorrectnessConfig {
    /// Of so many transfers over a link one is checked, the first one included; 0 checks none.
    #[default(16)]
    pub one_in: u32,
    /// Where an engine's two likeliest next tokens are not further apart than this, as log-probabilities, it may say either.
    #[default(1e-4)]
    pub noise: f64,
}

impl CorrectnessConfig {
    /// What cannot be, and what is accepted.
    pub fn problem(self) -> Option<(&'static str, &'static str)> {
        (!(0.0..=1.0).contains(&self.noise)).then_some(("correctness.noise", "accepted is 0.0 to 1.0"))
    }
}

/// What a check came to.
#[derive(Clone, Copy, PartialEq, Eq, Debug, AsRefStr, VariantArray)]
#[strum(serialize_all = "snake_case")]
pub enum Outcome {
    /// What was transferred says what computing says, or differs by rounding.
    Same,
    /// It says something else.
    Mismatch,
    /// Two engines that computed the prompt do not agree with each other: nobody is blamed.
    Unclear,
    /// What was transferred is not there any more, or an engine has no fresh cache to compute in.
    NotComparable,
    /// Somebody did not answer.
    Failed,
    /// Another check was running.
    NoRoom,
}

/// What an engine says to a prompt: tokens at temperature 0, each with how far it is ahead of the next likely one.
#[derive(Clone, PartialEq, Debug)]
pub struct Said(Vec<(String, Option<f64>)>);

impl Said {
    /// Of an answer of `/v1/completions`. An engine that tells no log-probabilities says all its text at once.
    pub fn read(answer: &[u8]) -> Option<Self> {
        let answer: Value = serde_json::from_slice(answer).ok()?;
        let choice = answer.get("choices")?.get(0)?;
        let Some(tokens) = choice["logprobs"]["tokens"].as_array() else {
            let text = choice["text"].as_str().filter(|text| !text.is_empty())?;
            return Some(Self(vec![(text.to_owned(), None)]));
        };
        let told = tokens.iter().enumerate().map(|(at, token)| {
            let lead = choice["logprobs"]["top_logprobs"].get(at).and_then(lead);
            Some((token.as_str()?.to_owned(), lead))
        });
        told.collect::<Option<Vec<_>>>().filter(|told| !told.is_empty()).map(Self)
    }

    /// Whether both say the same, or part where one of them may have said either.
    pub fn agrees(&self, other: &Self, noise: f64) -> bool {
        let Some((own, others)) = self.0.iter().zip(&other.0).find(|(own, others)| own.0 != others.0) else {
            return self.0.len() == other.0.len();
        };
        let may_say_either = |lead: Option<f64>| lead.is_some_and(|lead| lead <= noise);
        may_say_either(own.1) || may_say_either(others.1)
    }
}

fn lead(top: &Value) -> Option<f64> {
    let mut likely: Vec<f64> = top.as_object()?.values().filter_map(Value::as_f64).collect();
    likely.sort_unstable_by(|a, b| b.total_cmp(a));
    Some(likely.first()? - likely.get(1)?)
}

/// A link that failed a check.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Barred {
    /// Which.
    pub link: BarredLink,
    /// What the transfer was for.
    pub action: Action,
    /// Since when, milliseconds since 1970.
    pub since_unix_ms: u64,
}

/// Whether a transfer is checked.
#[derive(Debug)]
pub enum Turn {
    /// It is not its turn.
    Not,
    /// It is, and another one is running.
    NoRoom,
    /// It is.
    Check(Place),
}

/// A check's place: one runs at a time, for as long as this is held.
#[derive(Debug)]
pub struct Place {
    _one: OwnedSemaphorePermit,
    of: Share,
    /// What it is believed to compute.
    prompt: Tokens,
}

/// A check computes a whole prompt, which takes a worker seconds: in the long run as much as this many times the share of
/// transfers that are checked, of all that moved. A fleet that has just started has many links that were never looked at.
const SHARE: u64 = 2;
/// Links that are counted at most; beyond that all begin anew.
const MOST_LINKS: usize = 1 << 16;

/// Which checks share what may be computed: links that were never looked at do not wait for those that were.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Share {
    /// A link's first.
    First,
    Again,
}

/// What checks have computed and transfers have not made up for yet.
#[derive(Debug, Default)]
struct Owed {
    first: Tokens,
    again: Tokens,
}

impl Owed {
    fn of(&mut self, share: Share) -> &mut Tokens {
        match share {
            Share::First => &mut self.first,
            Share::Again => &mut self.again,
        }
    }

    /// Half for each; what one has no use for is the other's.
    fn pay(&mut self, moved: Tokens) {
        let half = Tokens(moved.0 / 2);
        let rest = moved - half;
        let (left_first, left_again) = (rest - self.first, half - self.again);
        self.first -= rest + left_again;
        self.again -= half + left_first;
    }
}

/// A link that has carried something.
#[derive(Debug)]
struct Carried {
    /// Transfers since one was checked.
    since: u32,
    share: Share,
}

/// Who is checked next.
#[derive(Debug, Default)]
struct Turns {
    links: BTreeMap<BarredLink, Carried>,
    owed: Owed,
}

/// What this router's checks have shown since it started.
#[derive(Debug, SmartDefault)]
pub struct Correctness {
    turns: Mutex<Turns>,
    barred: Mutex<Vec<Barred>>,
    #[default(Arc::new(Semaphore::new(1)))]
    place: Arc<Semaphore>,
}

impl Correctness {
    /// Counts a transfer of so many tokens of a prompt. One that found no room leaves its turn to the next, as does one while
    /// what checks have computed is more than `SHARE` / `one_in` of all that moved.
    pub fn turn(&self, link: BarredLink, one_in: u32, (moved, prompt): (Tokens, Tokens)) -> Turn {
        if one_in == 0 {
            return Turn::Not;
        }
        let mut turns = self.turns.lock();
        let Turns { links, owed } = &mut *turns;
        owed.pay(Tokens(moved.0.saturating_mul(SHARE) / u64::from(one_in)));
        if links.len() >= MOST_LINKS && !links.contains_key(&link) {
            links.clear();
        }
        let carried = links.entry(link).or_insert(Carried { since: one_in - 1, share: Share::First });
        carried.since = carried.since.saturating_add(1);
        let of = carried.share;
        if carried.since < one_in || *owed.of(of) > Tokens::ZERO {
            return Turn::Not;
        }
        let Ok(one) = self.place.clone().try_acquire_owned() else { return Turn::NoRoom };
        *carried = Carried { since: 0, share: Share::Again };
        *owed.of(of) += prompt;
        Turn::Check(Place { _one: one, of, prompt })
    }

    /// A check is over, which made engines compute so much.
    pub fn over(&self, place: Place, computed: Tokens) {
        let mut turns = self.turns.lock();
        let owed = turns.owed.of(place.of);
        *owed = *owed + computed - place.prompt;
    }

    /// Bars a link. Whether it was free before.
    pub fn bar(&self, barred: Barred) -> bool {
        let mut all = self.barred.lock();
        let is_new = !all.iter().any(|known| known.link == barred.link);
        if is_new {
            all.push(barred);
        }
        is_new
    }

    /// Lets a link carry transfers again; the next one is checked. Whether it was barred.
    pub fn clear(&self, link: BarredLink) -> bool {
        let mut all = self.barred.lock();
        let before = all.len();
        all.retain(|barred| barred.link != link);
        self.turns.lock().links.remove(&link);
        all.len() < before
    }

    /// Every barred link, the oldest first.
    pub fn barred(&self) -> Vec<Barred> {
        self.barred.lock().clone()
    }

    /// The links alone.
    pub fn links(&self) -> Vec<BarredLink> {
        self.barred.lock().iter().map(|barred| barred.link).collect()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use vocabulary::WorkerId;

    use super::*;

    /// A prompt that costs nothing.
    const FREE: (Tokens, Tokens) = (Tokens::ZERO, Tokens::ZERO);
    const LINK: BarredLink = BarredLink { from: WorkerId(1), to: WorkerId(2) };

    fn said(tokens: &[(&str, f64)]) -> Said {
        let top: Vec<_> = tokens.iter().map(|(token, lead)| json!({*token: -0.5, "other": -0.5 - lead})).collect();
        let tokens: Vec<_> = tokens.iter().map(|(token, _)| *token).collect();
        let answer = json!({"choices": [{"text": "", "logprobs": {"tokens": tokens, "top_logprobs": top}}]});
        Said::read(answer.to_string().as_bytes()).unwrap()
    }

    #[test]
    fn tokens_that_differ_are_a_difference_unless_either_engine_may_have_said_both() {
        let own = said(&[("a", 1.0), ("b", 0.5)]);
        let agrees = |other: &Said| own.agrees(other, 1e-4);
        assert!(agrees(&own));
        assert!(!agrees(&said(&[("a", 1.0), ("c", 0.5)])));
        assert!(agrees(&said(&[("a", 1.0), ("c", 0.000_05)])), "rounding");
        assert!(!agrees(&said(&[("a", 0.000_05), ("c", 0.5)])), "only where they part");
        assert!(!agrees(&said(&[("a", 1.0)])), "one ended before");
        let close = said(&[("a", 1.0), ("b", 0.000_05)]);
        assert!(close.agrees(&said(&[("a", 1.0), ("c", 0.5)]), 1e-4));
    }

    #[test]
    fn an_engine_without_log_probabilities_is_compared_by_its_text() {
        let read =
            |text: &str| Said::read(json!({"choices": [{"text": text, "logprobs": null}]}).to_string().as_bytes());
        assert!(read("one").unwrap().agrees(&read("one").unwrap(), 1e-4));
        assert!(!read("one").unwrap().agrees(&read("two").unwrap(), 1.0));
        assert_eq!(read(""), None);
        assert!([&b"{}"[..], b"no", b"{\"choices\":[]}"].into_iter().all(|answer| Said::read(answer).is_none()));
    }

    #[test]
    fn the_first_transfer_of_a_link_is_checked_and_then_one_in_so_many() {
        let all = Correctness::default();
        let turns = |link, count| -> Vec<bool> {
            (0..count).map(|_| matches!(all.turn(link, 3, FREE), Turn::Check(_))).collect()
        };
        assert_eq!(turns(LINK, 7), [true, false, false, true, false, false, true]);
        assert_eq!(turns(BarredLink { from: WorkerId(3), ..LINK }, 2), [true, false]);
        assert!(matches!(all.turn(LINK, 0, FREE), Turn::Not));
    }

    #[test]
    fn checks_compute_a_bounded_share_of_what_moves_over_all_links() {
        let all = Correctness::default();
        let links = (0..200).map(|to| BarredLink { to: WorkerId(to), ..LINK });
        let whole = (Tokens(1000), Tokens(1000));
        let checked = links.clone().filter(|link| matches!(all.turn(*link, 16, whole), Turn::Check(_))).count();
        assert_eq!(checked, 25, "one of eight, though each is its link's first transfer");
        let all = Correctness::default();
        let piece = (Tokens(100), Tokens(10_000));
        let checked = links.filter(|link| matches!(all.turn(*link, 16, piece), Turn::Check(_))).count();
        assert_eq!(checked, 1, "a small piece of a long prompt is dear to check");
        assert!(
            matches!(all.turn(BarredLink { from: WorkerId(3), ..LINK }, 1, whole), Turn::Not),
            "what is owed is paid first"
        );
        let all = Correctness::default();
        assert!((0..5).all(|n| matches!(all.turn(LINK, 1, (Tokens(900 + n), Tokens(1000 + n))), Turn::Check(_))));
    }

    #[test]
    fn links_that_were_never_checked_do_not_wait_for_those_that_were() {
        let all = Correctness::default();
        let is_checked = |link, moved| matches!(all.turn(link, 1, moved), Turn::Check(_));
        let other = BarredLink { from: WorkerId(3), ..LINK };
        let piece = (Tokens(100), Tokens(10_000));
        assert!(is_checked(LINK, FREE) && is_checked(LINK, piece) && !is_checked(LINK, piece), "9,900 are owed");
        assert!(is_checked(other, piece));
        assert!(!is_checked(BarredLink { from: WorkerId(4), ..LINK }, piece), "now for these as well");
    }

    #[test]
    fn a_check_owes_what_it_made_engines_compute() {
        let all = Correctness::default();
        let whole = (Tokens(100), Tokens(10_000));
        let Turn::Check(place) = all.turn(LINK, 1, whole) else { panic!("it is the first") };
        all.over(place, Tokens::ZERO);
        let Turn::Check(place) = all.turn(LINK, 1, whole) else { panic!("nothing was computed") };
        all.over(place, Tokens(20_000));
        assert_eq!(all.turns.lock().owed.again, Tokens(20_000));
    }

    #[test]
    fn a_transfer_that_finds_a_check_running_leaves_its_turn_to_the_next() {
        let all = Correctness::default();
        let Turn::Check(place) = all.turn(LINK, 2, FREE) else { panic!("the first is checked") };
        assert!(matches!(all.turn(LINK, 2, FREE), Turn::Not));
        assert!(matches!(all.turn(LINK, 2, FREE), Turn::NoRoom));
        drop(place);
        assert!(matches!(all.turn(LINK, 2, FREE), Turn::Check(_)));
    }

    #[test]
    fn a_link_is_barred_once_and_until_it_is_cleared() {
        let all = Correctness::default();
        let barred = Barred { link: LINK, action: Action::RemotePrefill, since_unix_ms: 1 };
        assert!(all.bar(barred) && !all.bar(Barred { since_unix_ms: 2, ..barred }));
        assert_eq!((all.barred(), all.links()), (vec![barred], vec![LINK]));
        assert!(all.clear(LINK) && !all.clear(LINK));
        assert!(all.links().is_empty());
    }
}
