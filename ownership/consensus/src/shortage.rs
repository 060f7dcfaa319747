//! Temporary resource shortages of a process: which errors indicate one, and when to retry. Pure.

use std::io;
use std::time::Duration;

/// Wait after the first failed attempt. Doubles with each attempt.
const FIRST_WAIT: Duration = Duration::from_millis(10);

/// Maximum wait between two attempts.
const LONGEST_WAIT: Duration = Duration::from_secs(2);

/// EAGAIN, ENOMEM, ENFILE and EMFILE in Linux's numbering: no thread, no memory, no file descriptor.
const SHORT: [i32; 4] = [11, 12, 23, 24];

/// Returns whether an error means that the process is temporarily out of a resource.
pub fn is_shortage(error: &io::Error) -> bool {
    error.raw_os_error().is_some_and(|errno| SHORT.contains(&errno))
}

/// Exponential backoff between the attempts of one operation.
#[derive(Clone, Debug)]
pub struct RetryBackoff {
    next: Duration,
}

impl Default for RetryBackoff {
    fn default() -> Self {
        Self { next: FIRST_WAIT }
    }
}

impl RetryBackoff {
    /// Returns how long to wait after this error; `None` if the error is not a shortage and a retry is useless.
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
            let (mut waits, error) = (RetryBackoff::default(), io::Error::from_raw_os_error(errno));
            let all: Vec<Duration> = (0..1_000).map(|_| waits.after(&error).unwrap()).collect();
            assert_eq!(all[..3], [10, 20, 40].map(Duration::from_millis), "{errno}");
            assert!(all.is_sorted() && all.ends_with(&[LONGEST_WAIT; 900]));
        }
    }

    #[test]
    fn any_other_error_is_final() {
        // EIO, ENOSPC, ENOENT, EACCES.
        for errno in [5, 28, 2, 13] {
            assert_eq!(RetryBackoff::default().after(&io::Error::from_raw_os_error(errno)), None, "{errno}");
        }
        assert_eq!(RetryBackoff::default().after(&io::Error::other("a bug")), None);
    }
}
