//! The bytes that were appended to the log last.
//!
//! Most transactions are committed within milliseconds, and a final is made from the bytes of its
//! half. They are found here; a half that is gone from here is decided by the Python path, which
//! reads it from the disk.

use std::collections::VecDeque;

use pyo3::prelude::*;

use crate::shared_bytes::SharedBytes;

/// The last appended bytes by log offset, up to a limit.
pub struct LogTail {
    appends: VecDeque<(i64, SharedBytes)>,
    bytes: usize,
    bytes_max: usize,
}

impl LogTail {
    pub fn new(bytes_max: usize) -> LogTail {
        LogTail {
            appends: VecDeque::new(),
            bytes: 0,
            bytes_max,
        }
    }

    /// Add what was appended at a log offset. Offsets ascend from call to call.
    pub fn push(&mut self, py: Python<'_>, begin: i64, append: SharedBytes) {
        self.bytes += append.bytes(py).len();
        self.appends.push_back((begin, append));
        while self.bytes > self.bytes_max && self.appends.len() > 1 {
            if let Some((_, dropped)) = self.appends.pop_front() {
                self.bytes -= dropped.bytes(py).len();
            }
        }
    }

    /// Return the append that contains a log offset, and where in it.
    pub fn find_append(&self, py: Python<'_>, log_offset: i64) -> Option<(&SharedBytes, usize)> {
        let index = self
            .appends
            .partition_point(|(begin, _)| *begin <= log_offset)
            .checked_sub(1)?;
        let (begin, append) = &self.appends[index];
        let position = usize::try_from(log_offset - begin).ok()?;
        (position < append.bytes(py).len()).then_some((append, position))
    }

    /// Return the bytes from a log offset to the end of the append that contains it.
    pub fn find<'a>(&'a self, py: Python<'a>, log_offset: i64) -> Option<&'a [u8]> {
        let (append, position) = self.find_append(py, log_offset)?;
        append.bytes(py).get(position..)
    }
}
