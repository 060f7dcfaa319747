//! Files that are read anew when they change.

use std::fmt::Display;
use std::path::Path;
use std::time::{Duration, SystemTime};

/// Time of the last change, and size.
pub(crate) type Stamp = (SystemTime, u64);

pub(crate) fn stamp(path: &Path) -> Option<Stamp> {
    let meta = std::fs::metadata(path).ok()?;
    Some((meta.modified().ok()?, meta.len()))
}

/// Looks at files for ever: calls `take` when their stamps are not those that were `seen`, which were taken before the
/// files were read.
///
/// What cannot be taken is tried again each time, and said once: the files may become readable without another change.
pub(crate) async fn follow<S: PartialEq + Copy, E: Display>(
    (mut seen, stamps): (S, impl Fn() -> S),
    every: Duration,
    mut take: impl FnMut() -> Result<(), E>,
) {
    let mut refused = None;
    loop {
        tokio::time::sleep(every).await;
        let now = stamps();
        if now == seen {
            continue;
        }
        match take() {
            Ok(()) => (seen, refused) = (now, None),
            Err(error) if refused.replace(now) != Some(now) => {
                tracing::error!(%error, "a file that changed is not used; what was read before still is");
            }
            Err(_) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[tokio::test]
    async fn a_file_that_cannot_be_taken_is_tried_until_it_can_and_then_left_alone() {
        let (stamp, fails, taken) = (Cell::new(1), Cell::new(3), Cell::new(0));
        let take = || {
            taken.set(taken.get() + 1);
            fails.set(fails.get() - 1);
            if fails.get() >= 0 { Err("not readable") } else { Ok(()) }
        };
        // It is looked at once each time that this comes up.
        let looks = Cell::new(0);
        let look = || {
            looks.set(looks.get() + 1);
            stamp.get()
        };
        let follow = follow((1, look), Duration::from_millis(1), take);
        let watch = async {
            let until = async |count: u32| {
                while looks.get() < count {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
            };
            until(5).await;
            assert_eq!(taken.get(), 0, "it has not changed");
            stamp.set(2);
            until(20).await;
            assert_eq!(taken.get(), 4, "three failures, then the one that counts");
        };
        tokio::select! {
            () = follow => {}
            () = watch => {}
        }
    }
}
