//! Half messages that are not decided, and the table that finds them.
//!
//! `Half` and `HalfTable` have the attributes and methods of their twins in escrow/half_table.py;
//! tests/contract/test_half_table.py runs one suite on both. A half is an object of its own, so
//! that Python can keep and change one exactly as it does with its twin.

use std::collections::VecDeque;
use std::hash::BuildHasher;
use std::sync::Arc;

use hashbrown::{DefaultHashBuilder, HashMap, HashTable};
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::PyKeyError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyString, PyTuple};

use crate::offset_map::OffsetMap;
use crate::restore::{self, RecordWindow};

/// A unique key. Those of all known clients fit into the short form.
enum Key {
    Short {
        bytes: [u8; Key::SHORT_BYTES],
        length: u8,
    },
    Long(Box<[u8]>),
}

impl Key {
    const SHORT_BYTES: usize = 38;

    fn new(key: &[u8]) -> Key {
        if key.len() > Key::SHORT_BYTES {
            return Key::Long(key.into());
        }
        let mut bytes = [0; Key::SHORT_BYTES];
        bytes[..key.len()].copy_from_slice(key);
        Key::Short {
            bytes,
            length: key.len() as u8,
        }
    }

    fn as_bytes(&self) -> &[u8] {
        match self {
            Key::Short { bytes, length } => &bytes[..usize::from(*length)],
            Key::Long(bytes) => bytes,
        }
    }
}

/// The name of a topic or a group. A million halves share one.
pub struct Name {
    pub text: Box<str>,
    object: Py<PyString>,
}

impl Name {
    pub fn new(py: Python<'_>, text: &str) -> Arc<Name> {
        Arc::new(Name {
            text: text.into(),
            object: PyString::new(py, text).unbind(),
        })
    }

    pub fn object(&self, py: Python<'_>) -> Py<PyString> {
        self.object.clone_ref(py)
    }
}

/// What few halves have.
#[derive(Default)]
struct RareFields {
    reason: Option<Py<PyString>>,
    last_remark: Option<Py<PyString>>,
    previous_offsets: Option<Py<PyTuple>>,
    attempt: Option<Py<PyAny>>,
}

/// A half message that is not decided: open or stranded.
#[pyclass(module = "escrowmq_native")]
pub struct Half {
    #[pyo3(get, set)]
    pub queue_offset: i64,
    #[pyo3(get, set)]
    pub log_offset: i64,
    #[pyo3(get, set)]
    pub size: u32,
    #[pyo3(get, set)]
    pub queue_id: i32,
    pub topic: Arc<Name>,
    pub group: Arc<Name>,
    key: Key,
    #[pyo3(get, set)]
    pub parked_ms: i64,
    #[pyo3(get, set)]
    pub due_ms: i64,
    #[pyo3(get, set)]
    producer: Option<Py<PyAny>>,
    #[pyo3(get, set)]
    checks: u32,
    #[pyo3(get, set)]
    unknown_answers: u32,
    #[pyo3(get, set)]
    is_stranded: bool,
    #[pyo3(get, set)]
    pub is_being_decided: bool,
    /// The properties of the half begin with those of the final, so many bytes; 0 if not known.
    #[pyo3(get, set)]
    pub final_properties_bytes: u16,
    rare: Option<Box<RareFields>>,
}

impl Half {
    /// Return whether the plain path may decide it.
    pub fn is_plain(&self) -> bool {
        let is_special = self.is_stranded || self.is_being_decided || self.rare.is_some();
        self.final_properties_bytes > 0 && !is_special
    }

    pub fn key_bytes(&self) -> &[u8] {
        self.key.as_bytes()
    }

