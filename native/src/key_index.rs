//! The key index: the work of a checkpoint, done without holding the interpreter's lock.
//!
//! The layout is that of store/key_index.py, which is the specification; the functions here are
//! its two expensive loops.

use hashbrown::hash_map::Entry;

use hashbrown::HashMap;
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

const HEADER_BYTES: u32 = 40;
const SLOT_BYTES: usize = 4;
const SLOTS_PER_SUM: u32 = 1024;
const SECONDS_MAX: i64 = 0x7FFF_FFFF;

/// What new entries change in an index file, see `link_entries`.
#[pyclass(module = "escrowmq_native", get_all)]
pub struct LinkedEntries {
    /// The entries as the file holds them.
    entries: Vec<u8>,
    /// The changed slots in ascending order: position 4, value 4, both big-endian.
    words: Vec<u8>,
    /// By how much the sums of pages of slots change: number of the page, difference.
    sum_changes: Vec<(u32, i64)>,
    /// How many slots were empty before.
    new_slots: usize,
}

/// Link new entries into the hash table of an index file.
///
/// The columns have an item for each entry: `hashes` 32-bit numbers, `log_offsets` and `stored_ms`
/// 64-bit numbers. Entries are numbered from `first`. `slots` are the slots of the file, or nothing
/// if it is new. `begin_ms` is the stored time of the first entry of the file.
#[pyfunction]
#[pyo3(signature = (hashes, log_offsets, stored_ms, *, begin_ms, slot_count, first, slots))]
#[allow(clippy::too_many_arguments)] // they are named
pub fn link_entries<'py>(
    py: Python<'py>,
    hashes: &Bound<'py, PyBytes>,
    log_offsets: &Bound<'py, PyBytes>,
    stored_ms: &Bound<'py, PyBytes>,
    begin_ms: i64,
    slot_count: u32,
    first: u32,
    slots: &Bound<'py, PyBytes>,
) -> PyResult<LinkedEntries> {
    let hashes = hashes.as_bytes().as_chunks();
    let log_offsets = log_offsets.as_bytes().as_chunks();
    let stored_ms = stored_ms.as_bytes().as_chunks();
    let slots = slots.as_bytes();
    let count = hashes.0.len();
    let has_remainder = [hashes.1, log_offsets.1, stored_ms.1]
        .iter()
        .any(|rest| !rest.is_empty());
    if has_remainder
        || slot_count == 0
        || log_offsets.0.len() != count
        || stored_ms.0.len() != count
        || !(slots.is_empty() || slots.len() == slot_count as usize * SLOT_BYTES)
    {
        return Err(PyValueError::new_err("the columns have different lengths"));
    }
    Ok(py.detach(|| {
        let mut links = Links {
            slots,
            slot_count,
            first,
            changed: HashMap::with_capacity(count),
        };
        let mut entries = Vec::with_capacity(20 * count);
        for (index, hash) in hashes.0.iter().enumerate() {
            let hash = u32::from_ne_bytes(*hash);
            let previous = links.link(hash % slot_count, first + index as u32);
            let stored_ms = i64::from_ne_bytes(stored_ms.0[index]);
            let seconds = ((stored_ms - begin_ms).max(0) / 1000).min(SECONDS_MAX) as u32;
            entries.extend_from_slice(&hash.to_be_bytes());
            entries.extend_from_slice(&u64::from_ne_bytes(log_offsets.0[index]).to_be_bytes());
            entries.extend_from_slice(&seconds.to_be_bytes());
            entries.extend_from_slice(&previous.to_be_bytes());
        }
        links.finish(entries)
    }))
}

/// The slots that new entries change: what each held, and the newest entry.
struct Links<'a> {
    slots: &'a [u8],
    slot_count: u32,
    first: u32,
    changed: HashMap<u32, (u32, u32)>,
}

