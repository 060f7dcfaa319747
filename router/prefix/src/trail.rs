//! What a conversation's last step leaves for the next one: how far its body and its prompt are known.

use std::sync::Arc;

use xxhash_rust::xxh3::Xxh3;

use crate::chat::Variables;
use crate::pieces::Pieces;
use crate::scan::Role;
use crate::window::{Before, Cut, Turn};

/// Places that are kept of one conversation.
const MOST_KNOWN: usize = 32;
/// The shortest beginning of a body by which a trail is found; the others are each twice as long.
const FIRST_LEAD: usize = 512;

/// How far a conversation is known. Immutable and shared.
#[derive(Debug)]
pub(crate) struct Trail {
    /// Whose: the tenant and the chain's root.
    pub(crate) scope: u128,
    /// Digests of the first 512, 1024, 2048 ... bytes of the list of messages.
    pub(crate) leads: Vec<u128>,
    /// Where it can be gone on from, ascending; never empty.
    pub(crate) known: Vec<Arc<Known>>,
    /// The names of the blocks up to the last known place.
    pub(crate) blocks: Pieces,
    /// What does not change from step to step.
    pub(crate) frame: Arc<Frame>,
    /// What follows a last message of each role that was seen, with nothing after it.
    pub(crate) closings: Vec<(Role, Arc<Cut>)>,
}

/// What all steps of a conversation have in common.
#[derive(Debug)]
pub(crate) struct Frame {
    /// The template's variables, with short tools.
    pub(crate) variables: Variables,
    /// The system messages that open the conversation.
    pub(crate) leads: Box<[Role]>,
    /// 0, and where each of `leads` ends in the list of messages.
    pub(crate) head_ends: Box<[usize]>,
    /// The day for which it holds; none where the template does not ask.
    pub(crate) day: Option<i64>,
    /// Estimated bytes of `variables`.
    pub(crate) bytes: usize,
}

/// A place after a message, in the body and in the prompt.
#[derive(Clone, Debug)]
pub(crate) struct Known {
    /// Bytes of the list up to the end of the message, and their digest.
    pub(crate) body: usize,
    pub(crate) digest: u128,
    /// Bytes of the rendered prompt up to the cut.
    pub(crate) text: usize,
    /// Steps of the template engine that the prompts up to here have taken: no fewer than a whole one takes.
    pub(crate) steps: u64,
    /// Tokens up to the cut.
    pub(crate) tokens: usize,
    /// Those of them after the last whole block.
    pub(crate) tail: Box<[u32]>,
    /// Between the message's content and the cut, and the special token at the cut.
    pub(crate) gap: Arc<str>,
    pub(crate) token: usize,
    /// Whether a user spoke after it when it was found.
    pub(crate) cut_in: Turn,
    pub(crate) before: Before,
}

impl Trail {
    /// Memory that it takes.
    pub(crate) fn bytes(&self) -> usize {
        let known: usize = self.known.iter().map(|known| size_of::<Known>() + 4 * known.tail.len() + 32).sum();
        let closings: usize = self.closings.iter().map(|(_, cut)| cut.bytes() + 32).sum();
        // Its leads stand in an index too.
        let leads = 64 * self.leads.len();
        size_of::<Self>() + known + closings + leads + self.blocks.bytes() + self.frame.bytes
    }

    /// The last place up to which `body` is the same; what is past `checked` is compared on the way, and a place before
    /// that once it is the last one. With the state there.
    pub(crate) fn deepest<'a>(&self, checked: usize, leading: &Leading<'a>) -> Option<(usize, Leading<'a>)> {
        let last = self.known.len().checked_sub(1)?;
        let mut at = leading.clone();
        // Mostly all of it: one digest tells.
        if at.digest(self.known[last].body) == Some(self.known[last].digest) {
            return Some((last, at));
        }
        let mut at = leading.clone();
        let mut best = None;
        for (n, known) in self.known.iter().enumerate() {
            if known.body > checked && at.digest(known.body) != Some(known.digest) {
                break;
            }
            best = Some((n, (known.body > checked).then(|| at.clone())));
        }
        match best? {
            (n, Some(at)) => Some((n, at)),
            (n, None) => {
                let known = &self.known[n];
                let mut at = Leading::new(leading.body);
                (at.digest(known.body) == Some(known.digest)).then_some((n, at))
            }
        }
    }
}

/// Adds a place; the older half is thinned out where there are too many.
pub(crate) fn push_known(all: &mut Vec<Arc<Known>>, known: Known) {
    if all.len() >= MOST_KNOWN {
        let mut n = 0;
        all.retain(|_| {
            n += 1;
            n > MOST_KNOWN / 2 || n % 2 == 1
        });
    }
    all.push(known.into());
}

/// Digests of a body's beginnings, in one pass over it.
#[derive(Clone)]
pub(crate) struct Leading<'a> {
    body: &'a [u8],
    at: usize,
    hash: Xxh3,
}

impl<'a> Leading<'a> {
    pub(crate) fn new(body: &'a [u8]) -> Self {
        Self { body, at: 0, hash: Xxh3::new() }
    }

    /// Of the first `end` bytes; none where there are fewer.
    pub(crate) fn digest(&mut self, end: usize) -> Option<u128> {
        if end < self.at {
            *self = Self::new(self.body);
        }
        self.hash.update(self.body.get(self.at..end)?);
        self.at = end;
        Some(self.hash.digest128())
    }

    /// Adds the digests that a trail which is known up to `end` is found by to those that it has.
    pub(crate) fn leads(&mut self, leads: &mut Vec<u128>, end: usize) {
        while let Some(lead) = lead(leads.len()).filter(|lead| *lead <= end) {
            leads.extend(self.digest(lead));
        }
    }
}

