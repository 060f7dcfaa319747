//! Byte stream in checksummed frames. A reader finds damage at its frame and buffers at most one frame.
//!
//! A frame: length of the payload (4 bytes, little endian), xxh3-64 of the payload seeded with the frame's number and
//! length (8), payload. A frame without payload ends the stream, so that a truncated stream is detected.

use std::io::{self, Read, Write};

use xxhash_rust::xxh3::xxh3_64_with_seed;

pub(crate) const PAYLOAD: usize = 256 << 10;
const HEADER: usize = 12;

fn checksum(number: u64, payload: &[u8]) -> u64 {
    xxh3_64_with_seed(payload, number << 32 ^ payload.len() as u64)
}

pub(crate) struct FrameWriter<W> {
    to: W,
    number: u64,
    payload: Vec<u8>,
}

impl<W: Write> FrameWriter<W> {
    pub(crate) fn new(to: W) -> Self {
        Self { to, number: 0, payload: Vec::with_capacity(PAYLOAD) }
    }

    /// Ends the current frame; does nothing if it has no payload.
    pub(crate) fn end_frame(&mut self) -> io::Result<()> {
        if self.payload.is_empty() { Ok(()) } else { self.emit() }
    }

    pub(crate) fn end(mut self) -> io::Result<W> {
        self.end_frame()?;
        self.emit()?;
        Ok(self.to)
    }

    fn emit(&mut self) -> io::Result<()> {
        let length = u32::try_from(self.payload.len()).map_err(io::Error::other)?;
        self.to.write_all(&length.to_le_bytes())?;
        self.to.write_all(&checksum(self.number, &self.payload).to_le_bytes())?;
        self.to.write_all(&self.payload)?;
        self.number += 1;
        self.payload.clear();
        Ok(())
    }
}

impl<W: Write> Write for FrameWriter<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let copied = bytes.len().min(PAYLOAD - self.payload.len());
        self.payload.extend_from_slice(&bytes[..copied]);
        if self.payload.len() == PAYLOAD {
            self.emit()?;
        }
        Ok(copied)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.to.flush()
    }
}

/// Reads frames, and returns no byte of a frame before its checksum is verified.
pub(crate) struct FrameReader<R> {
    from: R,
    number: u64,
    payload: Vec<u8>,
    read: usize,
    /// Offset of the next frame in the file.
    at: u64,
    is_finished: bool,
    damage: Option<String>,
}

impl<R: Read> FrameReader<R> {
    /// Creates a reader of `from`, which is positioned at offset `at` of its file.
    pub(crate) fn new(from: R, at: u64) -> Self {
        Self { from, number: 0, payload: Vec::new(), read: 0, at, is_finished: false, damage: None }
    }

    /// Returns position and kind of the damage, if any was found.
    pub(crate) fn take_damage(&mut self) -> Option<String> {
        self.damage.take()
    }

    /// Returns the offset of the next frame.
    pub(crate) fn at(&self) -> u64 {
        self.at
    }

    /// Returns the next frame's whole payload; empty at the end of the stream.
    pub(crate) fn frame(&mut self) -> io::Result<&[u8]> {
        if self.read == self.payload.len() {
            self.next()?;
        }
        let rest = std::mem::replace(&mut self.read, self.payload.len());
        Ok(&self.payload[rest..])
    }

    /// Reads to the end of the stream, which must be the end of the file.
    pub(crate) fn finish(&mut self) -> io::Result<()> {
        if self.read < self.payload.len()
            || !self.is_finished && {
                self.next()?;
                !self.is_finished
            }
        {
            return Err(self.note_damage("its content ends before it does".into()));
        }
        match self.from.read(&mut [0])? {
            0 => Ok(()),
            _ => Err(self.note_damage("more follows where it ends".into())),
        }
    }