    fn triple(&self) -> Triple<'_> {
        (&self.group.text, &self.topic.text, self.key.as_bytes())
    }

    fn rare(&mut self) -> &mut RareFields {
        self.rare.get_or_insert_default()
    }

    /// Return a half without offsets and size.
    pub fn parked(
        topic: Arc<Name>,
        queue_id: i32,
        group: Arc<Name>,
        key: &[u8],
        parked_ms: i64,
        due_ms: i64,
        producer: Option<Py<PyAny>>,
    ) -> Half {
        Half {
            queue_offset: 0,
            log_offset: 0,
            size: 0,
            queue_id,
            topic,
            group,
            key: Key::new(key),
            parked_ms,
            due_ms,
            producer,
            checks: 0,
            unknown_answers: 0,
            is_stranded: false,
            is_being_decided: false,
            final_properties_bytes: 0,
            rare: None,
        }
    }
}

#[pymethods]
impl Half {
    #[getter]
    fn topic(&self, py: Python<'_>) -> Py<PyString> {
        self.topic.object.clone_ref(py)
    }

    #[getter]
    fn group(&self, py: Python<'_>) -> Py<PyString> {
        self.group.object.clone_ref(py)
    }

    #[getter]
    fn key<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, self.key.as_bytes())
    }

    #[getter]
    fn reason(&self, py: Python<'_>) -> Py<PyString> {
        text(py, self.rare.as_ref().and_then(|rare| rare.reason.as_ref()))
    }

    #[setter]
    fn set_reason(&mut self, py: Python<'_>, reason: Py<PyString>) -> PyResult<()> {
        // An empty reason does not make a half a rare one.
        if self.rare.is_some() || reason.bind(py).len()? > 0 {
            self.rare().reason = Some(reason);
        }
        Ok(())
    }

    #[getter]
    fn last_remark(&self, py: Python<'_>) -> Py<PyString> {
        text(
            py,
            self.rare
                .as_ref()
                .and_then(|rare| rare.last_remark.as_ref()),
        )
    }

    #[setter]
    fn set_last_remark(&mut self, py: Python<'_>, remark: Py<PyString>) -> PyResult<()> {
        if self.rare.is_some() || remark.bind(py).len()? > 0 {
            self.rare().last_remark = Some(remark);
        }
        Ok(())
    }

    #[getter]
    fn previous_offsets(&self, py: Python<'_>) -> Py<PyTuple> {
        match self
            .rare
            .as_ref()
            .and_then(|rare| rare.previous_offsets.as_ref())
        {
            Some(offsets) => offsets.clone_ref(py),
            None => PyTuple::empty(py).unbind(),
        }
    }

    #[setter]
    fn set_previous_offsets(&mut self, py: Python<'_>, offsets: Py<PyTuple>) {
        if self.rare.is_some() || offsets.bind(py).len() > 0 {
            self.rare().previous_offsets = Some(offsets);
        }
    }

    #[getter]
    fn attempt(&self, py: Python<'_>) -> Option<Py<PyAny>> {
        self.rare
            .as_ref()?
            .attempt
            .as_ref()
            .map(|attempt| attempt.clone_ref(py))
    }

    #[setter]
    fn set_attempt(&mut self, attempt: Option<Py<PyAny>>) {
        if self.rare.is_some() || attempt.is_some() {
            self.rare().attempt = attempt;
        }
    }

    #[getter]
    fn group_topic_key<'py>(
        &self,
        py: Python<'py>,
    ) -> (Py<PyString>, Py<PyString>, Bound<'py, PyBytes>) {
        (self.group(py), self.topic(py), self.key(py))
    }

    /// Whether the log could not read it the last time.
    #[getter]
    fn is_unreadable(&self, py: Python<'_>) -> PyResult<bool> {
        Ok(self.reason(py).bind(py).to_str()?.starts_with("unreadable"))
    }
}

fn text(py: Python<'_>, value: Option<&Py<PyString>>) -> Py<PyString> {
    value.map_or_else(|| PyString::new(py, "").unbind(), |text| text.clone_ref(py))
}

/// Group, topic and key: what identifies a transaction on a broker.
pub type Triple<'a> = (&'a str, &'a str, &'a [u8]);

