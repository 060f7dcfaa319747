//! Files of the decision log: the current `decisions.jsonl`, and older `decisions-FIRST-LAST.jsonl.gz` named by the
//! arrival of their first and last record in milliseconds since 1970.

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufReader, BufWriter, Read as _, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use flate2::Compression;
use flate2::read::MultiGzDecoder;
use flate2::write::GzEncoder;

pub(super) const CURRENT_FILE: &str = "decisions.jsonl";

/// Maximum uncompressed bytes of one file; a reader holds one at a time.
const MAX_FILE_BYTES: u64 = 8 << 20;

/// Maximum bytes read of one file, whoever wrote it.
const MAX_READ_BYTES: u64 = 64 << 20;

/// Bytes that are compressed at a time.
const COPY_BYTES: usize = 128 << 10;

/// Size limits of the log.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct LogSizeLimit {
    pub(super) total: u64,
    pub(super) current_file: u64,
}

impl LogSizeLimit {
    /// Limits for a log of this many bytes; `None` for 0, which disables it.
    pub(crate) fn of(bytes: u64) -> Option<Self> {
        (bytes > 0).then(|| Self { total: bytes, current_file: (bytes / 4).min(MAX_FILE_BYTES) })
    }
}

#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct LogSegment {
    /// Arrival of the first record; the current file counts as the newest.
    pub(super) first: u64,
    pub(super) last: u64,
    pub(super) path: PathBuf,
}

/// Lists the log's files, oldest first.
pub(crate) fn segments(folder: &Path) -> io::Result<Vec<LogSegment>> {
    let mut all = Vec::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        all.extend(parse_segment(&path));
    }
    all.sort();
    Ok(all)
}

fn parse_segment(path: &Path) -> Option<LogSegment> {
    let name = path.file_name()?.to_str()?;
    if name == CURRENT_FILE {
        return Some(LogSegment { first: u64::MAX, last: u64::MAX, path: path.to_owned() });
    }
    let times = name.strip_prefix("decisions-")?;
    let (first, last) = times.strip_suffix(".jsonl.gz").or_else(|| times.strip_suffix(".jsonl"))?.split_once('-')?;
    Some(LogSegment { first: first.parse().ok()?, last: last.parse().ok()?, path: path.to_owned() })
}

/// Renames the current file after the arrival of its records and compresses it.
pub(super) fn rotate(folder: &Path, (first, last): (u64, u64)) -> io::Result<()> {
    let named = |last: u64| folder.join(format!("decisions-{first:013}-{last:013}.jsonl"));
    let is_free = |path: &PathBuf| !path.exists() && !path.with_extension("jsonl.gz").exists();
    let plain = (last..).map(named).find(is_free).unwrap_or_else(|| named(last));
    fs::rename(folder.join(CURRENT_FILE), &plain)?;
    compress(&plain)
}

/// Compresses files left uncompressed by a killed process or a full disk, and deletes partial files.
pub(super) fn clean_up(folder: &Path) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if name.ends_with(".part") {
            fs::remove_file(&path)?;
        } else if name != CURRENT_FILE && name.ends_with(".jsonl") && parse_segment(&path).is_some() {
            compress(&path)?;
        }
    }
    Ok(())
}

fn compress(plain: &Path) -> io::Result<()> {
    let (packed, part) = (plain.with_extension("jsonl.gz"), plain.with_extension("jsonl.part"));
    let packing = OpenOptions::new().create(true).write(true).truncate(true).mode(0o600).open(&part)?;
    let mut encoder = GzEncoder::new(BufWriter::new(packing), Compression::fast());
    io::copy(&mut BufReader::with_capacity(COPY_BYTES, File::open(plain)?), &mut encoder)?;
    encoder.finish()?.flush()?;
    fs::rename(&part, &packed)?;
    fs::remove_file(plain)
}

/// Deletes the oldest files until `folder` stays within `limit` even when the current file is full.
pub(super) fn delete_oldest(folder: &Path, limit: LogSizeLimit) -> io::Result<()> {
    let old: Vec<_> = segments(folder)?.into_iter().filter(|segment| segment.first != u64::MAX).collect();
    let sizes: Vec<u64> = old.iter().map(|segment| fs::metadata(&segment.path).map_or(0, |file| file.len())).collect();
    let mut used_bytes: u64 = sizes.iter().sum();
    for (segment, size) in old.iter().zip(sizes) {
        if used_bytes + limit.current_file <= limit.total {
            break;
        }
        fs::remove_file(&segment.path)?;
        used_bytes -= size;
    }
    Ok(())
}

/// Reads a file, decompressed. If it is truncated or too long, returns the readable beginning.
pub(crate) fn read_text(path: &Path) -> io::Result<Vec<u8>> {
    let file = BufReader::new(File::open(path)?);
    let mut text = Vec::new();
    if path.extension().is_some_and(|ending| ending == "gz") {
        match MultiGzDecoder::new(file).take(MAX_READ_BYTES).read_to_end(&mut text) {
            Err(error) if text.is_empty() => return Err(error),
            Err(_) | Ok(_) => {}
        }
    } else {
        file.take(MAX_READ_BYTES).read_to_end(&mut text)?;
    }
    Ok(text)
}
