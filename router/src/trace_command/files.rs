//! Traces from disk: one file or a folder of them, plain or gzipped. What they mean is the simulator's to say.

use std::io::Read;
use std::path::{Path, PathBuf};

use flate2::read::MultiGzDecoder;
use simulator::trace::{Reader, Trace, TraceError};

/// The largest file after decompression.
const LARGEST: u64 = 4 << 30;
/// The most files of a folder.
const MOST: usize = 100_000;
/// What a trace's name ends with, `.gz` behind it or not.
const ENDINGS: [&str; 3] = [".json", ".jsonl", ".csv"];

/// Why there is no trace.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FilesError {
    #[error("cannot read {path}: {source}")]
    Unreadable { path: PathBuf, source: std::io::Error },
    #[error("{0} holds more than 4 GiB; split it into several files")]
    TooLarge(PathBuf),
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

/// Reads a trace; of a folder, its files in the order of their names.
pub(crate) fn load(path: &Path) -> Result<Trace, FilesError> {
    let files = if path.is_dir() { listed(path)? } else { vec![path.to_owned()] };
    let mut reader = Reader::default();
    for file in &files {
        reader.read(&file.display().to_string(), &unpacked(file)?)?;
    }
    reader.finish().ok_or_else(|| FilesError::Empty(path.to_owned()))
}

fn listed(folder: &Path) -> Result<Vec<PathBuf>, FilesError> {
    let unreadable = |source| FilesError::Unreadable { path: folder.to_owned(), source };
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(unreadable)? {
        let file = entry.map_err(unreadable)?.path();
        let name = file.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let name = name.strip_suffix(".gz").unwrap_or(&name);
        if ENDINGS.iter().any(|ending| name.ends_with(ending)) {
            files.push(file);
        }
        if files.len() > MOST {
            return Err(FilesError::TooMany(folder.to_owned()));
        }
    }
    files.sort();
    Ok(files)
}

fn unpacked(path: &Path) -> Result<String, FilesError> {
    let unreadable = |source| FilesError::Unreadable { path: path.to_owned(), source };
    let packed = std::fs::read(path).map_err(unreadable)?;
    if [".tar.xz", ".tar.gz", ".tar", ".zip", ".xz"].iter().any(|ending| path.to_string_lossy().ends_with(ending)) {
        return Err(FilesError::Archive(path.to_owned()));
    }
    let mut bytes = Vec::new();
    if packed.starts_with(&[0x1f, 0x8b]) {
        MultiGzDecoder::new(&packed[..]).take(LARGEST + 1).read_to_end(&mut bytes).map_err(unreadable)?;
    } else {
        bytes = packed;
    }
    if bytes.len() as u64 > LARGEST {
        return Err(FilesError::TooLarge(path.to_owned()));
    }
    String::from_utf8(bytes).map_err(|_| FilesError::NotText(path.to_owned()))
}
