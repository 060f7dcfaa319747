//! Journal: a file of whole lines, rotated within a bound, with disk space reserved before a line is written.
//!
//! Independent of the lines' contents.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use parking_lot::Mutex;
use rustix::fs::FallocateFlags;
use rustix::io::Errno;

/// Maximum number of files: the current one and older ones, of which `NAME.jsonl.1` is the newest.
pub(super) const MAX_FILES: u32 = 4;

/// Space reserved for any line: path and body are bounded, and escaping multiplies their length by a small factor.
const MAX_RECORD_BYTES: u64 = 64 << 10;

/// The current file and its older ones.
#[derive(Debug)]
pub(super) struct Journal {
    pub(super) path: PathBuf,
    /// Maximum size of one file.
    max_bytes: u64,
    pub(super) file: Mutex<JournalFile>,
}

/// Whether disk space for a line was reserved before.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in super::super) enum SpaceReservation {
    /// Reserved before the write was executed.
    Reserved,
    /// Nothing was executed; the line is written if possible.
    None,
}

/// The current file.
#[derive(Debug)]
pub(super) struct JournalFile {
    file: File,
    /// Bytes of whole lines.
    size: u64,
    /// Offset up to which disk space is allocated.
    allocated: u64,
    /// Allocated bytes reserved for running writes.
    pub(super) reserved: u64,
    /// Whether a partial line may follow the whole ones.
    is_torn: bool,
}

impl Journal {
    /// Opens `path`; all files together stay within about `bound` bytes.
    pub(super) fn open(path: PathBuf, bound: u64) -> io::Result<Self> {
        let file = Mutex::new(JournalFile::open(&path)?);
        path.parent().map_or(Ok(()), sync_folder)?;
        Ok(Self { path, max_bytes: (bound / u64::from(MAX_FILES)).max(4 << 10), file })
    }

    /// Reserves disk space for one line. Blocks on disk IO.
    pub(super) fn reserve(&self) -> io::Result<()> {
        self.file.lock().reserve(MAX_RECORD_BYTES)
    }

    /// Returns whether there is space now; `None` if somebody else is writing. Blocks on disk IO.
    pub(super) fn has_space(&self) -> Option<bool> {
        let mut file = self.file.try_lock()?;
        let is_reserved = file.reserve(MAX_RECORD_BYTES).is_ok();
        if is_reserved {
            file.reserved -= MAX_RECORD_BYTES;
        }
        Some(is_reserved)
    }

    /// Writes a line to disk.
    pub(super) fn append(&self, line: &[u8], room: SpaceReservation) -> io::Result<()> {
        let mut open = self.file.lock();
        if room == SpaceReservation::None {
            // Space reserved for running writes must not be used.
            open.reserve(MAX_RECORD_BYTES)?;
        }
        if open.size > 0
            && open.size + line.len() as u64 > self.max_bytes
            && let Err(error) = self.rotate(&mut open)
        {
            tracing::warn!(%error, path = %self.path.display(), "the audit log could not be rotated; it grows beyond its bound");
        }
        open.reserved = open.reserved.saturating_sub(MAX_RECORD_BYTES);
        open.append(line)
    }

    /// Starts a new file and moves all reservations to it.
    fn rotate(&self, open: &mut JournalFile) -> io::Result<()> {
        let numbered = |n: u32| match n {
            0 => self.path.clone(),
            n => self.path.with_extension(format!("jsonl.{n}")),
        };
        let fresh = self.path.with_extension("jsonl.new");
        let there = |done: io::Result<()>| match done {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            done => done,
        };
        there(fs::remove_file(&fresh))?;
        let mut next = JournalFile::open(&fresh)?;
        next.reserve(open.reserved)?;
        for n in (0..MAX_FILES - 1).rev() {
            there(fs::rename(numbered(n), numbered(n + 1)))?;
        }
        fs::rename(&fresh, numbered(0))?;
        self.path.parent().map_or(Ok(()), sync_folder)?;
        let old = std::mem::replace(open, next);
        // Frees the unused space of the old file.
        old.file.set_len(old.size)
    }
}

impl JournalFile {
    /// Opens a file and truncates a partial last line left by a crash, which would corrupt the next one.
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        let file = OpenOptions::new().create(true).read(true).append(true).mode(0o600).open(path)?;
        let length = file.metadata()?.len();
        let size = last_line_end(&file, length)?;
        if size < length {
            tracing::warn!(path = %path.display(), bytes = length - size, "the audit log ended within a line, which is cut off");
            file.set_len(size)?;
        }
        Ok(Self { file, size, allocated: size, reserved: 0, is_torn: false })
    }

    /// Reserves this many bytes for later lines.
    fn reserve(&mut self, bytes: u64) -> io::Result<()> {
        self.truncate_torn()?;
        let end = self.size + self.reserved + bytes;
        if end > self.allocated {
            let allocated = rustix::io::retry_on_intr(|| {
                rustix::fs::fallocate(&self.file, FallocateFlags::KEEP_SIZE, self.size, end - self.size)
            });
            match allocated {
                Ok(()) => self.allocated = end,
                Err(Errno::OPNOTSUPP | Errno::NOSYS) => self.probe_space(end - self.size)?,
                Err(error) => return Err(error.into()),
            }
        }
        self.reserved += bytes;
        Ok(())
    }

    /// Tests by writing whether there is space, on file systems without fallocate.
    fn probe_space(&mut self, bytes: u64) -> io::Result<()> {
        self.is_torn = true;
        let tried = io::copy(&mut io::repeat(b' ').take(bytes), &mut self.file).and_then(|_| self.file.sync_data());
        self.truncate_torn()?;
        tried
    }

    /// Writes one whole line, or nothing.
    fn append(&mut self, line: &[u8]) -> io::Result<()> {
        self.truncate_torn()?;
        self.is_torn = true;
        let written = self.file.write_all(line).and_then(|()| self.file.sync_data());
        if let Err(error) = written {
            // If this fails, it is retried before the next line.
            let _ = self.truncate_torn();
            return Err(error);
        }
        self.is_torn = false;
        self.size += line.len() as u64;
        Ok(())
    }

    /// Truncates what a failed write left; the space allocated behind it is lost, too.
    fn truncate_torn(&mut self) -> io::Result<()> {
        if self.is_torn {
            self.file.set_len(self.size)?;
            (self.is_torn, self.allocated) = (false, self.size);
        }
        Ok(())
    }
}

/// Syncs a folder: a line is durable only if its file's name is.
fn sync_folder(folder: &Path) -> io::Result<()> {
    File::open(folder)?.sync_all()
}

/// Returns the offset after the last whole line.
fn last_line_end(file: &File, length: u64) -> io::Result<u64> {
    let mut end = length;
    let mut piece = [0; 4 << 10];
    while end > 0 {
        let start = end.saturating_sub(piece.len() as u64);
        let piece = &mut piece[..(end - start) as usize];
        file.read_exact_at(piece, start)?;
        if let Some(at) = piece.iter().rposition(|byte| *byte == b'\n') {
            return Ok(start + at as u64 + 1);
        }
        end = start;
    }
    Ok(0)
}
