//! Watched files, which are reloaded when they change.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use parking_lot::Mutex;

/// Time of the last change, and size.
pub type FileStamp = (SystemTime, u64);

/// Returns the stamp of a file; `None` where it cannot be read.
pub fn stamp_of(path: &Path) -> Option<FileStamp> {
    let meta = std::fs::metadata(path).ok()?;
    Some((meta.modified().ok()?, meta.len()))
}

/// Files that changed and could not be reloaded, by content, with the reason: the previous content is still in use.
#[derive(Debug, Default)]
pub struct StaleFiles(Mutex<BTreeMap<&'static str, String>>);

impl StaleFiles {
    /// Returns the kinds of content, and why they are not in use.
    pub fn reasons(&self) -> Vec<(&'static str, String)> {
        self.0.lock().iter().map(|(what, why)| (*what, why.clone())).collect()
    }
}

/// Reports failed reloads of some files: the name of their content, and where the report goes.
#[derive(Clone, Debug)]
pub struct ReloadReporter {
    /// What the files are, for logs and alarms.
    pub name: &'static str,
    /// Where a failed reload is reported.
    pub stale: Arc<StaleFiles>,
}

impl ReloadReporter {
    fn mark_applied(&self) {
        self.stale.0.lock().remove(self.name);
    }

    fn mark_stale(&self, why: &impl Display) {
        self.stale.0.lock().insert(self.name, why.to_string());
    }
}

/// Checks files forever: calls `take` when their stamps differ from `seen`, which was taken before the files were read.
///
/// A failed reload is reported as long as it persists, retried on each check, and logged once: the files may become
/// readable without another change.
pub async fn follow<S: PartialEq + Copy, E: Display>(
    (mut seen, stamps): (S, impl Fn() -> S),
    (every, followed): (Duration, &ReloadReporter),
    mut take: impl FnMut() -> Result<(), E>,
) {
    let mut refused = None;
    loop {
        tokio::time::sleep(every).await;
        let now = stamps();
        if now == seen {
            // The files may be again as they were read.
            followed.mark_applied();
            continue;
        }
        match take() {
            Ok(()) => {
                (seen, refused) = (now, None);
                followed.mark_applied();
            }
            Err(error) => {
                followed.mark_stale(&error);
                if refused.replace(now) != Some(now) {
                    tracing::error!(%error, "a file that changed is not used; what was read before still is");
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[tokio::test]
    async fn an_unreadable_file_is_retried_until_it_is_accepted() {
        let (stamp, fails, taken) = (Cell::new(1), Cell::new(3), Cell::new(0));
        let take = || {
            taken.set(taken.get() + 1);
            fails.set(fails.get() - 1);
            if fails.get() >= 0 { Err("not readable") } else { Ok(()) }
        };
        // Incremented by each check.
        let looks = Cell::new(0);
        let look = || {
            looks.set(looks.get() + 1);
            stamp.get()
        };
        let followed = ReloadReporter { name: "tokens", stale: Arc::default() };
        let follow = follow((1, look), (Duration::from_millis(1), &followed), take);
        let watch = async {
            let until = async |count: u32| {
                while looks.get() < count {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
            };
            until(5).await;
            assert_eq!(taken.get(), 0, "it has not changed");
            assert_eq!(followed.stale.reasons(), []);
            stamp.set(2);
            while taken.get() < 2 {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            assert_eq!(followed.stale.reasons(), [("tokens", "not readable".to_owned())]);
            until(looks.get() + 20).await;
            assert_eq!(taken.get(), 4, "three failures, then the one that counts");
            assert_eq!(followed.stale.reasons(), []);
        };
        tokio::select! {
            () = follow => {}
            () = watch => {}
        }
    }
}
