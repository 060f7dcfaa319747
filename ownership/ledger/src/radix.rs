//! Persistent map for tables of millions of entries: O(1) clone, compact, and without pointer chasing inside a leaf.
//!
//! A radix tree over 4-bit digits of the key. A leaf holds up to `MAX` adjacent entries in a sorted, exactly sized
//! array and covers one slot of its branch, or a power of two of them. Full leaves are split, small adjacent leaves are
//! joined. The contents never depend on the order of the writes; only the positions of the leaf bounds do.

use std::fmt;
use std::sync::Arc;

/// Slots per branch: one per value of a 4-bit digit.
const SLOTS: usize = 16;

/// Key with the digits by which it is found. The digits order keys like `Ord`.
pub(crate) trait RadixKey: Ord + Copy {
    /// Returns the 4-bit digit at `depth`, most significant first.
    fn digit(&self, depth: u32) -> usize;
}

impl RadixKey for u128 {
    fn digit(&self, depth: u32) -> usize {
        (self.unbounded_shr(124_u32.saturating_sub(4 * depth)) & 15) as usize
    }
}

/// Words, most significant first. Packs with three-word values where a `u128` would need padding.
impl<const N: usize> RadixKey for [u64; N] {
    fn digit(&self, depth: u32) -> usize {
        let word = self.get(depth as usize / 16).copied().unwrap_or(0);
        (word >> (60 - 4 * (depth % 16)) & 15) as usize
    }
}

#[derive(Clone)]
pub(crate) struct RadixMap<K, V, const MAX: usize> {
    root: RadixSlot<K, V>,
    len: usize,
}

/// What a slot of a branch points to.
#[derive(Clone)]
enum RadixSlot<K, V> {
    Leaf(RadixLeaf<K, V>),
    Branch(Arc<RadixBranch<K, V>>),
}

/// Adjacent entries in order, in one allocation with their count.
type RadixLeaf<K, V> = Arc<[(K, V)]>;

#[derive(Clone)]
struct RadixBranch<K, V> {
    /// Bit set of the slots in which a subtree starts. A subtree also covers the empty slots up to the next one.
    start_bits: u16,
    slots: [RadixSlot<K, V>; SLOTS],
}

impl<K: RadixKey, V: Clone, const MAX: usize> Default for RadixMap<K, V, MAX> {
    fn default() -> Self {
        Self { root: RadixSlot::Leaf(Arc::default()), len: 0 }
    }
}

impl<K: RadixKey, V: Clone, const MAX: usize> RadixMap<K, V, MAX> {
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn get(&self, key: &K) -> Option<&V> {
        let (leaf, place) = self.lower_bound(key);
        leaf.get(place).filter(|(found, _)| found == key).map(|(_, value)| value)
    }

    pub(crate) fn contains(&self, key: &K) -> bool {
        self.get(key).is_some()
    }

    /// Returns the leaf whose range contains a key, and the index of its first entry at or after the key.
    ///
    /// Keys are usually evenly distributed, so the digits below the branch predict the position within the leaf. A
    /// search from there touches one or two cache lines, where a binary search would touch four.
    fn lower_bound(&self, key: &K) -> (&[(K, V)], usize) {
        let (mut slot, mut depth, mut part) = (&self.root, 0, 0.5);
        loop {
            match slot {
                RadixSlot::Leaf(leaf) => return (leaf, lower_bound(leaf, key, part)),
                RadixSlot::Branch(branch) => {
                    let digit = key.digit(depth);
                    let place = branch.place(digit);
                    slot = &branch.slots[place];
                    if matches!(slot, RadixSlot::Leaf(_)) {
                        let below = key.digit(depth + 1) << 4 | key.digit(depth + 2);
                        part = (((digit - place) << 8 | below) as f32) / (branch.width(place) << 8) as f32;
                    }
                }
            }
            depth += 1;
        }
    }

    /// Inserts or replaces a value; returns the previous one.
    pub(crate) fn insert(&mut self, key: K, value: V) -> Option<V> {
        let old = self.root.insert::<MAX>(0, key, value);
        self.len += usize::from(old.is_none());
        old
    }

    /// Removes a value and returns it.
    pub(crate) fn remove(&mut self, key: &K) -> Option<V> {
        if !self.contains(key) {
            return None;
        }
        let old = self.root.remove::<MAX>(0, key);
        self.len -= usize::from(old.is_some());
        old
    }