    fn next(&mut self) -> io::Result<()> {
        if self.is_finished {
            return Ok(());
        }
        let mut header = [0; HEADER];
        self.read_whole(|from| from.read_exact(&mut header))?;
        let (length, expected) = header.split_at(4);
        let length = u32::from_le_bytes(length.try_into().expect("split at 4")) as usize;
        if length > PAYLOAD {
            return Err(self.note_damage(format!("a frame of {length} bytes")));
        }
        let mut payload = std::mem::take(&mut self.payload);
        payload.resize(length, 0);
        self.read_whole(|from| from.read_exact(&mut payload))?;
        if checksum(self.number, &payload).to_le_bytes() != *expected {
            return Err(self.note_damage(format!("the checksum of these {} bytes is wrong", HEADER + length)));
        }
        (self.payload, self.read, self.is_finished) = (payload, 0, length == 0);
        self.number += 1;
        self.at += (HEADER + length) as u64;
        Ok(())
    }

    fn read_whole(&mut self, read: impl FnOnce(&mut R) -> io::Result<()>) -> io::Result<()> {
        read(&mut self.from).map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => self.note_damage("the file ends there".into()),
            _ => error,
        })
    }

    fn note_damage(&mut self, how: String) -> io::Error {
        let damage = format!("at offset {}: {how}", self.at);
        self.damage = Some(damage.clone());
        io::Error::new(io::ErrorKind::InvalidData, damage)
    }
}

impl<R: Read> Read for FrameReader<R> {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        if self.read == self.payload.len() {
            self.next()?;
        }
        let copied = to.len().min(self.payload.len() - self.read);
        to[..copied].copy_from_slice(&self.payload[self.read..self.read + copied]);
        self.read += copied;
        Ok(copied)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frames_of(content: &[u8]) -> Vec<u8> {
        let mut writer = FrameWriter::new(Vec::new());
        writer.write_all(b"head").unwrap();
        writer.end_frame().unwrap();
        writer.write_all(content).unwrap();
        writer.end().unwrap()
    }

    fn read(file: &[u8]) -> io::Result<Vec<u8>> {
        let mut reader = FrameReader::new(file, 0);
        assert_eq!(reader.frame()?, b"head");
        let mut content = Vec::new();
        reader.read_to_end(&mut content)?;
        reader.finish()?;
        Ok(content)
    }

    #[test]
    fn frames_round_trip_at_any_length() {
        for length in [0, 1, PAYLOAD - 1, PAYLOAD, PAYLOAD + 1, 3 * PAYLOAD] {
            let content: Vec<u8> = (0..length).map(|n| (n % 251) as u8).collect();
            assert!(read(&frames_of(&content)).unwrap() == content, "{length} bytes");
        }
    }

    #[test]
    fn every_flipped_bit_truncation_or_addition_is_reported_with_its_offset() {
        let good = frames_of(&[7; 40]);
        for at in 0..good.len() {
            for bit in 0..8 {
                let mut bad = good.clone();
                bad[at] ^= 1 << bit;
                let error = read(&bad).unwrap_err().to_string();
                assert!(error.starts_with("at offset "), "bit {bit} of byte {at}: {error}");
            }
            assert!(read(&good[..at]).unwrap_err().to_string().starts_with("at offset "), "cut at {at}");
        }
        let more = [&good[..], &[0]].concat();
        assert!(read(&more).unwrap_err().to_string().contains("more follows"));
    }

    #[test]
    fn reordered_or_missing_frames_are_detected() {
        let mut writer = FrameWriter::new(Vec::new());
        writer.write_all(&[1; PAYLOAD * 2]).unwrap();
        let good = writer.end().unwrap();
        let frame = HEADER + PAYLOAD;
        let swapped = [&good[frame..2 * frame], &good[..frame], &good[2 * frame..]].concat();
        let missing = [&good[..frame], &good[2 * frame..]].concat();
        for bad in [swapped, missing] {
            assert!(FrameReader::new(&bad[..], 0).read_to_end(&mut Vec::new()).is_err());
        }
    }
}
