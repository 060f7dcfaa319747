//! What a process lacks for a while: which errors say so, when it is tried again, and when no more. Pure.

use std::io;
use std::time::Duration;

/// The wait after the first failed attempt; it doubles.
const FIRST_WAIT: Duration = Duration::from_millis(10);

/// The longest wait between two attempts.
const LONGEST_WAIT: Duration = Duration::from_secs(2);

/// EAGAIN, ENOMEM, ENFILE and EMFILE, as Linux numbers them: no thread, no memory, no file handle.
const SHORT: [i32; 4] = [11, 12, 23, 24];

/// Whether an error says that the process has run out of something for now.
pub fn is_shortage(error: &io::Error) -> bool {
    error.raw_os_error().is_some_and(|errno| SHORT.contains(&errno))
}

/// The waits between the attempts at one thing.
#[derive(Clone, Debug)]
pub struct Waits {
    next: Duration,
}

impl Default for Waits {
    fn default() -> Self {
        Self { next: FIRST_WAIT }
    }
}

impl Waits {
    /// How long to wait after an attempt that failed like this; none where the error is final, however long that takes.
    pub fn after(&mut self, error: &io::Error) -> Option<Duration> {
        let wait = self.next;
        self.next = (wait * 2).min(LONGEST_WAIT);
        is_shortage(error).then_some(wait)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_passes_is_waited_for_ever_longer_up_to_a_bound_and_for_ever() {
        for errno in SHORT {
            let (mut waits, error) = (Waits::default(), io::Error::from_raw_os_error(errno));
            let all: Vec<Duration> = (0..1_000).map(|_| waits.after(&error).unwrap()).collect();
            assert_eq!(all[..3], [10, 20, 40].map(Duration::from_millis), "{errno}");
            assert!(all.is_sorted() && all.ends_with(&[LONGEST_WAIT; 900]));
        }
    }

    #[test]
    fn any_other_error_is_final() {
        // EIO, ENOSPC, ENOENT, EACCES.
        for errno in [5, 28, 2, 13] {
            assert_eq!(Waits::default().after(&io::Error::from_raw_os_error(errno)), None, "{errno}");
        }
        assert_eq!(Waits::default().after(&io::Error::other("a bug")), None);
    }
}
