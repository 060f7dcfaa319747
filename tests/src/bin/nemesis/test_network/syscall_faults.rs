//! Faults in a running node's system calls: slow or failing disks, clocks that jump or run at another rate, and
//! shortages of descriptors, memory or threads.
//!
//! They are injected by a C library (`shim.c`) loaded before libc, where a real node meets its disk and its clocks.
//! Without a C compiler they are not available, and the run reports it.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::NemesisError;
use crate::history::MemberSlot;

const SHIM_SOURCE: &str = include_str!("shim.c");

/// Kind of fault; the number is its index in the shim.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum SyscallFault {
    /// Delay of every fsync and fdatasync, in milliseconds.
    SyncDelay = 0,
    /// Error returned by every fsync and fdatasync.
    SyncError = 1,
    /// Offset of wall clocks, in seconds.
    WallOffset = 2,
    /// Rate of monotonic clocks, in thousandths.
    ClockRate = 3,
    /// Sum of all forward jumps of monotonic clocks, in milliseconds.
    ClockJump = 4,
    /// Error of opening a file.
    OpenError = 5,
    /// Error of accepting a connection.
    AcceptError = 6,
    /// Error of starting a thread.
    ThreadError = 7,
}

/// How often the node's calls met a fault; with zero the fault had no effect.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) struct SyscallFaultCounts {
    /// Delayed calls.
    pub(crate) delayed: i64,
    /// Failed calls.
    pub(crate) failed: i64,
    /// Reads of a wall clock with an offset.
    pub(crate) wall_reads: i64,
    /// Reads of a monotonic clock at another rate.
    pub(crate) skewed_reads: i64,
    /// Files not opened.
    pub(crate) failed_opens: i64,
    /// Connections not accepted.
    pub(crate) failed_accepts: i64,
    /// Threads not started.
    pub(crate) failed_thread_starts: i64,
}

const FAULT_COUNT: u64 = 8;
const FILE_BYTES: usize = 15 * 8;

/// Syscall faults of all nodes of a run.
#[derive(Clone, Debug)]
pub(crate) struct SyscallFaultInjector {
    shared_object: PathBuf,
    folder: PathBuf,
}

impl SyscallFaultInjector {
    /// Builds the shim in `folder`; fails without a C compiler.
    pub(crate) fn build(folder: &Path) -> Result<SyscallFaultInjector, NemesisError> {
        let (source, shared_object) = (folder.join("shim.c"), folder.join("shim.so"));
        std::fs::write(&source, SHIM_SOURCE).map_err(NemesisError::system(source.display().to_string()))?;
        let mut compile = Command::new("cc");
        compile.args(["-O2", "-shared", "-fPIC", "-o"]).arg(&shared_object).arg(&source).arg("-ldl");
        let compiled = compile.stdin(Stdio::null()).output().map_err(NemesisError::system("cc"))?;
        let got = || String::from_utf8_lossy(&compiled.stderr).trim().to_owned();
        match compiled.status.success() {
            true => Ok(SyscallFaultInjector { shared_object, folder: folder.to_owned() }),
            false => Err(NemesisError::Answer { who: "cc".into(), got: got() }),
        }
    }

    /// Returns the environment of the node in this slot; resets all its faults.
    pub(crate) fn environment(&self, slot: MemberSlot) -> Result<Vec<(&'static str, String)>, NemesisError> {
        let path = self.path(slot);
        std::fs::write(&path, [0; FILE_BYTES]).map_err(NemesisError::system(path.display().to_string()))?;
        Ok(vec![("LD_PRELOAD", self.shared_object.display().to_string()), ("FAULT_LEVERS", path.display().to_string())])
    }

    /// Sets a fault; zero removes it.
    pub(crate) fn set(&self, slot: MemberSlot, lever: SyscallFault, value: i64) -> Result<(), NemesisError> {
        let path = self.path(slot);
        let file = File::options().write(true).open(&path);
        let pulled = file.and_then(|file| file.write_all_at(&value.to_ne_bytes(), lever as u64 * 8));
        pulled.map_err(NemesisError::system(path.display().to_string()))
    }