/// How many halves, and how many bytes they have in the log.
#[pyclass(module = "escrowmq_native", frozen, get_all, eq)]
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct HalfTotals {
    pub count: u64,
    pub size: u64,
}

/// A name that halves have, with the totals of these halves.
struct NameTotals {
    name: Arc<Name>,
    totals: HalfTotals,
}

/// The queue of decided halves may be so many times longer than the number of its keys.
const DECIDED_FACTOR_MAX: usize = 4;

/// A half that was decided lately, as far as a repeated send is concerned.
struct DecidedHalf {
    group: Arc<Name>,
    topic: Arc<Name>,
    key: Key,
    queue_offset: i64,
    log_offset: i64,
}

impl DecidedHalf {
    fn triple(&self) -> Triple<'_> {
        (&self.group.text, &self.topic.text, self.key.as_bytes())
    }
}

/// The undecided halves by queue offset and by unique key, and totals by group and topic.
///
/// It also recognises repeated sends, by the keys of halves that are being appended in this turn
/// and of halves that were decided lately.
#[pyclass(module = "escrowmq_native")]
pub struct HalfTable {
    by_offset: OffsetMap<Py<Half>>,
    by_key: HashTable<Py<Half>>,
    reserved: HashTable<Py<Half>>,
    decided: VecDeque<DecidedHalf>,
    decided_index: HashTable<u64>, // the number of each, counted from the first one ever
    decided_dropped: u64,          // the number of the first that is still there
    decided_max: usize,
    groups: HashMap<Box<str>, NameTotals>,
    topics: HashMap<Box<str>, NameTotals>,
    total: HalfTotals,
    #[pyo3(get)]
    stranded_count: u64,
    // With a random key: clients choose keys, and must not be able to make them collide.
    hasher: DefaultHashBuilder,
}

impl HalfTable {
    pub fn total(&self) -> HalfTotals {
        self.total
    }

    pub fn totals_of(&self, group: &str) -> HalfTotals {
        self.groups
            .get(group)
            .map_or_else(HalfTotals::default, |entry| entry.totals)
    }

    /// Return the name of a group. Undecided halves of one group share it.
    pub fn group_name(&self, py: Python<'_>, group: &str) -> Arc<Name> {
        self.groups
            .get(group)
            .map_or_else(|| Name::new(py, group), |entry| entry.name.clone())
    }

    /// Return the name of a topic. Undecided halves of one topic share it.
    pub fn topic_name(&self, py: Python<'_>, topic: &str) -> Arc<Name> {
        self.topics
            .get(topic)
            .map_or_else(|| Name::new(py, topic), |entry| entry.name.clone())
    }

    pub fn get(&self, queue_offset: i64) -> Option<&Py<Half>> {
        self.by_offset.get(queue_offset)
    }

    /// Return whether a half with this group, topic and key is known, or is being appended.
    pub fn knows(&self, py: Python<'_>, triple: Triple) -> bool {
        let hash = self.hasher.hash_one(triple);
        self.reserved
            .find(hash, |half| half.borrow(py).triple() == triple)
            .is_some()
            || self.position(py, hash, triple).is_some()
    }

    fn position(&self, py: Python<'_>, hash: u64, triple: Triple) -> Option<(i64, i64)> {
        if let Some(half) = self
            .by_key
            .find(hash, |half| half.borrow(py).triple() == triple)
        {
            let half = half.borrow(py);
            return Some((half.queue_offset, half.log_offset));
        }
        let number = self
            .decided_index
            .find(hash, |number| self.decided(*number).triple() == triple)?;
        let decided = self.decided(*number);
        Some((decided.queue_offset, decided.log_offset))
    }

    fn decided(&self, number: u64) -> &DecidedHalf {
        &self.decided[(number - self.decided_dropped) as usize]
    }

    /// Reserve the key of a half that is about to be appended.
    pub fn reserve_new(&mut self, py: Python<'_>, half: Py<Half>) {
        let hasher = &self.hasher;
        let hash = hasher.hash_one(half.borrow(py).triple());
        self.reserved
            .insert_unique(hash, half, |half| hasher.hash_one(half.borrow(py).triple()));
    }

