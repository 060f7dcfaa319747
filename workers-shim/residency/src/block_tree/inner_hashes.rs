//! Chain blocks inside engine blocks. If the engine and the chain have the same block size there are none, and this
//! takes no memory.

use vocabulary::BlockHash;

/// A table with a fixed number of hashes per block (that of the largest one), each row preceded by its own count.
#[derive(Default)]
pub(super) struct SubBlockHashes {
    stride: usize,
    hashes: Vec<BlockHash>,
}

impl SubBlockHashes {
    fn stride(&self) -> usize {
        if self.stride == 0 { 0 } else { self.stride + 1 }
    }

    pub(super) fn of(&self, at: u32) -> &[BlockHash] {
        let start = at as usize * self.stride();
        let Some(count) = self.hashes.get(start) else { return &[] };
        &self.hashes[start + 1..start + 1 + count.0 as usize]
    }

    pub(super) fn set(&mut self, at: u32, inner: &[BlockHash]) {
        if inner.len() > self.stride {
            self.widen(inner.len());
        }
        let (start, stride) = (at as usize * self.stride(), self.stride());
        if stride == 0 {
            return;
        }
        if self.hashes.len() < start + stride {
            self.hashes.resize(start + stride, BlockHash(0));
        }
        self.hashes[start] = BlockHash(inner.len() as u64);
        self.hashes[start + 1..start + 1 + inner.len()].copy_from_slice(inner);
    }

    /// Returns the number of hashes that the table has room for with `rows` rows, one of which has `inner` hashes.
    pub(super) fn room(&self, rows: usize, inner: usize) -> usize {
        match self.stride.max(inner) {
            0 => 0,
            stride => rows.saturating_mul(stride + 1),
        }
    }

    /// Applies new node indexes after compaction; `nowhere` marks freed nodes.
    pub(super) fn renumber(&mut self, numbers: &[u32], nowhere: u32) {
        let old = std::mem::replace(self, Self { stride: self.stride, hashes: Vec::new() });
        for (at, number) in (0..).zip(numbers).filter(|(_, number)| **number != nowhere) {
            self.set(*number, old.of(at));
        }
    }

    /// Widens all rows. Rare, because engines have one or two block sizes.
    fn widen(&mut self, most: usize) {
        let old = std::mem::take(self);
        self.stride = most;
        for at in 0..old.hashes.len().checked_div(old.stride()).unwrap_or(0) {
            self.set(at as u32, old.of(at as u32));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inner_hashes_of_several_sizes_stay_separate() {
        let mut inner = SubBlockHashes::default();
        let hashes: Vec<BlockHash> = (1..9).map(BlockHash).collect();
        inner.set(3, &[]);
        assert_eq!((inner.of(3), inner.hashes.len()), (&[][..], 0), "nothing costs nothing");
        inner.set(1, &hashes[..1]);
        inner.set(4, &hashes[1..2]);
        inner.set(2, &hashes[2..5]);
        let all = [0, 1, 2, 3, 4, 5].map(|at| inner.of(at));
        assert_eq!(all, [&[][..], &hashes[..1], &hashes[2..5], &[], &hashes[1..2], &[]]);
        inner.set(2, &hashes[..1]);
        assert_eq!(inner.of(2), &hashes[..1]);
    }
}
