//! Amounts with the unit in the type. Arithmetic saturates, so a wrong estimate never wraps or panics.

use serde::{Deserialize, Serialize};

macro_rules! unit {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, Debug, Default)]
        #[derive(derive_more::Display)]
        #[serde(transparent)]
        pub struct $name(pub u64);

        impl $name {
            /// Zero.
            pub const ZERO: Self = Self(0);
        }

        impl std::ops::Add for $name {
            type Output = Self;
            fn add(self, other: Self) -> Self {
                Self(self.0.saturating_add(other.0))
            }
        }

        impl std::ops::AddAssign for $name {
            fn add_assign(&mut self, other: Self) {
                *self = *self + other;
            }
        }

        impl std::ops::Sub for $name {
            type Output = Self;
            fn sub(self, other: Self) -> Self {
                Self(self.0.saturating_sub(other.0))
            }
        }

        impl std::ops::SubAssign for $name {
            fn sub_assign(&mut self, other: Self) {
                *self = *self - other;
            }
        }

        impl std::ops::Mul<u64> for $name {
            type Output = Self;
            fn mul(self, times: u64) -> Self {
                Self(self.0.saturating_mul(times))
            }
        }

        impl std::iter::Sum for $name {
            fn sum<I: Iterator<Item = Self>>(parts: I) -> Self {
                parts.fold(Self::ZERO, |all, part| all + part)
            }
        }
    };
}

unit! {
    /// Number of tokens of a prompt or an answer.
    Tokens
}
unit! {
    /// Number of blocks of a chain. These are the model's chain blocks, not an engine's blocks.
    Blocks
}
unit! {
    /// Number of bytes of KV state or of text.
    Bytes
}
unit! {
    /// Duration in microseconds.
    Micros
}
unit! {
    /// Time on the ledger's clock, in microseconds. Only the quorum's leader advances this clock.
    LedgerTime
}

impl Tokens {
    /// Returns the number of full blocks of `block` tokens; 0 if `block` is 0.
    pub fn whole_blocks(self, block: Tokens) -> Blocks {
        Blocks(self.0.checked_div(block.0).unwrap_or(0))
    }
}

impl Blocks {
    /// Returns the number of tokens in these blocks of `block` tokens each.
    pub fn tokens(self, block: Tokens) -> Tokens {
        Tokens(self.0.saturating_mul(block.0))
    }
}

impl Micros {
    /// Converts from a `Duration`, saturating.
    pub fn of(span: std::time::Duration) -> Self {
        Self(u64::try_from(span.as_micros()).unwrap_or(u64::MAX))
    }

    /// Converts to a `Duration`.
    pub fn duration(self) -> std::time::Duration {
        std::time::Duration::from_micros(self.0)
    }
}

impl LedgerTime {
    /// Returns the time that is `span` later.
    pub fn after(self, span: Micros) -> Self {
        Self(self.0.saturating_add(span.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arithmetic_saturates_at_both_ends() {
        assert_eq!(Tokens(1) - Tokens(2), Tokens::ZERO);
        assert_eq!(Bytes(u64::MAX) + Bytes(1), Bytes(u64::MAX));
        assert_eq!(Micros(u64::MAX / 2) * 3, Micros(u64::MAX));
    }

    #[test]
    fn partial_blocks_are_not_counted() {
        assert_eq!(Tokens(63).whole_blocks(Tokens(16)), Blocks(3));
        assert_eq!(Tokens(63).whole_blocks(Tokens(0)), Blocks(0));
        assert_eq!(Blocks(3).tokens(Tokens(16)), Tokens(48));
    }
}