    fn remember(&mut self, half: &Half) {
        if half.key_bytes().is_empty() || self.decided_max == 0 {
            return;
        }
        let hash = self.hasher.hash_one(half.triple());
        // A key that was remembered before counts from now on.
        let found = self
            .decided_index
            .find_entry(hash, |number| {
                self.decided[(*number - self.decided_dropped) as usize].triple() == half.triple()
            })
            .ok();
        if let Some(entry) = found {
            entry.remove();
        }
        // Those that were remembered again are in the queue twice, and only the index tells.
        while self.decided_index.len() >= self.decided_max
            || self.decided.len() >= DECIDED_FACTOR_MAX * self.decided_max
        {
            self.drop_oldest_decided();
        }
        let number = self.decided_dropped + self.decided.len() as u64;
        self.decided.push_back(DecidedHalf {
            group: half.group.clone(),
            topic: half.topic.clone(),
            key: Key::new(half.key_bytes()),
            queue_offset: half.queue_offset,
            log_offset: half.log_offset,
        });
        let (decided, dropped, hasher) = (&self.decided, self.decided_dropped, &self.hasher);
        self.decided_index.insert_unique(hash, number, |number| {
            hasher.hash_one(decided[(*number - dropped) as usize].triple())
        });
    }

    fn drop_oldest_decided(&mut self) {
        let Some(oldest) = self.decided.front() else {
            return;
        };
        let (hash, number) = (self.hasher.hash_one(oldest.triple()), self.decided_dropped);
        if let Ok(entry) = self
            .decided_index
            .find_entry(hash, |candidate| *candidate == number)
        {
            entry.remove();
        }
        self.decided.pop_front();
        self.decided_dropped += 1;
    }

    fn count(&mut self, half: &Half, is_added: bool) {
        let size = u64::from(half.size);
        update(&mut self.total, size, is_added);
        for (names, name) in [
            (&mut self.groups, &half.group),
            (&mut self.topics, &half.topic),
        ] {
            // A name is looked up for every half, and allocated only for the first one.
            let entry = match names.get_mut(&*name.text) {
                Some(entry) => entry,
                None => names.entry(name.text.clone()).or_insert(NameTotals {
                    name: name.clone(),
                    totals: HalfTotals::default(),
                }),
            };
            update(&mut entry.totals, size, is_added);
            if entry.totals.count == 0 {
                names.remove(&*name.text);
            }
        }
    }

    /// Add a half that is stored. Its key is not reserved any more.
    pub fn add_half(&mut self, py: Python<'_>, half: Py<Half>) {
        let mut added = half.borrow_mut(py);
        let hash = self.hasher.hash_one(added.triple());
        self.unreserve(py, hash, &added);
        if let Some(entry) = self.groups.get(&*added.group.text) {
            added.group = entry.name.clone();
        }
        if let Some(entry) = self.topics.get(&*added.topic.text) {
            added.topic = entry.name.clone();
        }
        self.stranded_count += u64::from(added.is_stranded);
        self.count(&added, true);
        drop(added);
        let added = half.borrow(py);
        if !added.key_bytes().is_empty() {
            let hasher = &self.hasher;
            // Of several with one key, which only RocketMQ writes, the last one is found.
            let same = |known: &Py<Half>| known.borrow(py).triple() == added.triple();
            match self.by_key.find_entry(hash, same) {
                Ok(mut entry) => *entry.get_mut() = half.clone_ref(py),
                Err(_) => {
                    self.by_key
                        .insert_unique(hash, half.clone_ref(py), |known| {
                            hasher.hash_one(known.borrow(py).triple())
                        });
                }
            }
        }
        let queue_offset = added.queue_offset;
        drop(added);
        self.by_offset.insert(queue_offset, half);
    }