/// Bytes of the `n`th beginning by which trails are found.
pub(crate) fn lead(n: usize) -> Option<usize> {
    FIRST_LEAD.checked_shl(u32::try_from(n).ok()?).filter(|lead| *lead >> n == FIRST_LEAD)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use xxhash_rust::xxh3::xxh3_128;

    fn known(body: &[u8], end: usize) -> Known {
        let before = Before { leads: [].into(), asked: crate::scan::Asked::Never, last: Role::User };
        let (gap, tail, cut_in) = ("".into(), [].into(), Turn::Same);
        Known {
            body: end,
            digest: xxh3_128(&body[..end]),
            text: 0,
            steps: 0,
            tokens: 0,
            tail,
            gap,
            token: 0,
            cut_in,
            before,
        }
    }

    pub(crate) fn trail(body: &[u8], ends: &[usize]) -> Trail {
        let frame = Frame { variables: Vec::new(), leads: [].into(), head_ends: [0].into(), day: None, bytes: 0 };
        let mut leads = Vec::new();
        Leading::new(body).leads(&mut leads, *ends.last().unwrap());
        let known = ends.iter().map(|end| known(body, *end).into()).collect();
        Trail { scope: 0, leads, known, blocks: Pieces::default(), frame: frame.into(), closings: Vec::new() }
    }

    #[test]
    fn digests_of_beginnings_are_those_of_each_by_itself_in_any_order() {
        let body: Vec<u8> = (0..5000u32).map(|n| (n % 251) as u8).collect();
        let mut leading = Leading::new(&body);
        for end in [0, 1, 511, 512, 4999, 5000, 700, 701] {
            assert_eq!(leading.digest(end), Some(xxh3_128(&body[..end])), "{end}");
        }
        assert_eq!(leading.digest(5001), None);
    }

    #[test]
    fn a_trail_is_found_by_beginnings_that_it_is_known_up_to() {
        assert_eq!((0..).map_while(lead).take(3).collect::<Vec<_>>(), [512, 1024, 2048]);
        assert!((0..).map_while(lead).count() < 64);
        let body = vec![7; 3000];
        for (end, expected) in [(511, 0), (512, 1), (2047, 2), (2048, 3), (3000, 3)] {
            let trail = trail(&body, &[end]);
            assert_eq!(trail.leads.len(), expected, "{end}");
            assert!(trail.leads.iter().zip((0..).map_while(lead)).all(|(key, end)| *key == xxh3_128(&body[..end])));
        }
    }

    #[test]
    fn a_body_goes_along_a_trail_up_to_its_first_difference() {
        let body: Vec<u8> = (0..3000u32).map(|n| (n % 241) as u8).collect();
        let trail = trail(&body, &[100, 900, 2500]);
        let deepest = |body: &[u8], checked| trail.deepest(checked, &Leading::new(body)).map(|(at, _)| at);
        assert_eq!(deepest(&body, 0), Some(2));
        assert_eq!(deepest(&body[..2499], 0), Some(1));
        assert_eq!(deepest(&body[..50], 0), None);
        for (changed, expected) in [(2501, Some(2)), (2499, Some(1)), (500, Some(0)), (99, None)] {
            let mut other = body.clone();
            other[changed] ^= 1;
            assert_eq!(deepest(&other, 0), expected, "{changed}");
        }
        let mut other = body;
        other[2499] ^= 1;
        assert_eq!(deepest(&other, 950), Some(1), "compared before");
        other[99] ^= 1;
        assert_eq!(deepest(&other, 950), None, "and again where it is gone on with");
    }

    #[test]
    fn places_are_thinned_out_and_the_newest_stay() {
        let body = vec![1; 1000];
        let mut all = Vec::new();
        for end in 0..200 {
            push_known(&mut all, known(&body, end));
            assert!(all.len() <= MOST_KNOWN && all.last().unwrap().body == end);
        }
        assert!(all.is_sorted_by_key(|known| known.body) && all[0].body == 0);
        let newest: Vec<usize> = all.iter().rev().take(8).map(|known| known.body).collect();
        assert_eq!(newest, (192..200).rev().collect::<Vec<_>>());
    }

    #[test]
    fn a_trail_under_many_beginnings_of_a_body_is_compared_with_it_once() {
        use crate::{Rung, Trails};
        let body: Vec<u8> = (0..20_000u32).map(|n| (n % 241) as u8).collect();
        let trails = Trails::new(vocabulary::Bytes(1 << 20));
        trails.put("", Arc::new(trail(&body, &[900, 19_000])), (Some(1), None));
        let forked: Vec<u8> = body[..9_000].iter().copied().chain([250; 11_000]).collect();
        let ends = |body: &[u8], known| -> Vec<usize> {
            trails.candidates(0, body, known).iter().map(|candidate| candidate.end).collect()
        };
        assert_eq!(ends(&forked, None), [8192], "by the longest of five");
        let found = trails.find(0, Some(1), &forked).unwrap();
        assert_eq!((found.rung, found.known), (Rung::Segment, 0));
        assert_eq!(ends(&forked, Some(found.id)), [0usize; 0], "it was found by its name");
        trails.put("", Arc::new(trail(&forked, &[900, 2_500])), (None, None));
        assert_eq!(ends(&forked, None), [2048, 8192], "the newer one has the shorter beginnings");
        assert_eq!(trails.find(0, None, &forked[..2_500]).unwrap().rung, Rung::Leading);
        assert!(trails.find(0, None, &[9; 3_000]).is_none());
    }
}
