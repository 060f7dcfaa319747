//! The network between nodes and clients: delay, loss, duplication, reordering, and links that are cut one way or both.

use std::collections::BTreeSet;
use std::time::Duration;

use crate::rng::Rng;

/// An end of a link: a node, or a client above [`CLIENTS`].
pub(crate) type Peer = u64;

pub(crate) const CLIENTS: Peer = 1_000;

/// What the network does to one message.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Fate {
    /// It arrives after these delays; more than one is a duplication.
    Arrives(Vec<Duration>),
    Lost,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Weather {
    /// Messages of 1,000 that are lost.
    pub(crate) loss: u64,
    /// Messages of 1,000 that arrive twice.
    pub(crate) duplication: u64,
    /// The shortest and the longest delay, in microseconds.
    pub(crate) delay: (u64, u64),
}

impl Weather {
    /// A datacenter on a good day.
    pub(crate) const FAIR: Weather = Weather { loss: 0, duplication: 1, delay: (150, 2_000) };
}

#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct Traffic {
    pub(crate) sent: u64,
    /// Of them lost, by chance or by a cut.
    pub(crate) lost: u64,
    pub(crate) doubled: u64,
}

#[derive(Debug)]
pub(crate) struct Fabric {
    rng: Rng,
    weather: Weather,
    cuts: BTreeSet<(Peer, Peer)>,
    traffic: Traffic,
}

impl Fabric {
    /// A network in fair weather.
    pub(crate) fn new(rng: Rng) -> Self {
        Self { rng, weather: Weather::FAIR, cuts: BTreeSet::new(), traffic: Traffic::default() }
    }

    /// What becomes of the next message.
    pub(crate) fn fate(&mut self, from: Peer, to: Peer) -> Fate {
        self.traffic.sent += 1;
        if !self.connects(from, to) || self.rng.chance(self.weather.loss) {
            self.traffic.lost += 1;
            return Fate::Lost;
        }
        let copies = if self.rng.chance(self.weather.duplication) { 2 } else { 1 };
        self.traffic.doubled += copies - 1;
        Fate::Arrives((0..copies).map(|_| self.delay()).collect())
    }

    fn delay(&mut self) -> Duration {
        let (low, high) = self.weather.delay;
        // Now and then one message is overtaken by many.
        let stretch = if self.rng.chance(5) { 20 } else { 1 };
        self.rng.micros(low, high) * stretch
    }

    /// Whether a message gets through from one to the other.
    pub(crate) fn connects(&self, from: Peer, to: Peer) -> bool {
        !self.cuts.contains(&(from, to))
    }

    pub(crate) fn cut(&mut self, from: Peer, to: Peer) {
        self.cuts.insert((from, to));
    }

    pub(crate) fn mend(&mut self, from: Peer, to: Peer) {
        self.cuts.remove(&(from, to));
    }

    /// Mends everything, and lets the sun shine.
    pub(crate) fn heal(&mut self) {
        self.cuts.clear();
        self.weather = Weather::FAIR;
    }

    pub(crate) fn set(&mut self, weather: Weather) {
        self.weather = weather;
    }

    pub(crate) fn traffic(&self) -> Traffic {
        self.traffic
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cut_is_one_way_and_healing_mends_it() {
        let mut fabric = Fabric::new(Rng::stream(1, "network"));
        fabric.cut(1, 2);
        assert_eq!(fabric.fate(1, 2), Fate::Lost);
        assert!(matches!(fabric.fate(2, 1), Fate::Arrives(_)));
        fabric.heal();
        assert!(matches!(fabric.fate(1, 2), Fate::Arrives(_)));
    }

    #[test]
    fn weather_loses_doubles_and_reorders() {
        let mut fabric = Fabric::new(Rng::stream(1, "network"));
        fabric.set(Weather { loss: 300, duplication: 200, delay: (100, 50_000) });
        let fates: Vec<Fate> = (0..1_000).map(|_| fabric.fate(1, 2)).collect();
        let lost = fates.iter().filter(|fate| **fate == Fate::Lost).count();
        let doubled = fates.iter().filter(|fate| matches!(fate, Fate::Arrives(copies) if copies.len() == 2)).count();
        assert!((200..400).contains(&lost) && (80..240).contains(&doubled), "{lost} {doubled}");
        let first = |fate: &Fate| match fate {
            Fate::Arrives(copies) => copies.first().copied(),
            Fate::Lost => None,
        };
        let delays: Vec<Duration> = fates.iter().filter_map(first).collect();
        assert!(delays.windows(2).any(|pair| pair[1] < pair[0]));
    }
}
