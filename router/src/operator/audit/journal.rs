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
pub(super) const FILES: u32 = 4;

/// Room for one line, whatever is in it: path and body are bounded, and escaping makes them a few times as long.
const ROOM: u64 = 64 << 10;

/// The current file and its older ones.
#[derive(Debug)]
pub(super) struct Journal {
    pub(super) path: PathBuf,
    /// Of one file.
    bound: u64,
    pub(super) file: Mutex<Open>,
}

/// Whether the disk gave the room for a line before it was written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::operator) enum Room {
    /// It was taken before the write was begun.
    Taken,
    /// Nothing was begun, and the line is written if it can be.
    None,
}

/// The file that is written to.
#[derive(Debug)]
pub(super) struct Open {
    file: File,
    /// Whole lines.
    size: u64,
    /// Up to where the disk has given room.
    room: u64,
    /// Of that, for writes that run.
    pub(super) promised: u64,
    /// Whether a part of a line may stand behind the whole ones.
    is_torn: bool,
}

impl Journal {
    /// Opens `path`; all files together stay within about `bound` bytes.
    pub(super) fn open(path: PathBuf, bound: u64) -> io::Result<Self> {
        let file = Mutex::new(Open::at(&path)?);
        path.parent().map_or(Ok(()), sync)?;
        Ok(Self { path, bound: (bound / u64::from(FILES)).max(4 << 10), file })
    }

    /// Takes room on the disk for a line to come. Blocks while the disk does.
    pub(super) fn make_room(&self) -> io::Result<()> {
        self.file.lock().take(ROOM)
    }

    /// Whether there is room now; none where somebody else writes. Blocks while the disk does.
    pub(super) fn has_room(&self) -> Option<bool> {
        let mut file = self.file.try_lock()?;
        let taken = file.take(ROOM).is_ok();
        if taken {
            file.promised -= ROOM;
        }
        Some(taken)
    }

    /// Writes a line to the disk.
    pub(super) fn append(&self, line: &[u8], room: Room) -> io::Result<()> {
        let mut open = self.file.lock();
        if room == Room::None {
            // What was promised to writes that run is not its to take.
            open.take(ROOM)?;
        }
        if open.size > 0
            && open.size + line.len() as u64 > self.bound
            && let Err(error) = self.rotate(&mut open)
        {
            tracing::warn!(%error, path = %self.path.display(), "the audit log could not be rotated; it grows beyond its bound");
        }
        open.promised = open.promised.saturating_sub(ROOM);
        open.append(line)
    }

    /// A new file, in which what was promised has its room, too.
    fn rotate(&self, open: &mut Open) -> io::Result<()> {
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
        let mut next = Open::at(&fresh)?;
        next.take(open.promised)?;
        for n in (0..FILES - 1).rev() {
            there(fs::rename(numbered(n), numbered(n + 1)))?;
        }
        fs::rename(&fresh, numbered(0))?;
        self.path.parent().map_or(Ok(()), sync)?;
        let old = std::mem::replace(open, next);
        // What is left of its room goes back.
        old.file.set_len(old.size)
    }
}

impl Open {
    /// Goes on behind the last whole line: a part of one that a crash left would spoil the next.
    pub(super) fn at(path: &Path) -> io::Result<Self> {
        let file = OpenOptions::new().create(true).read(true).append(true).mode(0o600).open(path)?;
        let length = file.metadata()?.len();
        let size = whole_lines(&file, length)?;
        if size < length {
            tracing::warn!(path = %path.display(), bytes = length - size, "the audit log ended within a line, which is cut off");
            file.set_len(size)?;
        }
        Ok(Self { file, size, room: size, promised: 0, is_torn: false })
    }

    /// Takes so many bytes of the disk for lines to come.
    fn take(&mut self, bytes: u64) -> io::Result<()> {
        self.mend()?;
        let end = self.size + self.promised + bytes;
        if end > self.room {
            let wanted = rustix::io::retry_on_intr(|| {
                rustix::fs::fallocate(&self.file, FallocateFlags::KEEP_SIZE, self.size, end - self.size)
            });
            match wanted {
                Ok(()) => self.room = end,
                Err(Errno::OPNOTSUPP | Errno::NOSYS) => self.try_room(end - self.size)?,
                Err(error) => return Err(error.into()),
            }
        }
        self.promised += bytes;
        Ok(())
    }

    /// On a file system that promises nothing: whether there is room now.
    fn try_room(&mut self, bytes: u64) -> io::Result<()> {
        self.is_torn = true;
        let tried = io::copy(&mut io::repeat(b' ').take(bytes), &mut self.file).and_then(|_| self.file.sync_data());
        self.mend()?;
        tried
    }

    /// Writes one whole line, or nothing.
    fn append(&mut self, line: &[u8]) -> io::Result<()> {
        self.mend()?;
        self.is_torn = true;
        let written = self.file.write_all(line).and_then(|()| self.file.sync_data());
        if let Err(error) = written {
            // What cannot be mended now is before the next line.
            let _ = self.mend();
            return Err(error);
        }
        self.is_torn = false;
        self.size += line.len() as u64;
        Ok(())
    }

    /// Cuts off what a failed write left. The room behind it goes with it.
    fn mend(&mut self) -> io::Result<()> {
        if self.is_torn {
            self.file.set_len(self.size)?;
            (self.is_torn, self.room) = (false, self.size);
        }
        Ok(())
    }
}

/// Makes a folder's entries durable: a line is only there if its file is.
fn sync(folder: &Path) -> io::Result<()> {
    File::open(folder)?.sync_all()
}

/// Where the last whole line ends.
fn whole_lines(file: &File, length: u64) -> io::Result<u64> {
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
