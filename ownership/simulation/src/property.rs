//! Result of checking a property of a run.

/// A violated property.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PropertyViolation {
    /// Name of the check.
    pub check: &'static str,
    /// Where and how it was violated.
    pub detail: String,
}

pub(crate) type PropertyResult = Result<(), PropertyViolation>;

/// Fails a check unless a condition holds.
#[macro_export]
macro_rules! ensure {
    ($holds:expr, $check:expr, $($detail:tt)+) => {
        match $holds {
            true => Ok(()),
            false => Err($crate::property::PropertyViolation { check: $check, detail: format!($($detail)+) }),
        }
    };
}