    fn unreserve(&mut self, py: Python<'_>, hash: u64, half: &Half) {
        // The half itself may be the one that is reserved, and is borrowed by the caller.
        let is_same = |known: &Py<Half>| match known.try_borrow(py) {
            Ok(known) => known.triple() == half.triple(),
            Err(_) => true,
        };
        if let Ok(entry) = self.reserved.find_entry(hash, is_same) {
            entry.remove();
        }
    }

    /// Remove an undecided half. Return whether it was there.
    pub fn remove_half(&mut self, py: Python<'_>, half: &Py<Half>) -> bool {
        let removed = half.borrow(py);
        if self.by_offset.remove(removed.queue_offset).is_none() {
            return false;
        }
        self.stranded_count -= u64::from(removed.is_stranded);
        let hash = self.hasher.hash_one(removed.triple());
        let same = |known: &Py<Half>| known.borrow(py).queue_offset == removed.queue_offset;
        if let Ok(entry) = self.by_key.find_entry(hash, same) {
            entry.remove();
        }
        self.count(&removed, false);
        true
    }

    /// Remove a half that is decided, and remember its key for a while.
    pub fn close_half(&mut self, py: Python<'_>, half: &Py<Half>) -> bool {
        if !self.remove_half(py, half) {
            return false;
        }
        self.remember(&half.borrow(py));
        true
    }
}

fn update(totals: &mut HalfTotals, size: u64, is_added: bool) {
    if is_added {
        totals.count += 1;
        totals.size += size;
    } else {
        totals.count -= 1;
        totals.size -= size;
    }
}

#[pymethods]
impl HalfTable {
    #[new]
    #[pyo3(signature = (*, decided_max))]
    fn new(decided_max: usize) -> HalfTable {
        HalfTable {
            by_offset: OffsetMap::new(),
            by_key: HashTable::new(),
            reserved: HashTable::new(),
            decided: VecDeque::new(),
            decided_index: HashTable::new(),
            decided_dropped: 0,
            decided_max,
            groups: HashMap::new(),
            topics: HashMap::new(),
            total: HalfTotals::default(),
            stranded_count: 0,
            hasher: DefaultHashBuilder::default(),
        }
    }

    fn __len__(&self) -> usize {
        self.by_offset.len()
    }

    /// Iterate over the halves in the order of the log. Halves may be removed meanwhile.
    fn __iter__(slf: Bound<'_, Self>) -> HalfIterator {
        HalfIterator {
            table: slf.unbind(),
            next_offset: Some(i64::MIN),
        }
    }

    #[allow(clippy::too_many_arguments)] // the fields of a half, in their order
    fn new_half(
        &self,
        py: Python<'_>,
        topic: &str,
        queue_id: i32,
        group: &str,
        key: &[u8],
        parked_ms: i64,
        due_ms: i64,
        producer: Option<Py<PyAny>>,
    ) -> Half {
        let (topic, group) = (self.topic_name(py, topic), self.group_name(py, group));
        Half::parked(topic, queue_id, group, key, parked_ms, due_ms, producer)
    }

    fn reserve(&mut self, py: Python<'_>, half: Py<Half>) -> bool {
        if self.knows(py, half.borrow(py).triple()) {
            return false;
        }
        self.reserve_new(py, half);
        true
    }

    pub fn release(&mut self, py: Python<'_>, half: Py<Half>) {
        let half = half.borrow(py);
        let hash = self.hasher.hash_one(half.triple());
        self.unreserve(py, hash, &half);
    }

    fn add(&mut self, py: Python<'_>, half: Py<Half>) {
        self.add_half(py, half);
    }

    fn restore(
        slf: &Bound<'_, Self>,
        first_offset: i64,
        entries: &[u8],
        data: &[u8],
        data_begin: i64,
        times: &Bound<'_, PyAny>,
    ) -> PyResult<Vec<(i64, usize)>> {
        let window = RecordWindow {
            first_offset,
            entries,
            data,
            data_begin,
        };
        restore::restore(slf, &window, times)
    }

