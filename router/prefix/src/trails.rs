//! All conversations' trails, within a bound, of which each tenant has a share.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use strum::{AsRefStr, IntoStaticStr, VariantArray};
use vocabulary::Bytes;

use crate::fair_lru::FairLru;
use crate::trail::{Leading, Trail, lead};

/// The trails of all conversations of a router. Only they make a step cheap; nothing depends on them being there.
#[derive(Debug)]
pub struct Trails {
    shelf: Mutex<Shelf>,
    bound: usize,
}

/// By what a conversation was recognised.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, AsRefStr, IntoStaticStr, VariantArray)]
#[strum(serialize_all = "snake_case")]
pub enum Rung {
    /// The client's name for it, up to where it ended.
    Session,
    /// How its body begins, up to where it ended.
    Leading,
    /// Either, up to one of its earlier messages: it was shortened, forked or changed.
    Segment,
    /// The beginning of its rendered prompt, by a checkpoint.
    Checkpoint,
    /// Not at all: everything was computed.
    Cold,
}

/// A trail that a body goes along.
pub(crate) struct Found<'a> {
    pub(crate) trail: Arc<Trail>,
    /// What it is kept under.
    pub(crate) id: u64,
    /// The last of its places up to which the body is the same.
    pub(crate) known: usize,
    pub(crate) leading: Leading<'a>,
    pub(crate) rung: Rung,
}

#[derive(Debug)]
struct Shelf {
    /// By tenants.
    trails: FairLru<Arc<str>, u64, Slot>,
    /// By session and by leading digests, both mixed with the scope.
    by_key: HashMap<u128, u64>,
    next: u64,
}

#[derive(Debug)]
struct Slot {
    trail: Arc<Trail>,
    session: Option<u128>,
}

impl Shelf {
    fn use_of(&mut self, key: u128) -> Option<(u64, Arc<Trail>)> {
        let id = *self.by_key.get(&key)?;
        Some((id, self.trails.get_mut(&id)?.trail.clone()))
    }

    fn holds(&self, found: &Found<'_>) -> bool {
        self.trails.peek(&found.id).is_some_and(|slot| Arc::ptr_eq(&slot.trail, &found.trail))
    }

    fn remove(&mut self, id: u64) {
        if let Some(slot) = self.trails.remove(&id) {
            self.forget(id, &slot);
        }
    }

    /// Nothing leads to what was under this id any more.
    fn forget(&mut self, id: u64, slot: &Slot) {
        for key in keys(&slot.trail, slot.session) {
            if self.by_key.get(&key) == Some(&id) {
                self.by_key.remove(&key);
            }
        }
    }

    fn insert(&mut self, tenant: &str, (trail, bytes): (Arc<Trail>, usize), session: Option<u128>) {
        self.next += 1;
        let id = self.next;
        self.by_key.extend(keys(&trail, session).map(|key| (key, id)));
        for (id, slot) in self.trails.put(tenant.into(), id, (Slot { trail, session }, bytes)) {
            self.forget(id, &slot);
        }
    }

    /// Puts a trail in the place of one whose keys it is all found by; false for any other.
    fn replace(&mut self, id: u64, (trail, bytes): (&Arc<Trail>, usize), session: Option<u128>) -> bool {
        let has_keys = |Slot { trail: old, session: named }: &Slot| {
            (*named, old.scope) == (session, trail.scope) && trail.leads.starts_with(&old.leads)
        };
        let may_be_replaced = self.trails.peek(&id).is_some_and(has_keys);
        if !may_be_replaced || !self.trails.replace(&id, (Slot { trail: trail.clone(), session }, bytes)) {
            return false;
        }
        // Also those that it had: another conversation that begins alike may be found by them since.
        self.by_key.extend(keys(trail, session).map(|key| (key, id)));
        true
    }
}

fn keys(trail: &Trail, session: Option<u128>) -> impl Iterator<Item = u128> {
    session.into_iter().chain(trail.leads.iter().copied()).map(|key| key ^ trail.scope)
}

