//! Buffers of request bodies, used again: each 4 KiB of fresh memory costs a page fault, and the page faults of a long
//! body take more CPU than its two copies.

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use parking_lot::Mutex;

/// Sizes in bytes of the buffers that are kept. The allocator itself uses shorter memory again.
const KEPT_SIZES: std::ops::RangeInclusive<usize> = 32 << 10..=8 << 20;
/// Bytes of all free buffers together.
const MAX_FREE_BYTES: usize = 32 << 20;

/// The free buffers.
#[derive(Debug, Default)]
pub(crate) struct BodyBuffers(Mutex<FreeBuffers>);

#[derive(Debug, Default)]
struct FreeBuffers {
    by_size: BTreeMap<usize, Vec<Vec<u8>>>,
    bytes: usize,
}

impl BodyBuffers {
    /// Returns an empty buffer with room for `length` bytes, and for at most an eighth more.
    pub(crate) fn buffer(self: &Arc<Self>, length: usize) -> BodyBuffer {
        let size = buffer_size(length);
        let free = if KEPT_SIZES.contains(&size) { self.0.lock().take(size) } else { None };
        BodyBuffer { bytes: free.unwrap_or_else(|| Vec::with_capacity(size)), buffers: self.clone() }
    }
}

impl FreeBuffers {
    fn take(&mut self, size: usize) -> Option<Vec<u8>> {
        let buffer = self.by_size.get_mut(&size)?.pop()?;
        self.bytes -= size;
        Some(buffer)
    }

    fn keep(&mut self, mut buffer: Vec<u8>) {
        let size = buffer.capacity();
        if KEPT_SIZES.contains(&size) && self.bytes + size <= MAX_FREE_BYTES {
            buffer.clear();
            self.bytes += size;
            self.by_size.entry(size).or_default().push(buffer);
        }
    }
}

/// Returns the size of a buffer for `length` bytes: one of eight between two powers of two.
fn buffer_size(length: usize) -> usize {
    match length < *KEPT_SIZES.start() {
        true => length,
        false => length.next_multiple_of(length.next_power_of_two() / 16),
    }
}

/// A buffer that is free again when it is dropped, or the last clone of the bytes made of it.
#[derive(Debug)]
pub(crate) struct BodyBuffer {
    bytes: Vec<u8>,
    buffers: Arc<BodyBuffers>,
}

impl BodyBuffer {
    /// Returns whether it is empty.
    pub(crate) fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Returns the number of bytes in it.
    pub(crate) fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Appends `data`; changes to a larger buffer where it does not fit.
    pub(crate) fn extend(&mut self, data: &[u8]) {
        let needed = self.bytes.len() + data.len();
        if needed > self.bytes.capacity() {
            self.copy_to(needed.max(2 * self.bytes.capacity()));
        }
        self.bytes.extend_from_slice(data);
    }

    /// Returns the contents. Room of more than an eighth is not kept with them.
    pub(crate) fn into_bytes(mut self) -> Bytes {
        if buffer_size(self.bytes.len()) < self.bytes.capacity() {
            self.copy_to(self.bytes.len());
        }
        match KEPT_SIZES.contains(&self.bytes.capacity()) {
            true => Bytes::from_owner(self),
            false => std::mem::take(&mut self.bytes).into(),
        }
    }

    fn copy_to(&mut self, length: usize) {
        let mut other = self.buffers.buffer(length);
        other.bytes.extend_from_slice(&self.bytes);
        *self = other;
    }
}

impl AsRef<[u8]> for BodyBuffer {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for BodyBuffer {
    fn drop(&mut self) {
        if KEPT_SIZES.contains(&self.bytes.capacity()) {
            self.buffers.0.lock().keep(std::mem::take(&mut self.bytes));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn free_bytes(buffers: &BodyBuffers) -> usize {
        buffers.0.lock().bytes
    }

    #[test]
    fn a_buffer_is_used_again_after_the_last_clone_of_its_bytes() {
        let buffers = Arc::new(BodyBuffers::default());
        let mut buffer = buffers.buffer(100_000);
        buffer.extend(&[7; 100_000]);
        let whole = buffer.into_bytes();
        let (at, part) = (whole.as_ptr(), whole.slice(5..9));
        drop(whole);
        assert_eq!((free_bytes(&buffers), &part[..]), (0, &[7; 4][..]));
        drop(part);
        assert_eq!(free_bytes(&buffers), buffer_size(100_000));
        let again = buffers.buffer(99_000);
        assert_eq!((again.as_ref().as_ptr(), again.len(), free_bytes(&buffers)), (at, 0, 0), "without what was in it");
    }

    #[test]
    fn contents_are_kept_whatever_pieces_they_come_in_and_have_little_room() {
        for length in [0, 1, 5_000, 32 << 10, 33_000, 200_001, 1 << 20, 9 << 20] {
            let all: Vec<u8> = (0..length).map(|n| (n % 251) as u8).collect();
            for (expected, piece) in [(length, 8_192), (0, 8_192), (0, 70_001), (10 * length, 400_000)] {
                let buffers = Arc::new(BodyBuffers::default());
                let mut buffer = buffers.buffer(expected);
                all.chunks(piece).for_each(|piece| buffer.extend(piece));
                assert_eq!(buffer.len(), length);
                assert_eq!(buffer.is_empty(), length == 0);
                assert!(buffer.into_bytes() == all, "{length} bytes, {expected} expected, pieces of {piece}");
            }
            assert!((length..=length + length / 8).contains(&buffer_size(length)), "{length}");
        }
    }

    #[test]
    fn free_buffers_are_bounded_in_size_and_in_all() {
        let buffers = Arc::new(BodyBuffers::default());
        drop([buffers.buffer(10), buffers.buffer(9 << 20)]);
        assert_eq!(free_bytes(&buffers), 0, "too short and too long to be kept");
        let many: Vec<_> = (0..100).map(|_| buffers.buffer(1 << 20)).collect();
        drop(many);
        assert_eq!(free_bytes(&buffers), MAX_FREE_BYTES);
    }
}
