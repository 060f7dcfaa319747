//! Transfer checks: some KV transfers are checked for correctness, and a link that fails a check is disabled until an
//! operator clears it.
//!
//! This module schedules and judges; `pipeline/verify` asks the workers.

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::Mutex;
use planner::{Action, DirectedLink};
use serde::Deserialize;
use serde_json::Value;
use smart_default::SmartDefault;
use strum::{AsRefStr, VariantArray};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use vocabulary::Tokens;

/// Section `[transfer_check]`.
#[derive(Clone, Copy, PartialEq, Debug, Deserialize, SmartDefault)]
#[serde(deny_unknown_fields, default)]
pub struct TransferCheckSettings {
    /// One in this many transfers over a link is checked, including the first; 0 checks none.
    #[default(16)]
    pub sample_every: u32,
    /// Log-probability margin between an engine's two likeliest next tokens up to which either counts as correct.
    #[default(1e-4)]
    pub logprob_tolerance: f64,
}

impl TransferCheckSettings {
    /// Returns the setting that is out of range, and what is accepted.
    pub fn problem(self) -> Option<(&'static str, &'static str)> {
        (!(0.0..=1.0).contains(&self.logprob_tolerance))
            .then_some(("transfer_check.logprob_tolerance", "accepted is 0.0 to 1.0"))
    }
}

/// Result of a check.
#[derive(Clone, Copy, PartialEq, Eq, Debug, AsRefStr, VariantArray)]
#[strum(serialize_all = "snake_case")]
pub enum TransferCheckOutcome {
    /// What was transferred says what computing says, or differs by rounding.
    Match,
    /// It says something else.
    Mismatch,
    /// Two engines that computed the prompt do not agree with each other: nobody is blamed.
    Inconclusive,
    /// What was transferred is not there any more, or an engine has no fresh cache to compute in.
    NotComparable,
    /// A worker did not answer.
    Failed,
    /// Another check was running.
    Skipped,
}

/// An engine's answer to a prompt: tokens at temperature 0, each with its log-probability margin over the next likely
/// one.
#[derive(Clone, PartialEq, Debug)]
pub struct GreedySample(Vec<(String, Option<f64>)>);

impl GreedySample {
    /// Reads an answer of `/v1/completions`. Without log-probabilities the whole text counts as one token.
    pub fn read(answer: &[u8]) -> Option<Self> {
        let answer: Value = serde_json::from_slice(answer).ok()?;
        let choice = answer.get("choices")?.get(0)?;
        let Some(tokens) = choice["logprobs"]["tokens"].as_array() else {
            let text = choice["text"].as_str().filter(|text| !text.is_empty())?;
            return Some(Self(vec![(text.to_owned(), None)]));
        };
        let texts = tokens.iter().enumerate().map(|(at, token)| {
            let lead = choice["logprobs"]["top_logprobs"].get(at).and_then(top_margin);
            Some((token.as_str()?.to_owned(), lead))
        });
        texts.collect::<Option<Vec<_>>>().filter(|texts| !texts.is_empty()).map(Self)
    }

    /// Whether both are equal, or diverge where either token was about equally likely.
    pub fn agrees_with(&self, other: &Self, noise: f64) -> bool {
        let Some((own, others)) = self.0.iter().zip(&other.0).find(|(own, others)| own.0 != others.0) else {
            return self.0.len() == other.0.len();
        };
        let may_say_either = |lead: Option<f64>| lead.is_some_and(|lead| lead <= noise);
        may_say_either(own.1) || may_say_either(others.1)
    }
}

fn top_margin(top: &Value) -> Option<f64> {
    let mut likely: Vec<f64> = top.as_object()?.values().filter_map(Value::as_f64).collect();
    likely.sort_unstable_by(|a, b| b.total_cmp(a));
    Some(likely.first()? - likely.get(1)?)
}

/// A link that failed a check.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DisabledLinkRecord {
    /// The link.
    pub link: DirectedLink,
    /// The action that the transfer belonged to.
    pub action: Action,
    /// When it was disabled, in milliseconds since 1970.
    pub since_unix_ms: u64,
}

