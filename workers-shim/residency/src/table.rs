//! A hash table of small entries that know their own hash: one piece of memory, sorted by hash, with gaps.
//!
//! An entry lies where its hash says, or as many places later as the entries before it need. So a search reads neighbours
//! only and ends at the first larger hash, and growing is one pass in order, in small steps. Not for keys that clients
//! choose.

/// What lies in a table.
pub(crate) trait Entry: Copy {
    /// A place without an entry.
    const FREE: Self;

    /// Whether it is one.
    fn is_free(&self) -> bool;

    /// Spread evenly over all numbers. Need not be one entry's alone.
    fn hash(&self) -> u64;
}

/// Spreads what is a hash already, or a counter, over the high bits. No two numbers become one.
pub(crate) fn spread(hash: u64) -> u64 {
    hash.wrapping_mul(0x9E37_79B9_7F4A_7C15)
}

/// Entries by their hash.
pub(crate) struct Table<E> {
    /// The homes, and after them room for what the last ones push on.
    places: Vec<E>,
    homes: usize,
    len: usize,
}

impl<E> Default for Table<E> {
    fn default() -> Self {
        Self { places: Vec::new(), homes: 0, len: 0 }
    }
}

const FEWEST: usize = 8;
/// Room after the last home.
const TAIL: usize = 8;

impl<E: Entry> Table<E> {
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    fn home(&self, hash: u64) -> usize {
        ((u128::from(hash) * self.homes as u128) >> 64) as usize
    }

    /// What lies where a search for `hash` begins. Reading many of these first lets the processor fetch them all at once.
    pub(crate) fn glance(&self, hash: u64) -> E {
        self.places.get(self.home(hash)).copied().unwrap_or(E::FREE)
    }

    /// The first place with this hash or a larger one, or none; there it is, or belongs.
    fn seek(&self, hash: u64) -> usize {
        let home = self.home(hash);
        let before = |entry: &&E| !entry.is_free() && entry.hash() < hash;
        home + self.places[home..].iter().take_while(before).count()
    }

    /// The place of the entry with this hash that is the one.
    pub(crate) fn find(&self, hash: u64, is_it: impl Fn(&E) -> bool) -> Option<usize> {
        let mut at = self.seek(hash);
        while let Some(entry) = self.places.get(at).filter(|entry| !entry.is_free() && entry.hash() == hash) {
            if is_it(entry) {
                return Some(at);
            }
            at += 1;
        }
        None
    }

    /// What lies at a place that was found.
    pub(crate) fn at(&self, place: usize) -> E {
        self.places[place]
    }

    /// The same, to change all but its hash.
    pub(crate) fn at_mut(&mut self, place: usize) -> &mut E {
        &mut self.places[place]
    }

    /// Adds an entry that is not there yet.
    pub(crate) fn insert(&mut self, entry: E) {
        if self.len >= self.homes - self.homes / 5 {
            self.grow();
        }
        let at = self.seek(entry.hash());
        let after = self.places[at..].iter().position(E::is_free);
        let free = after.map_or(self.places.len(), |after| at + after);
        if free == self.places.len() {
            self.places.reserve_exact(TAIL);
            self.places.resize(free + TAIL, E::FREE);
        }
        self.places.copy_within(at..free, at + 1);
        self.places[at] = entry;
        self.len += 1;
    }

    /// Takes the entry at a place that was found.
    pub(crate) fn remove(&mut self, place: usize) {
        let pushed_on =
            |at: &usize| self.places.get(*at).is_some_and(|entry| !entry.is_free() && self.home(entry.hash()) < *at);
        let end = (place + 1..).take_while(pushed_on).last().unwrap_or(place);
        self.places.copy_within(place + 1..end + 1, place);
        self.places[end] = E::FREE;
        self.len -= 1;
    }

    fn grow(&mut self) {
        let homes = (self.homes + self.homes / 4).max(FEWEST);
        let old = std::mem::replace(&mut self.places, vec![E::FREE; homes + TAIL]);
        self.homes = homes;
        let mut next = 0;
        for entry in old.into_iter().filter(|entry| !entry.is_free()) {
            let at = self.home(entry.hash()).max(next);
            if at >= self.places.len() {
                self.places.resize(at + TAIL, E::FREE);
            }
            self.places[at] = entry;
            next = at + 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    /// A hash in the upper half, and what tells entries of one hash apart.
    #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
    struct Pair(u64);

    impl Pair {
        fn of(hash: u64, which: u64) -> Self {
            Self(hash << 32 | which)
        }
    }

    impl Entry for Pair {
        const FREE: Self = Self(u64::MAX);

        fn is_free(&self) -> bool {
            *self == Self::FREE
        }

        fn hash(&self) -> u64 {
            self.0 >> 32 << 32
        }
    }

    fn find(table: &Table<Pair>, pair: Pair) -> Option<usize> {
        table.find(pair.hash(), |found| *found == pair)
    }

    proptest! {
        #[test]
        fn a_table_agrees_with_a_set(
            // Few hashes, crowded at both ends, so that entries push each other on, also past the last home.
            steps in proptest::collection::vec((0u64..12, 0u64..8, any::<bool>()), 1..400),
        ) {
            let (mut table, mut set) = (Table::default(), BTreeSet::new());
            for (hash, which, add) in steps {
                let hash = if hash < 6 { hash } else { u64::from(u32::MAX) - (hash - 6) };
                let pair = Pair::of(hash, which);
                match (add, find(&table, pair)) {
                    (true, None) => {
                        table.insert(pair);
                        set.insert(pair);
                    }
                    (false, Some(at)) => {
                        table.remove(at);
                        set.remove(&pair);
                    }
                    (_, found) => prop_assert_eq!(found.is_some(), set.contains(&pair)),
                }
                prop_assert_eq!(table.len(), set.len());
                for pair in &set {
                    prop_assert_eq!(find(&table, *pair).map(|at| table.at(at)), Some(*pair));
                }
            }
        }
    }

    #[test]
    fn many_entries_are_found_again_and_cost_few_places() {
        let mut table = Table::default();
        let pairs: Vec<Pair> = (0..100_000).map(|n| Pair::of(spread(n) >> 32, n)).collect();
        pairs.iter().for_each(|pair| table.insert(*pair));
        assert!(pairs.iter().all(|pair| find(&table, *pair).is_some()));
        assert!(table.places.capacity() < 160_000, "{}", table.places.capacity());
        for pair in &pairs[..50_000] {
            let at = find(&table, *pair).unwrap();
            table.remove(at);
        }
        assert!(pairs[..50_000].iter().all(|pair| find(&table, *pair).is_none()));
        assert!(pairs[50_000..].iter().all(|pair| find(&table, *pair).is_some()));
    }
}
