//! Block hashes of a conversation, in segments that its checkpoints share.

use std::sync::Arc;

use vocabulary::PrefixId;

/// List of block hashes in shared segments. When a segment is added, each segment is at least twice as long as the
/// next.
#[derive(Clone, Debug, Default)]
pub(crate) struct SharedBlockHashes {
    segments: Vec<Arc<[PrefixId]>>,
    len: usize,
}

impl SharedBlockHashes {
    /// Returns the first `len` block hashes followed by `more`.
    pub(crate) fn extended(&self, len: usize, more: &[PrefixId]) -> Self {
        let mut extended = Self::default();
        for piece in &self.segments {
            let missing = len.min(self.len) - extended.len;
            match piece.len() <= missing {
                true => extended.segments.push(piece.clone()),
                false => {
                    extended.push(piece[..missing].into());
                    break;
                }
            }
            extended.len += piece.len();
        }
        extended.push(more.into());
        extended
    }

    fn push(&mut self, mut piece: Arc<[PrefixId]>) {
        self.len += piece.len();
        while let Some(last) = self.segments.pop_if(|last| last.len() < 2 * piece.len()) {
            piece = last.iter().chain(&*piece).copied().collect();
        }
        if !piece.is_empty() {
            self.segments.push(piece);
        }
    }

    /// Returns the first `len` block hashes, with capacity for `more` after them.
    pub(crate) fn first(&self, len: usize, more: usize) -> Vec<PrefixId> {
        let mut all = Vec::with_capacity(len + more);
        for piece in &self.segments {
            all.extend_from_slice(&piece[..piece.len().min(len - all.len())]);
        }
        all
    }

    /// Memory of all segments in bytes, including those shared with other lists.
    pub(crate) fn memory_bytes(&self) -> usize {
        self.len * size_of::<PrefixId>() + self.segments.len() * 32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(range: std::ops::Range<u128>) -> Vec<PrefixId> {
        range.map(PrefixId).collect()
    }

    #[test]
    fn block_segments_equal_one_flat_list() {
        let mut pieces = SharedBlockHashes::default();
        let mut list = Vec::new();
        for step in 0..300u128 {
            let cut = if step % 7 == 0 { list.len() * 2 / 3 } else { list.len() };
            let more = ids(1000 * step..1000 * step + step % 60);
            pieces = pieces.extended(cut, &more);
            list.truncate(cut);
            list.extend(more);
            assert_eq!(pieces.first(list.len(), 0), list);
            assert_eq!(pieces.first(list.len() / 2, 9), list[..list.len() / 2]);
            assert!(pieces.segments.len() < 16 && pieces.memory_bytes() < 16 * list.len() + 1024);
        }
    }

    #[test]
    fn successive_prompts_share_segments() {
        let long = SharedBlockHashes::default().extended(0, &ids(0..1000));
        let next = long.extended(1000, &ids(1000..1050));
        assert!(Arc::ptr_eq(&long.segments[0], &next.segments[0]));
        assert_eq!(next.first(1050, 0), ids(0..1050));
        assert_eq!(long.extended(5000, &ids(1000..1050)).first(1050, 0), ids(0..1050), "no more than there are");
    }
}
