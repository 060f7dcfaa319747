//! Disk faults: fills and frees a small disk, and truncates or flips the log of a stopped node.

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use super::veth::run;
use crate::NemesisError;

const FILL_FILE: &str = "ballast";

/// Mounts a small disk; it is unmounted with this program's mount namespace.
pub(crate) async fn mount_small(folder: &Path, size: &str) -> Result<(), NemesisError> {
    run(&["mount", "-t", "tmpfs", "-o", size, "tmpfs", &folder.display().to_string()]).await
}

/// Writes until nothing more fits next to the node's files. Returns the bytes written.
pub(crate) fn fill_disk(folder: &Path) -> Result<u64, NemesisError> {
    let path = folder.join(FILL_FILE);
    let mut file = File::create(&path).map_err(NemesisError::system("fill the disk"))?;
    let mut written = 0;
    // Ends with small pieces, so that not even one record fits.
    for piece in [64 << 10, 4 << 10, 1] {
        let zeros = vec![0u8; piece];
        while let Ok(bytes) = file.write(&zeros) {
            written += bytes as u64;
            if bytes == 0 {
                break;
            }
        }
    }
    Ok(written)
}

/// Frees the space.
pub(crate) fn free_disk(folder: &Path) -> Result<(), NemesisError> {
    std::fs::remove_file(folder.join(FILL_FILE)).map_err(NemesisError::system("free the disk"))
}

/// Returns the file that a node's log was last written to.
pub(crate) fn newest_chunk(folder: &Path) -> Result<PathBuf, NemesisError> {
    let log = folder.join("log");
    let entries = std::fs::read_dir(&log).map_err(NemesisError::system(log.display().to_string()))?;
    let files = entries.flatten().map(|entry| entry.path());
    let chunks = files.filter(|path| path.extension().is_some_and(|extension| extension == "wal"));
    // Preallocated chunks may be empty; names sort by position.
    let written = chunks.filter(|path| path.metadata().is_ok_and(|metadata| metadata.len() > 64));
    let missing = || NemesisError::Answer { who: log.display().to_string(), got: "no log in it".into() };
    written.max().ok_or_else(missing)
}

/// Flips one bit well inside the log. Returns its offset.
pub(crate) fn flip_byte(chunk: &Path) -> Result<u64, NemesisError> {
    let what = || format!("flip a byte of {}", chunk.display());
    let file = File::options().read(true).write(true).open(chunk).map_err(NemesisError::system(what()))?;
    let length = file.metadata().map_err(NemesisError::system(what()))?.len();
    let at = length / 2;
    let mut byte = [0u8];
    file.read_exact_at(&mut byte, at).map_err(NemesisError::system(what()))?;
    file.write_all_at(&[byte[0] ^ 0x10], at).map_err(NemesisError::system(what()))?;
    Ok(at)
}

/// Cuts off a quarter of a file; of a log, that includes acknowledged entries. Returns the new length.
pub(crate) fn cut_quarter(path: &Path) -> Result<u64, NemesisError> {
    let what = || format!("cut {}", path.display());
    let length = path.metadata().map_err(NemesisError::system(what()))?.len();
    cut_tail(path, length / 4)
}

/// Cuts off this many bytes. Returns the new length.
pub(crate) fn cut_tail(path: &Path, bytes: u64) -> Result<u64, NemesisError> {
    let what = || format!("cut {}", path.display());
    let file = File::options().write(true).open(path).map_err(NemesisError::system(what()))?;
    let length = file.metadata().map_err(NemesisError::system(what()))?.len();
    let left = length.saturating_sub(bytes);
    file.set_len(left).map_err(NemesisError::system(what()))?;
    Ok(left)
}
