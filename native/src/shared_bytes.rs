//! Bytes that this module and Python share without a copy.

use std::ffi::c_int;
use std::ops::Range;
use std::sync::Arc;

use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyMemoryView};

/// Bytes that nobody changes any more, of this module or of Python.
pub enum SharedBytes {
    Native(Arc<Vec<u8>>),
    Python(Py<PyBytes>),
}

impl SharedBytes {
    pub fn bytes<'a>(&'a self, py: Python<'a>) -> &'a [u8] {
        match self {
            SharedBytes::Native(bytes) => bytes,
            SharedBytes::Python(bytes) => bytes.as_bytes(py),
        }
    }

    pub fn clone_ref(&self, py: Python<'_>) -> SharedBytes {
        match self {
            SharedBytes::Native(bytes) => SharedBytes::Native(bytes.clone()),
            SharedBytes::Python(bytes) => SharedBytes::Python(bytes.clone_ref(py)),
        }
    }
}

/// A part of shared bytes.
pub struct Piece {
    bytes: SharedBytes,
    range: Range<usize>,
}

impl Piece {
    /// Panics if the bytes do not have this range.
    pub fn new(py: Python<'_>, bytes: SharedBytes, range: Range<usize>) -> Piece {
        assert!(range.start <= range.end && range.end <= bytes.bytes(py).len());
        Piece { bytes, range }
    }

    pub fn whole(bytes: Vec<u8>) -> Piece {
        let range = 0..bytes.len();
        let bytes = SharedBytes::Native(Arc::new(bytes));
        Piece { bytes, range }
    }

    pub fn len(&self) -> usize {
        self.range.len()
    }

    /// Return a memoryview of these bytes.
    pub fn view<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyMemoryView>> {
        let piece = Piece {
            bytes: self.bytes.clone_ref(py),
            range: self.range.clone(),
        };
        PyMemoryView::from(Bound::new(py, PieceBuffer { piece })?.as_any())
    }
}

/// Return a memoryview of native bytes, not copied.
pub fn shared_view<'py>(
    py: Python<'py>,
    bytes: &Arc<Vec<u8>>,
) -> PyResult<Bound<'py, PyMemoryView>> {
    let piece = Piece {
        bytes: SharedBytes::Native(bytes.clone()),
        range: 0..bytes.len(),
    };
    PyMemoryView::from(Bound::new(py, PieceBuffer { piece })?.as_any())
}

/// What a memoryview of a piece refers to.
#[pyclass(module = "escrowmq_native", frozen)]
pub struct PieceBuffer {
    piece: Piece,
}

#[pymethods]
impl PieceBuffer {
    fn __len__(&self) -> usize {
        self.piece.len()
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
        let piece = &slf.get().piece;
        let bytes = &piece.bytes.bytes(slf.py())[piece.range.clone()];
        // SAFETY: the class is frozen and the bytes are never changed (a vector behind an Arc, or a
        // bytes object), so pointer and length stay valid as long as the object lives. The view
        // gets a reference to the object, which Python releases with the view. The buffer is
        // declared read-only, so nobody writes through it.
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
