//! Checkpoint that a conversation's last step leaves for the next one: how far its body and prompt are known.

use std::sync::Arc;

use xxhash_rust::xxh3::Xxh3;

use crate::block_segments::SharedBlockHashes;
use crate::chat::TemplateVariables;
use crate::incremental_rendering::{HistorySummary, RenderedTail, TurnContinuation};
use crate::message_scan::MessageRole;

/// Maximum number of boundaries kept per conversation.
const MAX_BOUNDARIES: usize = 32;
/// Shortest leading bytes that a checkpoint is looked up by; each further length is twice the one before.
const MIN_LEAD_BYTES: usize = 512;

/// Known part of a conversation. Immutable and shared.
#[derive(Debug)]
pub(crate) struct ConversationCheckpoint {
    /// Hash of the tenant, the chain's root and the settings.
    pub(crate) scope: u128,
    /// Digests of the first 512, 1024, 2048 ... bytes of the list of messages.
    pub(crate) lead_digests: Vec<u128>,
    /// Boundaries to resume from, ascending; never empty.
    pub(crate) boundaries: Vec<Arc<MessageBoundary>>,
    /// Block hashes up to the last boundary.
    pub(crate) blocks: SharedBlockHashes,
    /// What does not change between steps.
    pub(crate) header: Arc<ConversationSetup>,
    /// For each role seen in a last message: what the template renders after it when nothing follows.
    pub(crate) closings: Vec<(MessageRole, Arc<RenderedTail>)>,
}

/// What all steps of a conversation have in common.
#[derive(Debug)]
pub(crate) struct ConversationSetup {
    /// Template variables, with the tools replaced by a short one.
    pub(crate) variables: TemplateVariables,
    /// Roles of the system messages that open the conversation.
    pub(crate) leading_roles: Box<[MessageRole]>,
    /// 0, then the offset in the message list where each leading message ends.
    pub(crate) head_ends: Box<[usize]>,
    /// Day for which the checkpoint is valid; `None` if the template does not print the date.
    pub(crate) day: Option<i64>,
    /// Estimated bytes of `variables`.
    pub(crate) bytes: usize,
}

/// Boundary after a message, located in the body and in the prompt.
#[derive(Clone, Debug)]
pub(crate) struct MessageBoundary {
    /// Bytes of the message list up to the end of the message, and their digest.
    pub(crate) body_bytes: usize,
    pub(crate) digest: u128,
    /// Bytes of the rendered prompt up to the cut.
    pub(crate) text_bytes: usize,
    /// Template engine steps of the renderings so far; an upper bound of the steps of a full rendering.
    pub(crate) template_steps: u64,
    /// Tokens up to the cut.
    pub(crate) tokens: usize,
    /// Token ids before the cut that follow the last whole block.
    pub(crate) tail: Box<[u32]>,
    /// Rendered text between the message's content and the cut, and the special token at the cut.
    pub(crate) gap: Arc<str>,
    pub(crate) cut_token: usize,
    /// Whether a user message followed when the boundary was recorded.
    pub(crate) following_turn: TurnContinuation,
    pub(crate) history: HistorySummary,
}

impl ConversationCheckpoint {
    /// Memory of the checkpoint in bytes.
    pub(crate) fn memory_bytes(&self) -> usize {
        let known: usize =
            self.boundaries.iter().map(|known| size_of::<MessageBoundary>() + 4 * known.tail.len() + 32).sum();
        let closings: usize = self.closings.iter().map(|(_, cut)| cut.memory_bytes() + 32).sum();
        // Lead digests are in the cache's index, too.
        let leads = 64 * self.lead_digests.len();
        size_of::<Self>() + known + closings + leads + self.blocks.memory_bytes() + self.header.bytes
    }