    fn remove(&mut self, py: Python<'_>, half: Py<Half>) -> PyResult<()> {
        let queue_offset = half.borrow(py).queue_offset;
        self.remove_half(py, &half)
            .then_some(())
            .ok_or_else(|| PyKeyError::new_err(queue_offset))
    }

    fn close(&mut self, py: Python<'_>, half: Py<Half>) -> PyResult<()> {
        let queue_offset = half.borrow(py).queue_offset;
        self.close_half(py, &half)
            .then_some(())
            .ok_or_else(|| PyKeyError::new_err(queue_offset))
    }

    fn strand(&mut self, py: Python<'_>, half: Py<Half>) {
        half.borrow_mut(py).is_stranded = true;
        self.stranded_count += 1;
    }

    fn find(&self, py: Python<'_>, queue_offset: i64) -> Option<Py<Half>> {
        self.by_offset
            .get(queue_offset)
            .map(|half| half.clone_ref(py))
    }

    /// Return those of these queue offsets, 64-bit numbers, at which the table has a half.
    fn undecided(&self, queue_offsets: &Bound<'_, PyAny>) -> PyResult<Vec<i64>> {
        if queue_offsets.len()? == 0 {
            return Ok(Vec::new()); // an empty array has no buffer
        }
        let offsets = PyBuffer::<i64>::get(queue_offsets)?.to_vec(queue_offsets.py())?;
        Ok(offsets
            .into_iter()
            .filter(|offset| self.by_offset.get(*offset).is_some())
            .collect())
    }

    fn find_by_key(
        &self,
        py: Python<'_>,
        group: &str,
        topic: &str,
        key: &[u8],
    ) -> Option<Py<Half>> {
        let triple = (group, topic, key);
        let hash = self.hasher.hash_one(triple);
        let found = self
            .by_key
            .find(hash, |half| half.borrow(py).triple() == triple);
        found.map(|half| half.clone_ref(py))
    }

    fn find_duplicate(
        &self,
        py: Python<'_>,
        group: &str,
        topic: &str,
        key: &[u8],
    ) -> Option<(i64, i64)> {
        let triple = (group, topic, key);
        self.position(py, self.hasher.hash_one(triple), triple)
    }

    #[pyo3(signature = (group, topic, key, queue_offset, log_offset))]
    fn remember_decided(
        &mut self,
        py: Python<'_>,
        group: &str,
        topic: &str,
        key: &[u8],
        queue_offset: i64,
        log_offset: i64,
    ) {
        let (group, topic) = (self.group_name(py, group), self.topic_name(py, topic));
        let half = Half::parked(topic, 0, group, key, 0, 0, None);
        self.remember(&Half {
            queue_offset,
            log_offset,
            ..half
        });
    }

    fn oldest(&self, py: Python<'_>) -> Option<Py<Half>> {
        self.by_offset.first().map(|half| half.clone_ref(py))
    }

    fn group_totals(&self, group: &str) -> HalfTotals {
        self.totals_of(group)
    }

    #[getter(total)]
    fn get_total(&self) -> HalfTotals {
        self.total
    }

    /// The number of undecided halves of each topic.
    #[getter]
    fn count_by_topic<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let counts = PyDict::new(py);
        for entry in self.topics.values() {
            counts.set_item(&entry.name.object, entry.totals.count)?;
        }
        Ok(counts)
    }
}

/// Iterates over a table by queue offset, so that changes of the table do no harm.
#[pyclass(module = "escrowmq_native")]
pub struct HalfIterator {
    table: Py<HalfTable>,
    next_offset: Option<i64>,
}

#[pymethods]
impl HalfIterator {
    fn __iter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    fn __next__(&mut self, py: Python<'_>) -> Option<Py<Half>> {
        let table = self.table.borrow(py);
        let (offset, half) = table.by_offset.first_from(self.next_offset?)?;
        self.next_offset = offset.checked_add(1);
        Some(half.clone_ref(py))
    }
}