    /// Returns how often the node in this slot met faults since it was started.
    pub(crate) fn counts(&self, slot: MemberSlot) -> Result<SyscallFaultCounts, NemesisError> {
        let path = self.path(slot);
        let mut bytes = [0; FILE_BYTES];
        let read = File::open(&path).and_then(|file| file.read_exact_at(&mut bytes, 0));
        read.map_err(NemesisError::system(path.display().to_string()))?;
        let at = |place: u64| {
            let from = (FAULT_COUNT + place) as usize * 8;
            bytes[from..from + 8].try_into().map_or(0, i64::from_ne_bytes)
        };
        Ok(SyscallFaultCounts {
            delayed: at(0),
            failed: at(1),
            wall_reads: at(2),
            skewed_reads: at(3),
            failed_opens: at(4),
            failed_accepts: at(5),
            failed_thread_starts: at(6),
        })
    }

    fn path(&self, slot: MemberSlot) -> PathBuf {
        self.folder.join(format!("node{}.levers", slot.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the wall-clock time in seconds that `date` prints under the shim.
    fn seconds_of(faults: &SyscallFaultInjector, slot: MemberSlot) -> i64 {
        let path = faults.path(slot);
        let mut date = Command::new("date");
        date.arg("+%s").env("LD_PRELOAD", &faults.shared_object).env("FAULT_LEVERS", path);
        let output = date.output().unwrap();
        String::from_utf8(output.stdout).unwrap().trim().parse().unwrap()
    }

    fn sync_of(faults: &SyscallFaultInjector, slot: MemberSlot, file: &Path) -> bool {
        let mut sync = Command::new("sync");
        sync.arg("--data").arg(file).env("LD_PRELOAD", &faults.shared_object).env("FAULT_LEVERS", faults.path(slot));
        sync.stderr(Stdio::null()).status().unwrap().success()
    }

    #[test]
    fn an_injected_shortage_is_seen_until_it_is_lifted() {
        let folder = std::env::temp_dir().join(format!("shortages-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        if let Ok(levers) = SyscallFaultInjector::build(&folder) {
            let (slot, file) = (MemberSlot(1), folder.join("file"));
            std::fs::write(&file, "written").unwrap();
            levers.environment(slot).unwrap();
            let read = || {
                let mut cat = Command::new("cat");
                cat.arg(&file).env("LD_PRELOAD", &levers.shared_object).env("FAULT_LEVERS", levers.path(slot));
                cat.env("LC_ALL", "C").output().unwrap()
            };
            levers.set(slot, SyscallFault::OpenError, 24).unwrap();
            let refused = read();
            assert!(!refused.status.success());
            assert!(String::from_utf8_lossy(&refused.stderr).contains("Too many open files"));
            assert!(levers.counts(slot).unwrap().failed_opens > 0);
            levers.set(slot, SyscallFault::OpenError, 0).unwrap();
            assert_eq!(read().stdout, b"written");
        }
        std::fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn an_injected_syscall_fault_is_seen_until_it_is_lifted() {
        let folder = std::env::temp_dir().join(format!("levers-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        // Without a compiler a run has no syscall faults either.
        if let Ok(levers) = SyscallFaultInjector::build(&folder) {
            let (slot, file) = (MemberSlot(1), folder.join("file"));
            std::fs::write(&file, "written").unwrap();
            levers.environment(slot).unwrap();
            let before = seconds_of(&levers, slot);
            assert_eq!(levers.counts(slot).unwrap(), SyscallFaultCounts::default());
            levers.set(slot, SyscallFault::WallOffset, 7200).unwrap();
            assert!(seconds_of(&levers, slot) >= before + 7200);
            levers.set(slot, SyscallFault::WallOffset, 0).unwrap();
            assert!(seconds_of(&levers, slot) < before + 7200);
            levers.set(slot, SyscallFault::SyncError, 5).unwrap();
            assert!(!sync_of(&levers, slot, &file), "it failed");
            levers.set(slot, SyscallFault::SyncError, 0).unwrap();
            levers.set(slot, SyscallFault::SyncDelay, 1).unwrap();
            assert!(sync_of(&levers, slot, &file), "late, but it succeeded");
            let felt = levers.counts(slot).unwrap();
            assert_eq!((felt.delayed, felt.failed), (1, 1));
            assert!(felt.wall_reads > 0);
        }
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
