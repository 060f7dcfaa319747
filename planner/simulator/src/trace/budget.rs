//! How much a trace may come to: a small file can say "all of before, and one more" a hundred thousand times.

use smart_default::SmartDefault;

use super::error::{TraceError, TraceLocation};

/// Entries of prompts' paths and runs of their block ids, of all files together. Half a gigabyte of runs
/// at most, and eight times what five hundred recorded sessions of coding agents come to.
const MAX_ENTRIES: usize = 1 << 25;

#[derive(Debug, SmartDefault)]
pub(crate) struct TraceBudget {
    #[default(MAX_ENTRIES)]
    left: usize,
}

impl TraceBudget {
    /// A prompt takes so many.
    pub(crate) fn take(&mut self, place: TraceLocation<'_>, entries: usize) -> Result<(), TraceError> {
        let accepted = "prompts of 33554432 runs in all; split the trace";
        let over = || place.out_of_range("the prompts", "more than can be held", accepted);
        self.left = self.left.checked_sub(entries).ok_or_else(over)?;
        Ok(())
    }
}
