//! Traces from disk: one file or a folder of them, plain or gzipped. What they mean is the simulator's to say.

use std::fs::File;
use std::io::{BufRead as _, BufReader, Read as _};
use std::path::{Path, PathBuf};

use flate2::read::MultiGzDecoder;
use simulator::trace::{Trace, TraceError, TraceLoader};

/// The most bytes of a trace, all its files together, after decompression.
const MAX_BYTES: u64 = 768 << 20;
const MAX_FILES: usize = 100_000;
/// What a trace's name ends with, `.gz` behind it or not.
const EXTENSIONS: [&str; 3] = [".json", ".jsonl", ".csv"];

/// Why there is no trace.
#[derive(Debug, thiserror::Error)]
pub enum TraceFilesError {
    #[error("cannot read {path}: {source}")]
    Unreadable { path: PathBuf, source: std::io::Error },
    #[error("{path} makes the trace longer than {} MiB; accepted: less in all files together, so split it", .most >> 20)]
    TooLarge { path: PathBuf, most: u64 },
    #[error("{0} holds more than 100000 traces; split the folder")]
    TooMany(PathBuf),
    #[error("{0} is an archive; unpack it and name the folder")]
    Archive(PathBuf),
    #[error("{0} is not text in UTF-8")]
    NotText(PathBuf),
    #[error("the folder {0} holds no trace: files that end in .json, .jsonl or .csv, .gz behind it or not")]
    Empty(PathBuf),
    #[error(transparent)]
    Trace(#[from] TraceError),
}

/// Where the trace lies: a router's data directory stands for its decision log.
pub(crate) fn resolve(path: &Path) -> PathBuf {
    let log = path.join("decisions");
    if log.is_dir() { log } else { path.to_owned() }
}

/// Reads a trace; of a folder, its files in the order of their names.
pub(crate) fn load(path: &Path) -> Result<Trace, TraceFilesError> {
    load_within(path, MAX_BYTES)
}

/// The same with at most so many bytes.
pub(super) fn load_within(path: &Path, most: u64) -> Result<Trace, TraceFilesError> {
    let path = &resolve(path);
    let files = if path.is_dir() { list_files(path)? } else { vec![path.to_owned()] };
    let (mut reader, mut left) = (TraceLoader::default(), most);
    for file in &files {
        let bytes = read_decompressed(file, left)?;
        let over = || TraceFilesError::TooLarge { path: file.clone(), most };
        left = left.checked_sub(bytes.len() as u64).ok_or_else(over)?;
        let text = decode_utf8(bytes).ok_or_else(|| TraceFilesError::NotText(file.clone()))?;
        reader.read(&file.display().to_string(), &text)?;
    }
    reader.finish()?.ok_or_else(|| TraceFilesError::Empty(path.to_owned()))
}

/// Decodes UTF-8; tolerates a character that is truncated at the end. Returns `None` for anything else.
fn decode_utf8(bytes: Vec<u8>) -> Option<String> {
    match String::from_utf8(bytes) {
        Ok(text) => Some(text),
        Err(error) if error.utf8_error().error_len().is_none() => {
            Some(String::from_utf8_lossy(error.as_bytes()).into_owned())
        }
        Err(_) => None,
    }
}

/// The traces in a folder, in the order of their names.
pub(crate) fn list_files(folder: &Path) -> Result<Vec<PathBuf>, TraceFilesError> {
    let unreadable = |source| TraceFilesError::Unreadable { path: folder.to_owned(), source };
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(unreadable)? {
        let file = entry.map_err(unreadable)?.path();
        let name = file.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let name = name.strip_suffix(".gz").unwrap_or(&name);
        if EXTENSIONS.iter().any(|ending| name.ends_with(ending)) {
            files.push(file);
        }
        if files.len() > MAX_FILES {
            return Err(TraceFilesError::TooMany(folder.to_owned()));
        }
    }
    files.sort();
    Ok(files)
}

/// Reads a file, decompressed, up to `most` + 1 bytes, so that the caller can detect a longer one.
pub(crate) fn read_decompressed(path: &Path, most: u64) -> Result<Vec<u8>, TraceFilesError> {
    if [".tar.xz", ".tar.gz", ".tar", ".zip", ".xz"].iter().any(|ending| path.to_string_lossy().ends_with(ending)) {
        return Err(TraceFilesError::Archive(path.to_owned()));
    }
    let unreadable = |source| TraceFilesError::Unreadable { path: path.to_owned(), source };
    let mut file = BufReader::new(File::open(path).map_err(unreadable)?);
    let packed = file.fill_buf().map_err(unreadable)?.starts_with(&[0x1f, 0x8b]);
    let (mut bytes, mut file) = (Vec::new(), file.take(most + 1));
    let read = if packed {
        MultiGzDecoder::new(file).take(most + 1).read_to_end(&mut bytes)
    } else {
        file.read_to_end(&mut bytes)
    };
    read.map_err(unreadable)?;
    Ok(bytes)
}
