//! Model of the network between nodes and clients: delay, loss, duplication, reordering, and links that are cut in one
//! or both directions.

use std::collections::BTreeSet;
use std::time::Duration;

use crate::rng::Rng;

/// End of a link: a node, or a client above [`FIRST_CLIENT`].
pub(crate) type EndpointNumber = u64;

pub(crate) const FIRST_CLIENT: EndpointNumber = 1_000;

/// What the network does to one message.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum MessageFate {
    /// The message arrives after these delays; more than one means duplication.
    Arrives(Vec<Duration>),
    Lost,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct NetworkConditions {
    /// Lost messages per 1,000.
    pub(crate) loss: u64,
    /// Duplicated messages per 1,000.
    pub(crate) duplication: u64,
    /// Minimum and maximum delay, in microseconds.
    pub(crate) delay: (u64, u64),
}

impl NetworkConditions {
    /// Conditions of a healthy data centre.
    pub(crate) const HEALTHY: NetworkConditions = NetworkConditions { loss: 0, duplication: 1, delay: (150, 2_000) };
}

#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct MessageCounts {
    pub(crate) sent: u64,
    /// Messages lost by chance or because of a cut link.
    pub(crate) lost: u64,
    pub(crate) duplicated: u64,
}

#[derive(Debug)]
pub(crate) struct NetworkModel {
    rng: Rng,
    weather: NetworkConditions,
    cuts: BTreeSet<(EndpointNumber, EndpointNumber)>,
    traffic: MessageCounts,
}

impl NetworkModel {
    /// Creates a healthy network.
    pub(crate) fn new(rng: Rng) -> Self {
        Self { rng, weather: NetworkConditions::HEALTHY, cuts: BTreeSet::new(), traffic: MessageCounts::default() }
    }

    /// Decides the fate of the next message.
    pub(crate) fn fate(&mut self, from: EndpointNumber, to: EndpointNumber) -> MessageFate {
        self.traffic.sent += 1;
        if !self.connects(from, to) || self.rng.chance(self.weather.loss) {
            self.traffic.lost += 1;
            return MessageFate::Lost;
        }
        let copies = if self.rng.chance(self.weather.duplication) { 2 } else { 1 };
        self.traffic.duplicated += copies - 1;
        MessageFate::Arrives((0..copies).map(|_| self.delay()).collect())
    }

    fn delay(&mut self) -> Duration {
        let (low, high) = self.weather.delay;
        // Sometimes one message is overtaken by many.
        let stretch = if self.rng.chance(5) { 20 } else { 1 };
        self.rng.micros(low, high) * stretch
    }

    /// Returns whether messages get through in this direction.
    pub(crate) fn connects(&self, from: EndpointNumber, to: EndpointNumber) -> bool {
        !self.cuts.contains(&(from, to))
    }

    pub(crate) fn cut(&mut self, from: EndpointNumber, to: EndpointNumber) {
        self.cuts.insert((from, to));
    }

    pub(crate) fn restore(&mut self, from: EndpointNumber, to: EndpointNumber) {
        self.cuts.remove(&(from, to));
    }

    /// Restores all links and healthy conditions.
    pub(crate) fn heal(&mut self) {
        self.cuts.clear();
        self.weather = NetworkConditions::HEALTHY;
    }

    pub(crate) fn set(&mut self, conditions: NetworkConditions) {
        self.weather = conditions;
    }

    pub(crate) fn traffic(&self) -> MessageCounts {
        self.traffic
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_network_cut_is_one_way_and_heals() {
        let mut fabric = NetworkModel::new(Rng::stream(1, "network"));
        fabric.cut(1, 2);
        assert_eq!(fabric.fate(1, 2), MessageFate::Lost);
        assert!(matches!(fabric.fate(2, 1), MessageFate::Arrives(_)));
        fabric.heal();
        assert!(matches!(fabric.fate(1, 2), MessageFate::Arrives(_)));
    }

    #[test]
    fn bad_network_conditions_lose_duplicate_and_reorder_messages() {
        let mut fabric = NetworkModel::new(Rng::stream(1, "network"));
        fabric.set(NetworkConditions { loss: 300, duplication: 200, delay: (100, 50_000) });
        let fates: Vec<MessageFate> = (0..1_000).map(|_| fabric.fate(1, 2)).collect();
        let lost = fates.iter().filter(|fate| **fate == MessageFate::Lost).count();
        let doubled =
            fates.iter().filter(|fate| matches!(fate, MessageFate::Arrives(copies) if copies.len() == 2)).count();
        assert!((200..400).contains(&lost) && (80..240).contains(&doubled), "{lost} {doubled}");
        let first = |fate: &MessageFate| match fate {
            MessageFate::Arrives(copies) => copies.first().copied(),
            MessageFate::Lost => None,
        };
        let delays: Vec<Duration> = fates.iter().filter_map(first).collect();
        assert!(delays.windows(2).any(|pair| pair[1] < pair[0]));
    }
}