/// Whether to check a transfer.
#[derive(Debug)]
pub enum CheckDecision {
    /// No check is due.
    NotDue,
    /// A check is due, but another one is running.
    Busy,
    /// Check this transfer.
    Check(CheckPermit),
}

/// Permit for a check: one runs at a time, as long as this is held.
#[derive(Debug)]
pub struct CheckPermit {
    _permit: OwnedSemaphorePermit,
    class: CheckBudgetClass,
    /// Tokens that the check is expected to compute.
    expected_tokens: Tokens,
}

/// Limit for the compute of checks, each of which computes a whole prompt and takes a worker seconds: in the long run
/// this many times the checked share of all moved tokens. A fleet that has just started has many links without a check.
const COMPUTE_RATIO: u64 = 2;
/// Maximum number of tracked links; beyond it all start anew.
const MAX_LINKS: usize = 1 << 16;

/// Class of checks with a compute budget of its own: a link's first check does not wait for other links' repeated
/// checks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum CheckBudgetClass {
    /// A link's first check.
    First,
    Repeat,
}

/// Tokens that checks have computed and transfers have not yet earned back.
#[derive(Debug, Default)]
struct CheckDebt {
    first: Tokens,
    repeat: Tokens,
}

impl CheckDebt {
    fn of(&mut self, class: CheckBudgetClass) -> &mut Tokens {
        match class {
            CheckBudgetClass::First => &mut self.first,
            CheckBudgetClass::Repeat => &mut self.repeat,
        }
    }

    /// Repays half to each class; what one does not need goes to the other.
    fn repay(&mut self, moved: Tokens) {
        let half = Tokens(moved.0 / 2);
        let rest = moved - half;
        let (left_first, left_again) = (rest - self.first, half - self.repeat);
        self.first -= rest + left_again;
        self.repeat -= half + left_first;
    }
}

/// A link that has carried transfers.
#[derive(Debug)]
struct LinkSampler {
    /// Transfers since the last check.
    unchecked: u32,
    class: CheckBudgetClass,
}

/// Decides which transfers are checked.
#[derive(Debug, Default)]
struct CheckSchedule {
    links: BTreeMap<DirectedLink, LinkSampler>,
    debt: CheckDebt,
}

/// State of this router's transfer checks since it started: their schedule, and the disabled links.
#[derive(Debug, SmartDefault)]
pub struct TransferCheckState {
    schedule: Mutex<CheckSchedule>,
    disabled_links: Mutex<Vec<DisabledLinkRecord>>,
    #[default(Arc::new(Semaphore::new(1)))]
    slot: Arc<Semaphore>,
}

impl TransferCheckState {
    /// Counts a transfer of this many tokens of a prompt. If a check is due but none can run, the next transfer is due;
    /// the same while checks have computed more than `COMPUTE_RATIO` / `one_in` of all moved tokens.
    pub fn decide(&self, link: DirectedLink, one_in: u32, (moved, prompt): (Tokens, Tokens)) -> CheckDecision {
        if one_in == 0 {
            return CheckDecision::NotDue;
        }
        let mut turns = self.schedule.lock();
        let CheckSchedule { links, debt: owed } = &mut *turns;
        owed.repay(Tokens(moved.0.saturating_mul(COMPUTE_RATIO) / u64::from(one_in)));
        if links.len() >= MAX_LINKS && !links.contains_key(&link) {
            links.clear();
        }
        let carried =
            links.entry(link).or_insert(LinkSampler { unchecked: one_in - 1, class: CheckBudgetClass::First });
        carried.unchecked = carried.unchecked.saturating_add(1);
        let of = carried.class;
        if carried.unchecked < one_in || *owed.of(of) > Tokens::ZERO {
            return CheckDecision::NotDue;
        }
        let Ok(one) = self.slot.clone().try_acquire_owned() else { return CheckDecision::Busy };
        *carried = LinkSampler { unchecked: 0, class: CheckBudgetClass::Repeat };
        *owed.of(of) += prompt;
        CheckDecision::Check(CheckPermit { _permit: one, class: of, expected_tokens: prompt })
    }

