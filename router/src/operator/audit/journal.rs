//! One file of whole lines, rotated within a bound, with room that is taken on the disk before a line is written.
//!
//! Knows nothing of what the lines say.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use parking_lot::Mutex;
use rustix::fs::FallocateFlags;
use rustix::io::Errno;

/// Most files that are kept: the current one and older ones, `NAME.jsonl.1` the newest of them.
pub(super) const MAX_FILES: u32 = 4;

/// Room for one line, whatever is in it: path and body are bounded, and escaping makes them a few times as long.
const MAX_RECORD_BYTES: u64 = 64 << 10;

/// The current file and its older ones.
#[derive(Debug)]
pub(super) struct Journal {
    pub(super) path: PathBuf,
    /// Of one file.
    max_bytes: u64,
    pub(super) file: Mutex<JournalFile>,
}

/// Whether the disk gave the room for a line before it was written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::operator) enum SpaceReservation {
    /// It was taken before the write was begun.
    Reserved,
    /// Nothing was begun, and the line is written if it can be.
    None,
}

/// The file that is written to.
#[derive(Debug)]
pub(super) struct JournalFile {
    file: File,
    /// Whole lines.
    size: u64,
    /// Up to where the disk has given room.
    allocated: u64,
    /// Of that, for writes that run.
    pub(super) reserved: u64,
    /// Whether a part of a line may stand behind the whole ones.
    is_torn: bool,
}

impl Journal {
    /// Opens `path`; all files together stay within about `bound` bytes.
    pub(super) fn open(path: PathBuf, bound: u64) -> io::Result<Self> {
        let file = Mutex::new(JournalFile::open(&path)?);
        path.parent().map_or(Ok(()), sync_folder)?;
        Ok(Self { path, max_bytes: (bound / u64::from(MAX_FILES)).max(4 << 10), file })
    }

    /// Takes room on the disk for a line to come. Blocks while the disk does.
    pub(super) fn reserve(&self) -> io::Result<()> {
        self.file.lock().reserve(MAX_RECORD_BYTES)
    }

    /// Whether there is room now; none where somebody else writes. Blocks while the disk does.
    pub(super) fn has_space(&self) -> Option<bool> {
        let mut file = self.file.try_lock()?;
        let taken = file.reserve(MAX_RECORD_BYTES).is_ok();
        if taken {
            file.reserved -= MAX_RECORD_BYTES;
        }
        Some(taken)
    }

    /// Writes a line to the disk.
    pub(super) fn append(&self, line: &[u8], room: SpaceReservation) -> io::Result<()> {
        let mut open = self.file.lock();
        if room == SpaceReservation::None {
            // What was promised to writes that run is not its to take.
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

    /// A new file, in which what was promised has its room, too.
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
        // What is left of its room goes back.
        old.file.set_len(old.size)
    }
}

impl JournalFile {
    /// Goes on behind the last whole line: a part of one that a crash left would spoil the next.
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

    /// Takes so many bytes of the disk for lines to come.
    fn reserve(&mut self, bytes: u64) -> io::Result<()> {
        self.truncate_torn()?;
        let end = self.size + self.reserved + bytes;
        if end > self.allocated {
            let wanted = rustix::io::retry_on_intr(|| {
                rustix::fs::fallocate(&self.file, FallocateFlags::KEEP_SIZE, self.size, end - self.size)
            });
            match wanted {
                Ok(()) => self.allocated = end,
                Err(Errno::OPNOTSUPP | Errno::NOSYS) => self.probe_space(end - self.size)?,
                Err(error) => return Err(error.into()),
            }
        }
        self.reserved += bytes;
        Ok(())
    }

    /// On a file system that promises nothing: whether there is room now.
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
            // What cannot be mended now is before the next line.
            let _ = self.truncate_torn();
            return Err(error);
        }
        self.is_torn = false;
        self.size += line.len() as u64;
        Ok(())
    }

    /// Cuts off what a failed write left. The room behind it goes with it.
    fn truncate_torn(&mut self) -> io::Result<()> {
        if self.is_torn {
            self.file.set_len(self.size)?;
            (self.is_torn, self.allocated) = (false, self.size);
        }
        Ok(())
    }
}

/// Makes a folder's entries durable: a line is only there if its file is.
fn sync_folder(folder: &Path) -> io::Result<()> {
    File::open(folder)?.sync_all()
}

/// Where the last whole line ends.
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
