//! The bytes that were appended to the log last.
//!
//! Most transactions are committed within milliseconds, and a final is made from the bytes of its
//! half. They are found here; a half that is gone from here is decided by the Python path, which
//! reads it from the disk.

use std::collections::VecDeque;
use std::ffi::c_int;
use std::sync::Arc;

use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

/// Bytes of the log, shared between this module and Python's memoryviews.
#[pyclass(module = "escrowmq_native", frozen)]
pub struct LogBytes {
    pub bytes: Arc<Vec<u8>>,
}

#[pymethods]
impl LogBytes {
    fn __len__(&self) -> usize {
        self.bytes.len()
    }

    /// # Safety
    ///
    /// Python calls this with a valid view to fill in.
    unsafe fn __getbuffer__(
        slf: Bound<'_, Self>,
        view: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        if view.is_null() {
            return Err(PyBufferError::new_err("the view is null"));
        }
        let bytes = &slf.get().bytes;
        // SAFETY: the class is frozen and the vector is never changed, so pointer and length stay
        // valid as long as the object lives. The view gets a reference to the object, which Python
        // releases with the view. The buffer is declared read-only, so nobody writes through it.
        let result = unsafe {
            ffi::PyBuffer_FillInfo(
                view,
                slf.as_ptr(),
                bytes.as_ptr().cast_mut().cast(),
                bytes.len() as ffi::Py_ssize_t,
                1,
                flags,
            )
        };
        if result == 0 {
            Ok(())
        } else {
            Err(PyErr::fetch(slf.py()))
        }
    }

    /// # Safety
    ///
    /// Python calls this with a view that `__getbuffer__` has filled in. There is nothing to free.
    unsafe fn __releasebuffer__(&self, _view: *mut ffi::Py_buffer) {}
}

/// Appended bytes: of a batch of this module, or of Python.
pub enum Append {
    Native(Arc<Vec<u8>>),
    Python(Py<PyBytes>),
}

impl Append {
    fn bytes<'a>(&'a self, py: Python<'a>) -> &'a [u8] {
        match self {
            Append::Native(bytes) => bytes,
            Append::Python(bytes) => bytes.as_bytes(py),
        }
    }
}

/// The last appended bytes by log offset, up to a limit.
pub struct LogTail {
    appends: VecDeque<(i64, Append)>,
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
    pub fn push(&mut self, py: Python<'_>, begin: i64, append: Append) {
        self.bytes += append.bytes(py).len();
        self.appends.push_back((begin, append));
        while self.bytes > self.bytes_max && self.appends.len() > 1 {
            if let Some((_, dropped)) = self.appends.pop_front() {
                self.bytes -= dropped.bytes(py).len();
            }
        }
    }

    /// Return the bytes from a log offset to the end of the append that contains it.
    pub fn find<'a>(&'a self, py: Python<'a>, log_offset: i64) -> Option<&'a [u8]> {
        let index = self
            .appends
            .partition_point(|(begin, _)| *begin <= log_offset)
            .checked_sub(1)?;
        let (begin, append) = &self.appends[index];
        append
            .bytes(py)
            .get(usize::try_from(log_offset - begin).ok()?..)
    }
}