    /// Ends a check, for which engines have computed this many tokens.
    pub fn settle(&self, permit: CheckPermit, computed: Tokens) {
        let mut turns = self.schedule.lock();
        let owed = turns.debt.of(permit.class);
        *owed = *owed + computed - permit.expected_tokens;
    }

    /// Disables a link. Returns whether it was enabled before.
    pub fn bar(&self, barred: DisabledLinkRecord) -> bool {
        let mut all = self.disabled_links.lock();
        let is_new = !all.iter().any(|known| known.link == barred.link);
        if is_new {
            all.push(barred);
        }
        is_new
    }

    /// Enables a link again, so that it carries transfers; the next one is checked. Returns whether it was disabled.
    pub fn clear(&self, link: DirectedLink) -> bool {
        let mut all = self.disabled_links.lock();
        let before = all.len();
        all.retain(|barred| barred.link != link);
        self.schedule.lock().links.remove(&link);
        all.len() < before
    }

    /// Returns the disabled links with details, the oldest first.
    pub fn disabled_link_records(&self) -> Vec<DisabledLinkRecord> {
        self.disabled_links.lock().clone()
    }

    /// Returns the disabled links.
    pub fn disabled_links(&self) -> Vec<DirectedLink> {
        self.disabled_links.lock().iter().map(|barred| barred.link).collect()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use vocabulary::WorkerId;

    use super::*;

    /// A prompt without cost.
    const FREE: (Tokens, Tokens) = (Tokens::ZERO, Tokens::ZERO);
    const LINK: DirectedLink = DirectedLink { from: WorkerId(1), to: WorkerId(2) };

    fn sample(tokens: &[(&str, f64)]) -> GreedySample {
        let top: Vec<_> = tokens.iter().map(|(token, lead)| json!({*token: -0.5, "other": -0.5 - lead})).collect();
        let tokens: Vec<_> = tokens.iter().map(|(token, _)| *token).collect();
        let answer = json!({"choices": [{"text": "", "logprobs": {"tokens": tokens, "top_logprobs": top}}]});
        GreedySample::read(answer.to_string().as_bytes()).unwrap()
    }

    #[test]
    fn samples_disagree_where_tokens_differ_beyond_the_logprob_tolerance() {
        let own = sample(&[("a", 1.0), ("b", 0.5)]);
        let agrees = |other: &GreedySample| own.agrees_with(other, 1e-4);
        assert!(agrees(&own));
        assert!(!agrees(&sample(&[("a", 1.0), ("c", 0.5)])));
        assert!(agrees(&sample(&[("a", 1.0), ("c", 0.000_05)])), "rounding");
        assert!(!agrees(&sample(&[("a", 0.000_05), ("c", 0.5)])), "only where they part");
        assert!(!agrees(&sample(&[("a", 1.0)])), "one ended before");
        let close = sample(&[("a", 1.0), ("b", 0.000_05)]);
        assert!(close.agrees_with(&sample(&[("a", 1.0), ("c", 0.5)]), 1e-4));
    }

    #[test]
    fn an_engine_without_logprobs_is_compared_by_text() {
        let read = |text: &str| {
            GreedySample::read(json!({"choices": [{"text": text, "logprobs": null}]}).to_string().as_bytes())
        };
        assert!(read("one").unwrap().agrees_with(&read("one").unwrap(), 1e-4));
        assert!(!read("one").unwrap().agrees_with(&read("two").unwrap(), 1.0));
        assert_eq!(read(""), None);
        assert!(
            [&b"{}"[..], b"no", b"{\"choices\":[]}"].into_iter().all(|answer| GreedySample::read(answer).is_none())
        );
    }

    #[test]
    fn a_link_is_checked_at_its_first_transfer_and_then_every_nth() {
        let all = TransferCheckState::default();
        let turns = |link, count| -> Vec<bool> {
            (0..count).map(|_| matches!(all.decide(link, 3, FREE), CheckDecision::Check(_))).collect()
        };
        assert_eq!(turns(LINK, 7), [true, false, false, true, false, false, true]);
        assert_eq!(turns(DirectedLink { from: WorkerId(3), ..LINK }, 2), [true, false]);
        assert!(matches!(all.decide(LINK, 0, FREE), CheckDecision::NotDue));
    }

    #[test]
    fn check_compute_is_a_bounded_share_of_transferred_tokens() {
        let all = TransferCheckState::default();
        let links = (0..200).map(|to| DirectedLink { to: WorkerId(to), ..LINK });
        let whole = (Tokens(1000), Tokens(1000));
        let checked =
            links.clone().filter(|link| matches!(all.decide(*link, 16, whole), CheckDecision::Check(_))).count();
        assert_eq!(checked, 25, "one of eight, though each is its link's first transfer");
        let all = TransferCheckState::default();
        let piece = (Tokens(100), Tokens(10_000));
        let checked = links.filter(|link| matches!(all.decide(*link, 16, piece), CheckDecision::Check(_))).count();
        assert_eq!(checked, 1, "a small piece of a long prompt is dear to check");
        assert!(
            matches!(all.decide(DirectedLink { from: WorkerId(3), ..LINK }, 1, whole), CheckDecision::NotDue),
            "what is owed is paid first"
        );
        let all = TransferCheckState::default();
        assert!(
            (0..5).all(|n| matches!(all.decide(LINK, 1, (Tokens(900 + n), Tokens(1000 + n))), CheckDecision::Check(_)))
        );
    }

    #[test]
    fn unchecked_links_do_not_wait_for_the_debt_of_checked_ones() {
        let all = TransferCheckState::default();
        let is_checked = |link, moved| matches!(all.decide(link, 1, moved), CheckDecision::Check(_));
        let other = DirectedLink { from: WorkerId(3), ..LINK };
        let piece = (Tokens(100), Tokens(10_000));
        assert!(is_checked(LINK, FREE) && is_checked(LINK, piece) && !is_checked(LINK, piece), "9,900 are owed");
        assert!(is_checked(other, piece));
        assert!(!is_checked(DirectedLink { from: WorkerId(4), ..LINK }, piece), "now for these as well");
    }

    #[test]
    fn a_check_is_charged_for_the_tokens_it_recomputed() {
        let all = TransferCheckState::default();
        let whole = (Tokens(100), Tokens(10_000));
        let CheckDecision::Check(permit) = all.decide(LINK, 1, whole) else { panic!("it is the first") };
        all.settle(permit, Tokens::ZERO);
        let CheckDecision::Check(permit) = all.decide(LINK, 1, whole) else { panic!("nothing was computed") };
        all.settle(permit, Tokens(20_000));
        assert_eq!(all.schedule.lock().debt.repeat, Tokens(20_000));
    }

    #[test]
    fn a_transfer_that_is_due_during_a_running_check_defers_to_the_next() {
        let all = TransferCheckState::default();
        let CheckDecision::Check(permit) = all.decide(LINK, 2, FREE) else { panic!("the first is checked") };
        assert!(matches!(all.decide(LINK, 2, FREE), CheckDecision::NotDue));
        assert!(matches!(all.decide(LINK, 2, FREE), CheckDecision::Busy));
        drop(permit);
        assert!(matches!(all.decide(LINK, 2, FREE), CheckDecision::Check(_)));
    }

    #[test]
    fn a_link_stays_disabled_until_cleared() {
        let all = TransferCheckState::default();
        let barred = DisabledLinkRecord { link: LINK, action: Action::RemotePrefill, since_unix_ms: 1 };
        assert!(all.bar(barred) && !all.bar(DisabledLinkRecord { since_unix_ms: 2, ..barred }));
        assert_eq!((all.disabled_link_records(), all.disabled_links()), (vec![barred], vec![LINK]));
        assert!(all.clear(LINK) && !all.clear(LINK));
        assert!(all.disabled_links().is_empty());
    }
}
