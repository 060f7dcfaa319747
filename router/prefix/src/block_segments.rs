//! The names of a conversation's blocks, in pieces that its steps share.

use std::sync::Arc;

use vocabulary::PrefixId;

/// Block names, each piece at least twice as long as the one after it when it was added.
#[derive(Clone, Debug, Default)]
pub(crate) struct BlockSegments {
    segments: Vec<Arc<[PrefixId]>>,
    len: usize,
}

impl BlockSegments {
    /// The first `len` of these, and then `more`.
    pub(crate) fn extended(&self, len: usize, more: &[PrefixId]) -> Self {
        let mut extended = Self::default();
        for piece in &self.segments {
            let wanted = len.min(self.len) - extended.len;
            match piece.len() <= wanted {
                true => extended.segments.push(piece.clone()),
                false => {
                    extended.push(piece[..wanted].into());
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

    /// The first `len` of them, with room for `more` behind.
    pub(crate) fn first(&self, len: usize, more: usize) -> Vec<PrefixId> {
        let mut all = Vec::with_capacity(len + more);
        for piece in &self.segments {
            all.extend_from_slice(&piece[..piece.len().min(len - all.len())]);
        }
        all
    }

    /// Memory that they take, shared or not.
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
        let mut pieces = BlockSegments::default();
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
        let long = BlockSegments::default().extended(0, &ids(0..1000));
        let next = long.extended(1000, &ids(1000..1050));
        assert!(Arc::ptr_eq(&long.segments[0], &next.segments[0]));
        assert_eq!(next.first(1050, 0), ids(0..1050));
        assert_eq!(long.extended(5000, &ids(1000..1050)).first(1050, 0), ids(0..1050), "no more than there are");
    }
}
