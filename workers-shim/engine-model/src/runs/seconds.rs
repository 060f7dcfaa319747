//! Virtual time as a real number, because rates divide it.

use std::cmp::Ordering;
use std::ops::{Add, AddAssign, Sub};

use vocabulary::Micros;

/// A point or a span of virtual time, in seconds. Ordered, so that it can sort events.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Seconds(pub f64);

impl Seconds {
    /// No time, or the start.
    pub const ZERO: Self = Self(0.0);
}

impl From<Micros> for Seconds {
    fn from(micros: Micros) -> Self {
        Self(micros.0 as f64 / 1e6)
    }
}

impl Eq for Seconds {}

impl PartialOrd for Seconds {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Seconds {
    fn cmp(&self, other: &Self) -> Ordering {
        self.0.total_cmp(&other.0)
    }
}

impl Add for Seconds {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Self(self.0 + other.0)
    }
}

impl AddAssign for Seconds {
    fn add_assign(&mut self, other: Self) {
        self.0 += other.0;
    }
}

impl Sub for Seconds {
    type Output = Self;
    fn sub(self, other: Self) -> Self {
        Self(self.0 - other.0)
    }
}