    /// Iterates over all entries in key order.
    pub(crate) fn iter(&self) -> Iter<'_, K, V> {
        let mut iter = Iter { branches: Vec::new(), leaf: None };
        iter.descend(&self.root);
        iter
    }

    /// Iterates over all entries from `key` on, in order.
    pub(crate) fn iter_from(&self, key: &K) -> Iter<'_, K, V> {
        let mut iter = Iter { branches: Vec::new(), leaf: None };
        let (mut slot, mut depth) = (&self.root, 0);
        while let RadixSlot::Branch(branch) = slot {
            let place = branch.place(key.digit(depth));
            iter.branches.push((branch, place + 1));
            (slot, depth) = (&branch.slots[place], depth + 1);
        }
        if let RadixSlot::Leaf(leaf) = slot {
            iter.leaf = Some((leaf, lower_bound(leaf, key, 0.5)));
        }
        iter
    }

    /// Returns the first entry at or after `key`.
    pub(crate) fn at_or_after(&self, key: &K) -> Option<(&K, &V)> {
        let (leaf, place) = self.lower_bound(key);
        match leaf.get(place) {
            Some((found, value)) => Some((found, value)),
            None => self.iter_from(key).next(),
        }
    }

    pub(crate) fn first(&self) -> Option<(&K, &V)> {
        self.iter().next()
    }
}

impl<K: RadixKey, V: Clone> RadixSlot<K, V> {
    fn empty() -> Self {
        RadixSlot::Leaf(Arc::default())
    }

    fn insert<const MAX: usize>(&mut self, depth: u32, key: K, value: V) -> Option<V> {
        match self {
            RadixSlot::Leaf(leaf) => {
                let old = insert(leaf, key, value);
                if leaf.len() > MAX {
                    let full = std::mem::take(leaf);
                    *self = RadixBranch::from_full_leaf::<MAX>(full, depth);
                }
                old
            }
            RadixSlot::Branch(branch) => {
                let branch = Arc::make_mut(branch);
                let place = branch.place(key.digit(depth));
                if let RadixSlot::Leaf(leaf) = &mut branch.slots[place] {
                    let old = insert(leaf, key, value);
                    if leaf.len() > MAX {
                        let full = std::mem::take(leaf);
                        branch.split::<MAX>(place, depth, full);
                    }
                    return old;
                }
                branch.slots[place].insert::<MAX>(depth + 1, key, value)
            }
        }
    }

    fn remove<const MAX: usize>(&mut self, depth: u32, key: &K) -> Option<V> {
        match self {
            RadixSlot::Leaf(leaf) => remove(leaf, key),
            RadixSlot::Branch(branch) => {
                let inner = Arc::make_mut(branch);
                let place = inner.place(key.digit(depth));
                let old = inner.slots[place].remove::<MAX>(depth + 1, key);
                inner.join::<MAX>(place);
                if let (RadixSlot::Leaf(leaf), SLOTS) = (&inner.slots[0], inner.width(0)) {
                    *self = RadixSlot::Leaf(leaf.clone());
                }
                old
            }
        }
    }
}

impl<K: RadixKey, V: Clone> RadixBranch<K, V> {
    /// Returns the slot whose subtree covers a digit.
    fn place(&self, digit: usize) -> usize {
        let upto = self.start_bits & u16::MAX >> (SLOTS - 1 - digit);
        SLOTS - 1 - upto.leading_zeros() as usize
    }

    /// Returns how many slots the subtree at `place` covers.
    fn width(&self, place: usize) -> usize {
        let after = u32::from(self.start_bits) >> (place + 1);
        (after.trailing_zeros() as usize + 1).min(SLOTS - place)
    }

    fn from_full_leaf<const MAX: usize>(full: RadixLeaf<K, V>, depth: u32) -> RadixSlot<K, V> {
        let mut branch = RadixBranch { start_bits: 1, slots: std::array::from_fn(|_| RadixSlot::empty()) };
        branch.split::<MAX>(0, depth, full);
        RadixSlot::Branch(Arc::new(branch))
    }

    /// Replaces a full leaf by its halves, or by a branch if the leaf covers a single slot.
    fn split<const MAX: usize>(&mut self, place: usize, depth: u32, full: RadixLeaf<K, V>) {
        if full.len() <= MAX {
            self.slots[place] = RadixSlot::Leaf(full);
            return;
        }
        let width = self.width(place);
        if width == 1 {
            self.slots[place] = RadixBranch::from_full_leaf::<MAX>(full, depth + 1);
            return;
        }
        let half = place + width / 2;
        let (left, right) = full.split_at(full.partition_point(|(key, _)| key.digit(depth) < half));
        self.start_bits |= 1 << half;
        self.split::<MAX>(place, depth, left.into());
        self.split::<MAX>(half, depth, right.into());
    }