impl Links<'_> {
    /// Let a slot hold a new entry. Return the entry that it held before.
    fn link(&mut self, slot: u32, number: u32) -> u32 {
        let held = self.held(slot);
        match self.changed.entry(slot) {
            Entry::Occupied(mut entry) => std::mem::replace(&mut entry.get_mut().1, number),
            Entry::Vacant(entry) => {
                entry.insert((held, number));
                held
            }
        }
    }

    /// Return what the file holds in a slot. A number that no entry has counts as none.
    fn held(&self, slot: u32) -> u32 {
        debug_assert!(slot < self.slot_count);
        let begin = slot as usize * SLOT_BYTES;
        let bytes = self.slots.get(begin..begin + SLOT_BYTES);
        let value = bytes.map_or(0, |b| u32::from_be_bytes([b[0], b[1], b[2], b[3]]));
        if value < self.first { value } else { 0 }
    }

    fn finish(self, entries: Vec<u8>) -> LinkedEntries {
        let mut changed: Vec<(u32, (u32, u32))> = self.changed.into_iter().collect();
        changed.sort_unstable();
        let mut words = Vec::with_capacity(8 * changed.len());
        let mut sum_changes: Vec<(u32, i64)> = Vec::new();
        let mut new_slots = 0;
        for (slot, (held, newest)) in changed {
            words.extend_from_slice(&(HEADER_BYTES + slot * SLOT_BYTES as u32).to_be_bytes());
            words.extend_from_slice(&newest.to_be_bytes());
            new_slots += usize::from(held == 0);
            let (page, change) = (slot / SLOTS_PER_SUM, i64::from(newest) - i64::from(held));
            match sum_changes.last_mut() {
                Some((last, sum)) if *last == page => *sum += change,
                _ => sum_changes.push((page, change)),
            }
        }
        LinkedEntries {
            entries,
            words,
            sum_changes,
            new_slots,
        }
    }
}

/// Begin and end of a part of a file, and the words in it.
type WordsPart<'py> = (u32, u32, Bound<'py, PyBytes>);

/// Decide which parts of a file to rewrite for words (position 4, value 4, big-endian).
///
/// If the words are on average not farther apart than `dense_bytes`, it is one part with all of
/// them. Otherwise it is each page that has some.
#[pyfunction]
pub fn plan_words<'py>(
    py: Python<'py>,
    words: &Bound<'py, PyBytes>,
    page_bytes: u32,
    dense_bytes: u32,
) -> Vec<WordsPart<'py>> {
    let mut words = words.as_bytes().as_chunks::<8>().0.to_vec();
    words.sort_unstable();
    let (Some(first), Some(last)) = (words.first(), words.last()) else {
        return Vec::new();
    };
    let (begin, end) = (position(first), position(last) + SLOT_BYTES as u32);
    if u64::from(end - begin) <= words.len() as u64 * u64::from(dense_bytes) {
        return vec![(begin, end, PyBytes::new(py, words.as_flattened()))];
    }
    let page = |word: &[u8; 8]| position(word) / page_bytes.max(1);
    words
        .chunk_by(|first, second| page(first) == page(second))
        .map(|part| {
            let begin = page(&part[0]) * page_bytes;
            (
                begin,
                begin + page_bytes,
                PyBytes::new(py, part.as_flattened()),
            )
        })
        .collect()
}

fn position(word: &[u8; 8]) -> u32 {
    u32::from_be_bytes([word[0], word[1], word[2], word[3]])
}

/// Write words (position 4, value 4, big-endian) into content that begins at a position.
///
/// Words outside of the content are left out.
#[pyfunction]
pub fn merge_words(content: &Bound<'_, PyByteArray>, begin: u32, words: &Bound<'_, PyBytes>) {
    let (words, _) = words.as_bytes().as_chunks::<8>();
    // SAFETY: the interpreter's lock is held and no Python code runs while the slice is used, so
    // nobody else reads, writes or resizes the bytearray.
    let content = unsafe { content.as_bytes_mut() };
    for word in words {
        if let Some(offset) = position(word).checked_sub(begin)
            && let Some(target) = content.get_mut(offset as usize..offset as usize + SLOT_BYTES)
        {
            target.copy_from_slice(&word[4..]);
        }
    }
}