impl Trails {
    /// At most so much memory.
    pub fn new(bound: Bytes) -> Self {
        let bound = usize::try_from(bound.0).unwrap_or(usize::MAX);
        let shelf = Shelf { trails: FairLru::new(bound), by_key: HashMap::new(), next: 0 };
        Self { shelf: Mutex::new(shelf), bound }
    }

    /// Whether anything may be kept at all.
    pub fn has_room(&self) -> bool {
        self.bound > 0
    }

    fn shelf(&self) -> MutexGuard<'_, Shelf> {
        // A step that broke leaves a trail that is whole or none.
        self.shelf.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Memory that they take.
    pub fn bytes(&self) -> Bytes {
        Bytes(self.shelf().trails.bytes() as u64)
    }

    /// Conversations that are known.
    pub fn len(&self) -> usize {
        self.shelf().trails.len()
    }

    /// Whether none is known.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Forgets all of them.
    pub fn clear(&self) {
        let mut shelf = self.shelf();
        shelf.trails.clear();
        shelf.by_key.clear();
    }

    /// The trail that `body` goes along furthest, as far as is seen in one pass over it.
    pub(crate) fn find<'a>(&self, scope: u128, session: Option<u128>, body: &'a [u8]) -> Option<Found<'a>> {
        let named = session.and_then(|session| self.along(session ^ scope, (0, &Leading::new(body)), scope));
        match named {
            Some(found) if found.rung == Rung::Leading => Some(Found { rung: Rung::Session, ..found }),
            named => self.by_leading((scope, body), named),
        }
    }

    /// The trail that `body` goes along furthest by how it begins, or the one found by its name.
    fn by_leading<'a>(&self, (scope, body): (u128, &'a [u8]), named: Option<Found<'a>>) -> Option<Found<'a>> {
        let mut best = named;
        let known = best.as_ref().map(|found| found.id);
        for Candidate { key, end, leading, .. } in self.candidates(scope, body, known).into_iter().rev() {
            let found = self.along(key, (end, &leading), scope);
            let is_end = found.as_ref().is_some_and(|found| found.rung == Rung::Leading);
            best = found.into_iter().chain(best).max_by_key(Found::depth);
            if is_end {
                break;
            }
        }
        best
    }

    /// The trails under the beginnings of `body`, but for one that is `known`: each once, so that the body is compared
    /// with none of them again and again, and by the longest beginning; the longest last.
    pub(crate) fn candidates<'a>(&self, scope: u128, body: &'a [u8], known: Option<u64>) -> Vec<Candidate<'a>> {
        let mut leading = Leading::new(body);
        let mut candidates: Vec<Candidate<'a>> = Vec::new();
        for end in (0..).map_while(lead) {
            let Some(key) = leading.digest(end).map(|digest| digest ^ scope) else { break };
            let Some(id) = self.shelf().by_key.get(&key).copied() else { break };
            if known != Some(id) {
                candidates.retain(|earlier| earlier.id != id);
                candidates.push(Candidate { key, id, end, leading: leading.clone() });
            }
        }
        candidates
    }

    fn along<'a>(&self, key: u128, (checked, leading): (usize, &Leading<'a>), scope: u128) -> Option<Found<'a>> {
        let (id, trail) = self.shelf().use_of(key).filter(|(_, trail)| trail.scope == scope)?;
        let (known, leading) = trail.deepest(checked, leading)?;
        let rung = if known + 1 == trail.known.len() { Rung::Leading } else { Rung::Segment };
        Some(Found { trail, id, known, leading, rung })
    }

    pub(crate) fn remove(&self, found: &Found<'_>) {
        self.shelf().remove(found.id);
    }

    /// Keeps a trail of a tenant, in place of the one that it goes on from.
    pub(crate) fn put(&self, tenant: &str, trail: Arc<Trail>, (session, replaced): (Option<u128>, Option<&Found<'_>>)) {
        let bytes = trail.bytes();
        let mut shelf = self.shelf();
        // Unless another step of the conversation was quicker.
        let replaced = replaced.filter(|found| shelf.holds(found));
        if let Some(old) = replaced.map(|found| found.id) {
            if shelf.trails.bytes() + bytes <= self.bound && shelf.replace(old, (&trail, bytes), session) {
                return;
            }
            shelf.remove(old);
        }
        shelf.insert(tenant, (trail, bytes), session);
    }
}