    /// Joins a small leaf with its neighbours.
    fn join<const MAX: usize>(&mut self, mut place: usize) {
        loop {
            let width = self.width(place);
            let other = place ^ width;
            if width == SLOTS || self.width(other) != width {
                return;
            }
            let (left, right) = (place.min(other), place.max(other));
            let (RadixSlot::Leaf(low), RadixSlot::Leaf(high)) = (&self.slots[left], &self.slots[right]) else { return };
            if low.len() + high.len() > MAX / 2 {
                return;
            }
            self.slots[left] = RadixSlot::Leaf(low.iter().chain(high.iter()).cloned().collect());
            self.slots[right] = RadixSlot::empty();
            self.start_bits &= !(1 << right);
            place = left;
        }
    }
}

/// Returns the index of the first entry at or after `key`: starts at the predicted position and widens the search.
fn lower_bound<K: RadixKey, V>(leaf: &[(K, V)], key: &K, part: f32) -> usize {
    let is_before = |place: usize| leaf[place].0 < *key;
    let (mut low, mut high, mut step) = (0, leaf.len(), 1);
    let guess = ((part * high as f32) as usize).min(high.saturating_sub(1));
    if low < high && is_before(guess) {
        low = guess + 1;
        while low + step < high && is_before(low + step) {
            (low, step) = (low + step + 1, step * 2);
        }
        high = high.min(low + step + 1);
    } else if low < high {
        high = guess;
        while high > step && !is_before(high - step - 1) {
            (high, step) = (high - step - 1, step * 2);
        }
        low = high.saturating_sub(step + 1);
    }
    low + leaf[low..high].partition_point(|(known, _)| known < key)
}

fn insert<K: RadixKey, V: Clone>(leaf: &mut RadixLeaf<K, V>, key: K, value: V) -> Option<V> {
    match leaf.binary_search_by_key(&key, |(key, _)| *key) {
        Ok(place) => Some(std::mem::replace(&mut Arc::make_mut(leaf)[place].1, value)),
        Err(place) => {
            let (before, after) = leaf.split_at(place);
            let new = std::iter::once((key, value));
            *leaf = before.iter().cloned().chain(new).chain(after.iter().cloned()).collect();
            None
        }
    }
}

fn remove<K: RadixKey, V: Clone>(leaf: &mut RadixLeaf<K, V>, key: &K) -> Option<V> {
    let place = leaf.binary_search_by_key(key, |(key, _)| *key).ok()?;
    let old = leaf[place].1.clone();
    *leaf = leaf[..place].iter().chain(&leaf[place + 1..]).cloned().collect();
    Some(old)
}

/// Iterator over entries in order.
pub(crate) struct Iter<'a, K, V> {
    branches: Vec<(&'a RadixBranch<K, V>, usize)>,
    leaf: Option<(&'a [(K, V)], usize)>,
}

impl<'a, K, V> Iter<'a, K, V> {
    fn descend(&mut self, mut slot: &'a RadixSlot<K, V>) {
        while let RadixSlot::Branch(branch) = slot {
            self.branches.push((branch, 1));
            slot = &branch.slots[0];
        }
        if let RadixSlot::Leaf(leaf) = slot {
            self.leaf = Some((leaf, 0));
        }
    }
}

impl<'a, K, V> Iterator for Iter<'a, K, V> {
    type Item = (&'a K, &'a V);

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            if let Some((leaf, place)) = &mut self.leaf
                && let Some((key, value)) = leaf.get(*place)
            {
                *place += 1;
                return Some((key, value));
            }
            let (branch, next) = self.branches.last_mut()?;
            let branch: &'a RadixBranch<K, V> = branch;
            match branch.slots.get(*next) {
                None => drop(self.branches.pop()),
                Some(slot) => {
                    *next += 1;
                    self.leaf = None;
                    self.descend(slot);
                }
            }
        }
    }
}

impl<K: RadixKey, V: Clone + PartialEq, const MAX: usize> PartialEq for RadixMap<K, V, MAX> {
    fn eq(&self, other: &Self) -> bool {
        self.len == other.len && self.iter().eq(other.iter())
    }
}

impl<K: RadixKey, V: Clone + Eq, const MAX: usize> Eq for RadixMap<K, V, MAX> {}

impl<K: RadixKey + fmt::Debug, V: Clone + fmt::Debug, const MAX: usize> fmt::Debug for RadixMap<K, V, MAX> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.iter()).finish()
    }
}

impl<K: RadixKey, V: Clone, const MAX: usize> FromIterator<(K, V)> for RadixMap<K, V, MAX> {
    fn from_iter<I: IntoIterator<Item = (K, V)>>(entries: I) -> Self {
        let mut radix = Self::default();
        for (key, value) in entries {
            radix.insert(key, value);
        }
        radix
    }
}

#[cfg(test)]
mod tests;
