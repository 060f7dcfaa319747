//! How much a trace may come to: a small file can say "all of before, and one more" a hundred thousand times.

use smart_default::SmartDefault;

use super::error::{Place, TraceError};

/// Entries of prompts' paths and runs of their block ids, of all files together. Half a gigabyte of runs
/// at most, and eight times what five hundred recorded sessions of coding agents come to.
const MOST: usize = 1 << 25;

#[derive(Debug, SmartDefault)]
pub(crate) struct Budget {
    #[default(MOST)]
    left: usize,
}

impl Budget {
    /// A prompt takes so many.
    pub(crate) fn take(&mut self, place: Place<'_>, entries: usize) -> Result<(), TraceError> {
        let accepted = "prompts of 33554432 runs in all; split the trace";
        let over = || place.out_of_range("the prompts", "more than can be held", accepted);
        self.left = self.left.checked_sub(entries).ok_or_else(over)?;
        Ok(())
    }
}