/// A trail that a body may go along.
pub(crate) struct Candidate<'a> {
    /// Of the beginning that they share, and where that ends.
    key: u128,
    pub(crate) end: usize,
    id: u64,
    leading: Leading<'a>,
}

impl Found<'_> {
    fn depth(&self) -> usize {
        self.trail.known[self.known].body
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trail::tests::trail;

    const BODY: [u8; 4000] = [7; 4000];

    fn check(trails: &Trails, expected: &[&Arc<Trail>]) {
        let shelf = trails.shelf();
        let mut kept: Vec<_> = shelf.trails.iter().map(|(_, slot)| slot.trail.clone()).collect();
        kept.sort_by_key(|trail| trail.known.last().unwrap().body);
        assert!(
            kept.len() == expected.len() && kept.iter().zip(expected).all(|(kept, trail)| Arc::ptr_eq(kept, trail))
        );
        assert_eq!(shelf.trails.bytes(), kept.iter().map(|trail| trail.bytes()).sum::<usize>());
        assert!(shelf.by_key.values().all(|id| shelf.trails.contains(id)));
    }

    #[test]
    fn a_trail_takes_the_place_of_the_one_that_it_goes_on_from_and_is_found_by_more() {
        let trails = Trails::new(Bytes(1 << 20));
        let [first, second] = [&[600][..], &[600, 3000]].map(|ends| Arc::new(trail(&BODY, ends)));
        trails.put("", first.clone(), (Some(1), None));
        check(&trails, &[&first]);
        let found = trails.find(0, Some(1), &BODY).unwrap();
        trails.put("", second.clone(), (Some(1), Some(&found)));
        check(&trails, &[&second]);
        assert_eq!(trails.shelf().by_key.len(), 1 + second.leads.len());
        let unnamed = trails.find(0, None, &BODY).unwrap();
        assert!(Arc::ptr_eq(&unnamed.trail, &second) && unnamed.rung == Rung::Leading);
        trails.remove(&unnamed);
        check(&trails, &[]);
        assert!(trails.shelf().by_key.is_empty());
    }

    #[test]
    fn of_two_steps_of_one_conversation_the_slower_takes_nobodys_place() {
        let trails = Trails::new(Bytes(1 << 20));
        let [first, quick, slow] = [&[600][..], &[600, 900], &[600, 3000]].map(|ends| Arc::new(trail(&BODY, ends)));
        trails.put("", first, (Some(1), None));
        let [one, other] = [0, 0].map(|_| trails.find(0, Some(1), &BODY).unwrap());
        trails.put("", quick.clone(), (Some(1), Some(&one)));
        trails.put("", slow.clone(), (Some(1), Some(&other)));
        check(&trails, &[&quick, &slow]);
        assert!(Arc::ptr_eq(&trails.find(0, Some(1), &BODY).unwrap().trail, &slow));
    }

    #[test]
    fn a_trail_whose_keys_are_others_is_kept_anew() {
        let trails = Trails::new(Bytes(1 << 20));
        let [first, second] = [&[600][..], &[600, 3000]].map(|ends| Arc::new(trail(&BODY, ends)));
        trails.put("", first, (None, None));
        let found = trails.find(0, None, &BODY).unwrap();
        trails.put("", second.clone(), (Some(1), Some(&found)));
        check(&trails, &[&second]);
        assert!(trails.find(0, Some(1), &BODY).is_some());
        let bound = trails.bytes();
        let full = Trails::new(bound);
        full.put("", second, (Some(1), None));
        let found = full.find(0, Some(1), &BODY).unwrap();
        let longer = Arc::new(trail(&BODY, &[600, 3000, 3999]));
        full.put("", longer, (Some(1), Some(&found)));
        check(&full, &[]);
    }
}