    /// Returns the last boundary up to which the body is equal, and the hasher state there. Boundaries past `checked`
    /// are compared on the way; an earlier one only if it turns out to be the last.
    pub(crate) fn deepest_match<'a>(
        &self,
        checked: usize,
        leading: &BodyPrefixHasher<'a>,
    ) -> Option<(usize, BodyPrefixHasher<'a>)> {
        let last = self.boundaries.len().checked_sub(1)?;
        let mut at = leading.clone();
        // Fast path: usually the whole checkpoint matches, which one digest proves.
        if at.digest(self.boundaries[last].body_bytes) == Some(self.boundaries[last].digest) {
            return Some((last, at));
        }
        let mut at = leading.clone();
        let mut best = None;
        for (n, known) in self.boundaries.iter().enumerate() {
            if known.body_bytes > checked && at.digest(known.body_bytes) != Some(known.digest) {
                break;
            }
            best = Some((n, (known.body_bytes > checked).then(|| at.clone())));
        }
        match best? {
            (n, Some(at)) => Some((n, at)),
            (n, None) => {
                let known = &self.boundaries[n];
                let mut at = BodyPrefixHasher::new(leading.body);
                (at.digest(known.body_bytes) == Some(known.digest)).then_some((n, at))
            }
        }
    }
}

/// Appends a boundary. If there are too many, every other one of the older half is dropped.
pub(crate) fn push_boundary(all: &mut Vec<Arc<MessageBoundary>>, known: MessageBoundary) {
    if all.len() >= MAX_BOUNDARIES {
        let mut n = 0;
        all.retain(|_| {
            n += 1;
            n > MAX_BOUNDARIES / 2 || n % 2 == 1
        });
    }
    all.push(known.into());
}

/// Incremental digests of a body's prefixes, in one pass.
#[derive(Clone)]
pub(crate) struct BodyPrefixHasher<'a> {
    body: &'a [u8],
    at: usize,
    hash: Xxh3,
}

impl<'a> BodyPrefixHasher<'a> {
    pub(crate) fn new(body: &'a [u8]) -> Self {
        Self { body, at: 0, hash: Xxh3::new() }
    }

    /// Returns the digest of the first `end` bytes; `None` if there are fewer.
    pub(crate) fn digest(&mut self, end: usize) -> Option<u128> {
        if end < self.at {
            *self = Self::new(self.body);
        }
        self.hash.update(self.body.get(self.at..end)?);
        self.at = end;
        Some(self.hash.digest128())
    }

    /// Appends the missing lead digests of a checkpoint that is known up to `end`.
    pub(crate) fn push_lead_digests(&mut self, leads: &mut Vec<u128>, end: usize) {
        while let Some(lead) = lead_bytes(leads.len()).filter(|lead| *lead <= end) {
            leads.extend(self.digest(lead));
        }
    }
}

