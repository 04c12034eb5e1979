//! The key index: the work of a checkpoint, done without holding the interpreter's lock.
//!
//! The layout is that of store/key_index.py, which is the specification; the functions here are
//! its two expensive loops.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyByteArrayMethods, PyBytes};

/// The keys of the records of one batch, as hashes, with the log offsets of the records.
#[pyclass(module = "escrowmq_native", frozen)]
pub struct KeyBlock {
    hashes: Vec<u32>,
    log_offsets: Vec<i64>,
    #[pyo3(get)]
    stored_ms: i64,
}

impl KeyBlock {
    pub fn new(hashes: Vec<u32>, log_offsets: Vec<i64>, stored_ms: i64) -> KeyBlock {
        KeyBlock {
            hashes,
            log_offsets,
            stored_ms,
        }
    }
}

#[pymethods]
impl KeyBlock {
    fn __len__(&self) -> usize {
        self.hashes.len()
    }

    /// Return the log offsets of the records that may have a key with this hash, newest first.
    fn find(&self, hash: u32) -> Vec<i64> {
        let keys = self.hashes.iter().zip(&self.log_offsets);
        let mut found: Vec<i64> = keys
            .filter(|(own, _)| **own == hash)
            .map(|(_, log_offset)| *log_offset)
            .collect();
        found.reverse();
        found
    }

    /// The hashes as 32-bit numbers.
    #[getter]
    fn hashes<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        let bytes: Vec<u8> = self
            .hashes
            .iter()
            .flat_map(|hash| hash.to_ne_bytes())
            .collect();
        PyBytes::new(py, &bytes)
    }

    /// The log offsets as 64-bit numbers.
    #[getter]
    fn log_offsets<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        let bytes: Vec<u8> = self
            .log_offsets
            .iter()
            .flat_map(|offset| offset.to_ne_bytes())
            .collect();
        PyBytes::new(py, &bytes)
    }
}

const SLOT_BYTES: usize = 4;

/// Link new entries into the hash table of an index file.
///
/// `hashes` and `seconds` are 32-bit numbers, `log_offsets` 64-bit numbers, one for each entry;
/// entries are numbered from `first`. `slots` are the slots of the file, or nothing if it is new.
///
/// Returns the entries as the file holds them, the changed slots (number of the slot, old and new
/// value, as 32-bit numbers), and how many slots were empty before.
#[pyfunction]
#[pyo3(signature = (hashes, log_offsets, seconds, *, slot_count, first, slots))]
pub fn link_entries<'py>(
    py: Python<'py>,
    hashes: &Bound<'py, PyBytes>,
    log_offsets: &Bound<'py, PyBytes>,
    seconds: &Bound<'py, PyBytes>,
    slot_count: u32,
    first: u32,
    slots: &Bound<'py, PyBytes>,
) -> PyResult<(Bound<'py, PyBytes>, Bound<'py, PyBytes>, usize)> {
    let (hashes, log_offsets) = (hashes.as_bytes(), log_offsets.as_bytes());
    let (seconds, slots) = (seconds.as_bytes(), slots.as_bytes());
    let count = hashes.len() / 4;
    let slots_bytes = slot_count as usize * SLOT_BYTES;
    if slot_count == 0
        || hashes.len() != 4 * count
        || log_offsets.len() != 8 * count
        || seconds.len() != 4 * count
        || !(slots.is_empty() || slots.len() == slots_bytes)
    {
        return Err(PyValueError::new_err("the columns have different lengths"));
    }
    let (entries, changes, new_slots) = py.detach(|| {
        link(
            &u32_column(hashes),
            &u64_column(log_offsets),
            &u32_column(seconds),
            slot_count,
            first,
            slots,
        )
    });
    Ok((
        PyBytes::new(py, &entries),
        PyBytes::new(py, &changes),
        new_slots,
    ))
}

fn u32_column(bytes: &[u8]) -> Vec<u32> {
    bytes
        .as_chunks()
        .0
        .iter()
        .map(|chunk| u32::from_ne_bytes(*chunk))
        .collect()
}

fn u64_column(bytes: &[u8]) -> Vec<u64> {
    bytes
        .as_chunks()
        .0
        .iter()
        .map(|chunk| u64::from_ne_bytes(*chunk))
        .collect()
}

fn link(
    hashes: &[u32],
    log_offsets: &[u64],
    seconds: &[u32],
    slot_count: u32,
    first: u32,
    slots: &[u8],
) -> (Vec<u8>, Vec<u8>, usize) {
    let mut entries = Vec::with_capacity(20 * hashes.len());
    let mut changed: HashMap<u32, (u32, u32)> = HashMap::with_capacity(hashes.len());
    let mut new_slots = 0;
    for (index, hash) in hashes.iter().enumerate() {
        let (slot, number) = (hash % slot_count, first + index as u32);
        let previous = match changed.entry(slot) {
            Entry::Occupied(mut entry) => std::mem::replace(&mut entry.get_mut().1, number),
            Entry::Vacant(entry) => {
                let old = slot_value(slots, slot, first);
                new_slots += usize::from(old == 0);
                entry.insert((old, number));
                old
            }
        };
        entries.extend_from_slice(&hash.to_be_bytes());
        entries.extend_from_slice(&log_offsets[index].to_be_bytes());
        entries.extend_from_slice(&seconds[index].to_be_bytes());
        entries.extend_from_slice(&previous.to_be_bytes());
    }
    let mut changes = Vec::with_capacity(12 * changed.len());
    for (slot, (old, new)) in changed {
        for value in [slot, old, new] {
            changes.extend_from_slice(&value.to_ne_bytes());
        }
    }
    (entries, changes, new_slots)
}

/// Return what the file holds in a slot. A number that no entry has counts as none.
fn slot_value(slots: &[u8], slot: u32, count: u32) -> u32 {
    let begin = slot as usize * SLOT_BYTES;
    let value = slots.get(begin..begin + SLOT_BYTES).map_or(0, |bytes| {
        u32::from_be_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
    });
    if value < count { value } else { 0 }
}

/// Write words (position, value, both big-endian) into content that begins at a position.
///
/// Words outside of the content are left out.
#[pyfunction]
pub fn merge_words(content: &Bound<'_, PyByteArray>, begin: usize, words: &Bound<'_, PyBytes>) {
    let words = words.as_bytes();
    // SAFETY: the interpreter's lock is held and no Python code runs while the slice is used, so
    // nobody else reads, writes or resizes the bytearray.
    let content = unsafe { content.as_bytes_mut() };
    let (words, _) = words.as_chunks::<8>();
    for word in words {
        let position = u32::from_be_bytes([word[0], word[1], word[2], word[3]]) as usize;
        if let Some(offset) = position.checked_sub(begin)
            && let Some(target) = content.get_mut(offset..offset + 4)
        {
            target.copy_from_slice(&word[4..]);
        }
    }
}
