//! Limits the expanded size of a trace: a small file can extend the previous prompt a hundred thousand times.

use smart_default::SmartDefault;

use super::error::{TraceError, TraceLocation};

/// Most path entries and ranges of block ids in all files together: at most half a gigabyte of ranges, and eight times
/// the size of five hundred recorded sessions of coding agents.
const MAX_ENTRIES: usize = 1 << 25;

#[derive(Debug, SmartDefault)]
pub(crate) struct TraceBudget {
    #[default(MAX_ENTRIES)]
    left: usize,
}

impl TraceBudget {
    /// Takes `entries` from the budget for a prompt.
    pub(crate) fn take(&mut self, place: TraceLocation<'_>, entries: usize) -> Result<(), TraceError> {
        let accepted = "prompts of 33554432 runs in all; split the trace";
        let over = || place.out_of_range("the prompts", "more than can be held", accepted);
        self.left = self.left.checked_sub(entries).ok_or_else(over)?;
        Ok(())
    }
}