/// Length of the `n`th leading part that checkpoints are looked up by; `None` on overflow.
pub(crate) fn lead_bytes(n: usize) -> Option<usize> {
    MIN_LEAD_BYTES.checked_shl(u32::try_from(n).ok()?).filter(|lead| *lead >> n == MIN_LEAD_BYTES)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use xxhash_rust::xxh3::xxh3_128;

    fn boundary(body: &[u8], end: usize) -> MessageBoundary {
        let before = HistorySummary {
            leading_roles: [].into(),
            question: crate::message_scan::QuestionState::Never,
            last_role: MessageRole::User,
        };
        let (gap, tail, cut_in) = ("".into(), [].into(), TurnContinuation::Same);
        MessageBoundary {
            body_bytes: end,
            digest: xxh3_128(&body[..end]),
            text_bytes: 0,
            template_steps: 0,
            tokens: 0,
            tail,
            gap,
            cut_token: 0,
            following_turn: cut_in,
            history: before,
        }
    }

    pub(crate) fn checkpoint(body: &[u8], ends: &[usize]) -> ConversationCheckpoint {
        let frame = ConversationSetup {
            variables: Vec::new(),
            leading_roles: [].into(),
            head_ends: [0].into(),
            day: None,
            bytes: 0,
        };
        let mut leads = Vec::new();
        BodyPrefixHasher::new(body).push_lead_digests(&mut leads, *ends.last().unwrap());
        let known = ends.iter().map(|end| boundary(body, *end).into()).collect();
        ConversationCheckpoint {
            scope: 0,
            lead_digests: leads,
            boundaries: known,
            blocks: SharedBlockHashes::default(),
            header: frame.into(),
            closings: Vec::new(),
        }
    }

    #[test]
    fn prefix_digests_do_not_depend_on_query_order() {
        let body: Vec<u8> = (0..5000u32).map(|n| (n % 251) as u8).collect();
        let mut leading = BodyPrefixHasher::new(&body);
        for end in [0, 1, 511, 512, 4999, 5000, 700, 701] {
            assert_eq!(leading.digest(end), Some(xxh3_128(&body[..end])), "{end}");
        }
        assert_eq!(leading.digest(5001), None);
    }

    #[test]
    fn checkpoint_has_lookup_keys_only_up_to_its_known_bytes() {
        assert_eq!((0..).map_while(lead_bytes).take(3).collect::<Vec<_>>(), [512, 1024, 2048]);
        assert!((0..).map_while(lead_bytes).count() < 64);
        let body = vec![7; 3000];
        for (end, expected) in [(511, 0), (512, 1), (2047, 2), (2048, 3), (3000, 3)] {
            let checkpoint = checkpoint(&body, &[end]);
            assert_eq!(checkpoint.lead_digests.len(), expected, "{end}");
            assert!(
                checkpoint
                    .lead_digests
                    .iter()
                    .zip((0..).map_while(lead_bytes))
                    .all(|(key, end)| *key == xxh3_128(&body[..end]))
            );
        }
    }

    #[test]
    fn body_matches_a_checkpoint_up_to_its_first_difference() {
        let body: Vec<u8> = (0..3000u32).map(|n| (n % 241) as u8).collect();
        let checkpoint = checkpoint(&body, &[100, 900, 2500]);
        let deepest =
            |body: &[u8], checked| checkpoint.deepest_match(checked, &BodyPrefixHasher::new(body)).map(|(at, _)| at);
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
    fn message_boundaries_are_thinned_but_the_newest_stay() {
        let body = vec![1; 1000];
        let mut all = Vec::new();
        for end in 0..200 {
            push_boundary(&mut all, boundary(&body, end));
            assert!(all.len() <= MAX_BOUNDARIES && all.last().unwrap().body_bytes == end);
        }
        assert!(all.is_sorted_by_key(|known| known.body_bytes) && all[0].body_bytes == 0);
        let newest: Vec<usize> = all.iter().rev().take(8).map(|known| known.body_bytes).collect();
        assert_eq!(newest, (192..200).rev().collect::<Vec<_>>());
    }

    #[test]
    fn checkpoint_with_many_matching_keys_is_compared_once() {
        use crate::{ConversationCache, LookupTier};
        let body: Vec<u8> = (0..20_000u32).map(|n| (n % 241) as u8).collect();
        let conversations = ConversationCache::new(vocabulary::Bytes(1 << 20));
        conversations.insert("", Arc::new(checkpoint(&body, &[900, 19_000])), (Some(1), None));
        let forked: Vec<u8> = body[..9_000].iter().copied().chain([250; 11_000]).collect();
        let ends = |body: &[u8], known| -> Vec<usize> {
            conversations.candidates(0, body, known).iter().map(|candidate| candidate.end).collect()
        };
        assert_eq!(ends(&forked, None), [8192], "by the longest of five");
        let found = conversations.find(0, Some(1), &forked).unwrap();
        assert_eq!((found.tier, found.boundary), (LookupTier::Segment, 0));
        assert_eq!(ends(&forked, Some(found.id)), [0usize; 0], "it was found by its name");
        conversations.insert("", Arc::new(checkpoint(&forked, &[900, 2_500])), (None, None));
        assert_eq!(ends(&forked, None), [2048, 8192], "the newer one has the shorter beginnings");
        assert_eq!(conversations.find(0, None, &forked[..2_500]).unwrap().tier, LookupTier::Leading);
        assert!(conversations.find(0, None, &[9; 3_000]).is_none());
    }
}
