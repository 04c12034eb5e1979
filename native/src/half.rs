//! Half messages that are not decided, and the table that finds them.
//!
//! `Half` and `HalfTable` have the attributes and methods of their twins in escrow/half_table.py;
//! tests/contract/test_half_table.py runs one suite on both. Python can keep and change a half
//! exactly as it does with its twin, so a half that Python has is an object. The others are rows of
//! the table: an object takes 56 bytes more, is a separate allocation, and the garbage collector
//! visits it, which took 0.1 s for a million of them.

use std::collections::VecDeque;
use std::hash::BuildHasher;
use std::sync::Arc;

use hashbrown::{DefaultHashBuilder, HashMap, HashTable};
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::PyKeyError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyString, PyTuple};

use crate::offset_map::OffsetMap;
use crate::restore::{self, RecordWindow};

/// A unique key. Those of all known clients fit into the short form.
#[derive(Clone)]
pub enum Key {
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

/// A half message that is not decided: open or stranded. It is a row of the table or an object.
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

    pub fn triple(&self) -> Triple<'_> {
        (&self.group.text, &self.topic.text, self.key.as_bytes())
    }

    pub fn identity(&self) -> Identity {
        Identity {
            group: self.group.clone(),
            topic: self.topic.clone(),
            key: self.key.clone(),
        }
    }

    /// Return a copy without the rare fields.
    pub fn copy(&self, py: Python<'_>) -> Half {
        Half {
            topic: self.topic.clone(),
            group: self.group.clone(),
            key: self.key.clone(),
            producer: self.producer.as_ref().map(|peer| peer.clone_ref(py)),
            rare: None,
            ..*self
        }
    }

    /// Move everything to a new half, and leave this one to be dropped.
    fn take(&mut self, py: Python<'_>) -> Half {
        Half {
            rare: self.rare.take(),
            ..self.copy(py)
        }
    }

    fn remark<'a>(&'a self, py: Python<'a>) -> PyResult<&'a str> {
        match self
            .rare
            .as_ref()
            .and_then(|rare| rare.last_remark.as_ref())
        {
            Some(remark) => remark.bind(py).to_str(),
            None => Ok(""),
        }
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

/// What identifies a transaction, with names that are shared.
pub struct Identity {
    group: Arc<Name>,
    topic: Arc<Name>,
    key: Key,
}

impl Identity {
    fn triple(&self) -> Triple<'_> {
        (&self.group.text, &self.topic.text, self.key.as_bytes())
    }
}

/// The queue of decided halves may be so many times longer than the number of its keys.
const DECIDED_FACTOR_MAX: usize = 4;

/// A half that was decided lately, as far as a repeated send is concerned.
struct DecidedHalf {
    identity: Identity,
    queue_offset: i64,
    log_offset: i64,
}

/// An undecided half of the table.
enum Entry {
    Row(Half),
    Object(Py<Half>),
}

impl Entry {
    fn inspect<R>(&self, py: Python<'_>, inspect: impl FnOnce(&Half) -> R) -> R {
        match self {
            Entry::Row(half) => inspect(half),
            Entry::Object(half) => inspect(&half.borrow(py)),
        }
    }

    fn update<R>(&mut self, py: Python<'_>, update: impl FnOnce(&mut Half) -> R) -> R {
        match self {
            Entry::Row(half) => update(half),
            Entry::Object(half) => update(&mut half.borrow_mut(py)),
        }
    }

    fn has_triple(&self, py: Python<'_>, triple: Triple) -> bool {
        self.inspect(py, |half| half.triple() == triple)
    }
}

/// Where the half with a key is. The hash is kept, so that the index can grow without a look at
/// all halves.
struct KeyEntry {
    hash: u64,
    queue_offset: i64,
}

/// So many halves stay objects although Python may not need them any more.
const OBJECTS_MAX: usize = 1024;

/// The undecided halves by queue offset and by unique key, and totals by group and topic.
///
/// It also recognises repeated sends, by the keys of halves that are being appended in this turn
/// and of halves that were decided lately.
#[pyclass(module = "escrowmq_native")]
pub struct HalfTable {
    by_offset: OffsetMap<Entry>,
    by_key: HashTable<KeyEntry>,
    /// Queue offsets of the halves that are objects, the oldest object first.
    objects: VecDeque<i64>,
    reserved: HashTable<Identity>,
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

    /// Return a copy of the half at an offset if the plain path may decide it.
    pub fn plain_half(&self, py: Python<'_>, queue_offset: i64) -> Option<Half> {
        let entry = self.by_offset.get(queue_offset)?;
        entry.inspect(py, |half| half.is_plain().then(|| half.copy(py)))
    }

    pub fn set_being_decided(&mut self, py: Python<'_>, queue_offset: i64, is_being_decided: bool) {
        if let Some(entry) = self.by_offset.get_mut(queue_offset) {
            entry.update(py, |half| half.is_being_decided = is_being_decided);
        }
    }

    /// Return whether a half with this group, topic and key is known, or is being appended.
    pub fn knows(&self, py: Python<'_>, triple: Triple) -> bool {
        let hash = self.hasher.hash_one(triple);
        self.reserved
            .find(hash, |known| known.triple() == triple)
            .is_some()
            || self.position(py, hash, triple).is_some()
    }

    /// Return the queue offset of the undecided half with a key.
    fn offset_of(&self, py: Python<'_>, hash: u64, triple: Triple) -> Option<i64> {
        let known = self.by_key.find(hash, |known| {
            known.hash == hash
                && self
                    .by_offset
                    .get(known.queue_offset)
                    .is_some_and(|entry| entry.has_triple(py, triple))
        });
        known.map(|known| known.queue_offset)
    }

    fn position(&self, py: Python<'_>, hash: u64, triple: Triple) -> Option<(i64, i64)> {
        if let Some(queue_offset) = self.offset_of(py, hash, triple) {
            let entry = self.by_offset.get(queue_offset)?;
            return Some((queue_offset, entry.inspect(py, |half| half.log_offset)));
        }
        let number = self.decided_index.find(hash, |number| {
            self.decided(*number).identity.triple() == triple
        })?;
        let decided = self.decided(*number);
        Some((decided.queue_offset, decided.log_offset))
    }

    fn decided(&self, number: u64) -> &DecidedHalf {
        &self.decided[(number - self.decided_dropped) as usize]
    }

    /// Reserve the key of a half that is about to be appended.
    pub fn reserve_new(&mut self, identity: Identity) {
        let hasher = &self.hasher;
        let hash = hasher.hash_one(identity.triple());
        self.reserved
            .insert_unique(hash, identity, |known| hasher.hash_one(known.triple()));
    }

    /// Release the key of a half that could not be appended.
    pub fn release_key(&mut self, triple: Triple) {
        self.unreserve(self.hasher.hash_one(triple), triple);
    }

    fn unreserve(&mut self, hash: u64, triple: Triple) {
        if let Ok(entry) = self
            .reserved
            .find_entry(hash, |known| known.triple() == triple)
        {
            entry.remove();
        }
    }

    fn remember(&mut self, identity: Identity, queue_offset: i64, log_offset: i64) {
        if identity.key.as_bytes().is_empty() || self.decided_max == 0 {
            return;
        }
        let hash = self.hasher.hash_one(identity.triple());
        // A key that was remembered before counts from now on.
        let found = self
            .decided_index
            .find_entry(hash, |number| {
                let known = &self.decided[(*number - self.decided_dropped) as usize];
                known.identity.triple() == identity.triple()
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
            identity,
            queue_offset,
            log_offset,
        });
        let (decided, dropped, hasher) = (&self.decided, self.decided_dropped, &self.hasher);
        self.decided_index.insert_unique(hash, number, |number| {
            hasher.hash_one(decided[(*number - dropped) as usize].identity.triple())
        });
    }

    fn drop_oldest_decided(&mut self) {
        let Some(oldest) = self.decided.front() else {
            return;
        };
        let (hash, number) = (
            self.hasher.hash_one(oldest.identity.triple()),
            self.decided_dropped,
        );
        if let Ok(entry) = self
            .decided_index
            .find_entry(hash, |candidate| *candidate == number)
        {
            entry.remove();
        }
        self.decided.pop_front();
        self.decided_dropped += 1;
    }

    /// Add a half that is stored. Its key is not reserved any more.
    pub fn add_half(&mut self, py: Python<'_>, half: Half) {
        self.add_entry(py, Entry::Row(half));
    }

    fn add_entry(&mut self, py: Python<'_>, mut entry: Entry) {
        let queue_offset = entry.update(py, |half| {
            self.count(half);
            half.queue_offset
        });
        entry.inspect(py, |half| {
            let triple = half.triple();
            let hash = self.hasher.hash_one(triple);
            self.unreserve(hash, triple);
            if !half.key_bytes().is_empty() {
                self.set_offset_of(py, hash, triple, queue_offset);
            }
        });
        self.by_offset.insert(queue_offset, entry);
    }

    fn set_offset_of(&mut self, py: Python<'_>, hash: u64, triple: Triple, queue_offset: i64) {
        let by_offset = &self.by_offset;
        let same = |known: &KeyEntry| {
            known.hash == hash
                && by_offset
                    .get(known.queue_offset)
                    .is_some_and(|entry| entry.has_triple(py, triple))
        };
        // Of several with one key, which only RocketMQ writes, the last one is found.
        match self.by_key.find_entry(hash, same) {
            Ok(mut known) => known.get_mut().queue_offset = queue_offset,
            Err(_) => {
                let entry = KeyEntry { hash, queue_offset };
                self.by_key.insert_unique(hash, entry, |known| known.hash);
            }
        }
    }

    /// Add a half to the totals, and let it share the names of other halves.
    fn count(&mut self, half: &mut Half) {
        let size = u64::from(half.size);
        self.stranded_count += u64::from(half.is_stranded);
        self.total.add(size);
        for (names, name) in [
            (&mut self.groups, &mut half.group),
            (&mut self.topics, &mut half.topic),
        ] {
            // A name is looked up for every half, and allocated only for the first one.
            if let Some(known) = names.get_mut(&*name.text) {
                name.clone_from(&known.name);
                known.totals.add(size);
                continue;
            }
            let mut totals = HalfTotals::default();
            totals.add(size);
            let known = NameTotals {
                name: name.clone(),
                totals,
            };
            names.insert(name.text.clone(), known);
        }
    }

    fn uncount(&mut self, half: &Half) {
        let size = u64::from(half.size);
        self.stranded_count -= u64::from(half.is_stranded);
        self.total.remove(size);
        for (names, name) in [
            (&mut self.groups, &half.group),
            (&mut self.topics, &half.topic),
        ] {
            if let Some(known) = names.get_mut(&*name.text) {
                known.totals.remove(size);
                if known.totals.count == 0 {
                    names.remove(&*name.text);
                }
            }
        }
    }

    /// Remove an undecided half, and return it if it was there.
    fn remove_at(&mut self, py: Python<'_>, queue_offset: i64) -> Option<Entry> {
        let entry = self.by_offset.remove(queue_offset)?;
        entry.inspect(py, |half| {
            let hash = self.hasher.hash_one(half.triple());
            let same = |known: &KeyEntry| known.queue_offset == queue_offset;
            if let Ok(known) = self.by_key.find_entry(hash, same) {
                known.remove();
            }
            self.uncount(half);
        });
        Some(entry)
    }

    /// Remove a half that is decided, and remember its key for a while. Return whether it was
    /// there.
    pub fn close_at(&mut self, py: Python<'_>, queue_offset: i64) -> bool {
        let Some(entry) = self.remove_at(py, queue_offset) else {
            return false;
        };
        entry.inspect(py, |half| {
            self.remember(half.identity(), half.queue_offset, half.log_offset);
        });
        true
    }

    /// Return the half at an offset as an object.
    fn object_at(&mut self, py: Python<'_>, queue_offset: i64) -> PyResult<Option<Py<Half>>> {
        let Some(entry) = self.by_offset.get_mut(queue_offset) else {
            return Ok(None);
        };
        let object = match entry {
            Entry::Object(half) => return Ok(Some(half.clone_ref(py))),
            Entry::Row(half) => Py::new(py, half.take(py))?,
        };
        *entry = Entry::Object(object.clone_ref(py));
        self.track_object(py, queue_offset);
        Ok(Some(object))
    }

    /// Note that a half is an object, and make rows of the oldest objects that Python has dropped.
    fn track_object(&mut self, py: Python<'_>, queue_offset: i64) {
        self.objects.push_back(queue_offset);
        // Two for each that is added: so their number falls when Python drops very many at once.
        for _ in 0..2 {
            if self.objects.len() <= OBJECTS_MAX {
                break;
            }
            if let Some(oldest) = self.objects.pop_front()
                && !self.make_row(py, oldest)
            {
                self.objects.push_back(oldest);
            }
        }
    }

    /// Make a row of an object. Return false if Python has it.
    fn make_row(&mut self, py: Python<'_>, queue_offset: i64) -> bool {
        let Some(entry) = self.by_offset.get_mut(queue_offset) else {
            return true; // it was removed
        };
        let Entry::Object(object) = entry else {
            return true;
        };
        // SAFETY: the pointer is that of a living object, and the interpreter's lock is held.
        if unsafe { ffi::Py_REFCNT(object.as_ptr()) } > 1 {
            return false;
        }
        let half = object.borrow_mut(py).take(py);
        *entry = Entry::Row(half);
        true
    }
}

impl HalfTotals {
    fn add(&mut self, size: u64) {
        self.count += 1;
        self.size += size;
    }

    fn remove(&mut self, size: u64) {
        self.count -= 1;
        self.size -= size;
    }
}

/// Queue offset, time of the last check, checks, unknown answers, all of them little-endian.
const CHECK_HISTORY_BYTES: usize = 24;

fn check_history(bytes: &[u8; CHECK_HISTORY_BYTES]) -> (i64, i64, u32, u32) {
    let number = |position: usize| {
        let mut part = [0; 8];
        part.copy_from_slice(&bytes[position..position + 8]);
        i64::from_le_bytes(part)
    };
    let counts = number(16) as u64;
    (number(0), number(8), counts as u32, (counts >> 32) as u32)
}

/// How long to wait for verdicts. Python is asked once for each topic, group and number of checks.
struct CheckIntervals<'a, 'py> {
    interval_ms: &'a Bound<'py, PyAny>,
    // Names are shared, so their addresses tell them apart.
    known: HashMap<(*const Name, *const Name, u32), i64>,
}

impl<'a, 'py> CheckIntervals<'a, 'py> {
    fn new(interval_ms: &'a Bound<'py, PyAny>) -> Self {
        CheckIntervals {
            interval_ms,
            known: HashMap::new(),
        }
    }

    fn get(&mut self, half: &Half) -> PyResult<i64> {
        let (topic, group) = (Arc::as_ptr(&half.topic), Arc::as_ptr(&half.group));
        if let Some(interval) = self.known.get(&(topic, group, half.checks)) {
            return Ok(*interval);
        }
        let names = (&*half.topic.text, &*half.group.text, half.checks);
        let interval = self.interval_ms.call1(names)?.extract()?;
        self.known.insert((topic, group, half.checks), interval);
        Ok(interval)
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
            objects: VecDeque::new(),
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
        let half = half.borrow(py);
        if self.knows(py, half.triple()) {
            return false;
        }
        self.reserve_new(half.identity());
        true
    }

    fn release(&mut self, py: Python<'_>, half: Py<Half>) {
        self.release_key(half.borrow(py).triple());
    }

    fn add(&mut self, py: Python<'_>, half: Py<Half>) {
        let queue_offset = half.borrow(py).queue_offset;
        self.add_entry(py, Entry::Object(half));
        self.track_object(py, queue_offset);
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

    /// Return the halves that plain ops commit, as 64-bit numbers; see `restore::plain_commits`.
    fn plain_commits<'py>(
        &self,
        py: Python<'py>,
        first_offset: i64,
        entries: &[u8],
        data: &[u8],
        data_begin: i64,
    ) -> Bound<'py, PyBytes> {
        let window = RecordWindow {
            first_offset,
            entries,
            data,
            data_begin,
        };
        let halves = restore::plain_commits(&window);
        let packed: Vec<u8> = halves.iter().flat_map(|half| half.to_ne_bytes()).collect();
        PyBytes::new(py, &packed)
    }

    fn remove(&mut self, py: Python<'_>, half: Py<Half>) -> PyResult<()> {
        let queue_offset = half.borrow(py).queue_offset;
        self.remove_at(py, queue_offset)
            .map(drop)
            .ok_or_else(|| PyKeyError::new_err(queue_offset))
    }

    fn close(&mut self, py: Python<'_>, half: Py<Half>) -> PyResult<()> {
        let queue_offset = half.borrow(py).queue_offset;
        self.close_at(py, queue_offset)
            .then_some(())
            .ok_or_else(|| PyKeyError::new_err(queue_offset))
    }

    fn strand(&mut self, py: Python<'_>, half: Py<Half>) {
        half.borrow_mut(py).is_stranded = true;
        self.stranded_count += 1;
    }

    fn find(&mut self, py: Python<'_>, queue_offset: i64) -> PyResult<Option<Py<Half>>> {
        self.object_at(py, queue_offset)
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
        &mut self,
        py: Python<'_>,
        group: &str,
        topic: &str,
        key: &[u8],
    ) -> PyResult<Option<Py<Half>>> {
        let triple = (group, topic, key);
        match self.offset_of(py, self.hasher.hash_one(triple), triple) {
            Some(queue_offset) => self.object_at(py, queue_offset),
            None => Ok(None),
        }
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
        let identity = Identity {
            group: self.group_name(py, group),
            topic: self.topic_name(py, topic),
            key: Key::new(key),
        };
        self.remember(identity, queue_offset, log_offset);
    }

    fn oldest(&mut self, py: Python<'_>) -> PyResult<Option<Py<Half>>> {
        match self.by_offset.first_from(i64::MIN) {
            Some((queue_offset, _)) => self.object_at(py, queue_offset),
            None => Ok(None),
        }
    }

    /// Return what came of checks, packed, and the queue offsets of halves by their last remark.
    fn check_histories<'py>(
        &self,
        py: Python<'py>,
        interval_ms: &Bound<'py, PyAny>,
    ) -> PyResult<(Bound<'py, PyBytes>, Bound<'py, PyDict>)> {
        let mut histories = Vec::new();
        let mut remarks: HashMap<String, Vec<u8>> = HashMap::new();
        let mut intervals = CheckIntervals::new(interval_ms);
        for (queue_offset, entry) in self.by_offset.iter() {
            entry.inspect(py, |half| {
                let remark = half.remark(py)?;
                if half.checks == 0 && remark.is_empty() {
                    return PyResult::Ok(());
                }
                let interval = intervals.get(half)?;
                histories.extend_from_slice(&queue_offset.to_le_bytes());
                histories.extend_from_slice(&(half.due_ms - interval).to_le_bytes());
                histories.extend_from_slice(&half.checks.to_le_bytes());
                histories.extend_from_slice(&half.unknown_answers.to_le_bytes());
                if !remark.is_empty() {
                    let offsets = match remarks.get_mut(remark) {
                        Some(offsets) => offsets,
                        None => remarks.entry(remark.to_owned()).or_default(),
                    };
                    offsets.extend_from_slice(&queue_offset.to_le_bytes());
                }
                Ok(())
            })?;
        }
        let by_remark = PyDict::new(py);
        for (remark, offsets) in remarks {
            by_remark.set_item(remark, PyBytes::new(py, &offsets))?;
        }
        Ok((PyBytes::new(py, &histories), by_remark))
    }

    /// Set what came of checks of halves that were restored. Return runs of equal due times.
    fn restore_checks<'py>(
        &mut self,
        py: Python<'py>,
        histories: &[u8],
        shift_ms: i64,
        interval_ms: &Bound<'py, PyAny>,
    ) -> PyResult<Vec<(i64, Bound<'py, PyBytes>)>> {
        let mut runs: Vec<(i64, Vec<u8>)> = Vec::new();
        let mut intervals = CheckIntervals::new(interval_ms);
        let (histories, _) = histories.as_chunks::<CHECK_HISTORY_BYTES>();
        for history in histories {
            let (queue_offset, checked_ms, checks, unknown_answers) = check_history(history);
            let Some(entry) = self.by_offset.get_mut(queue_offset) else {
                continue;
            };
            if checks == 0 {
                continue; // it has only a remark
            }
            let due_ms = entry.update(py, |half| {
                half.checks = checks;
                half.unknown_answers = unknown_answers.min(checks);
                half.due_ms = checked_ms + shift_ms + intervals.get(half)?;
                PyResult::Ok(half.due_ms)
            })?;
            let offset = queue_offset.to_ne_bytes();
            match runs.last_mut() {
                Some((run_due_ms, offsets)) if *run_due_ms == due_ms => offsets.extend(offset),
                _ => runs.push((due_ms, offset.to_vec())),
            }
        }
        let runs = runs.into_iter();
        Ok(runs
            .map(|(due_ms, offsets)| (due_ms, PyBytes::new(py, &offsets)))
            .collect())
    }

    /// Set the last remark of halves that were restored.
    fn restore_remark(&mut self, py: Python<'_>, remark: Py<PyString>, queue_offsets: Vec<i64>) {
        for queue_offset in queue_offsets {
            if let Some(entry) = self.by_offset.get_mut(queue_offset) {
                entry.update(py, |half| {
                    half.rare().last_remark = Some(remark.clone_ref(py));
                });
            }
        }
    }

    /// Return up to `count_max` queue offsets of halves with lower log offsets, in their order.
    fn stored_before(&self, py: Python<'_>, log_offset: i64, count_max: usize) -> Vec<i64> {
        self.by_offset
            .iter()
            .take_while(|(_, entry)| entry.inspect(py, |half| half.log_offset < log_offset))
            .take(count_max)
            .map(|(queue_offset, _)| queue_offset)
            .collect()
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

    fn __next__(&mut self, py: Python<'_>) -> PyResult<Option<Py<Half>>> {
        let mut table = self.table.borrow_mut(py);
        let next = self
            .next_offset
            .and_then(|begin| table.by_offset.first_from(begin));
        let Some((offset, _)) = next else {
            return Ok(None);
        };
        self.next_offset = offset.checked_add(1);
        table.object_at(py, offset)
    }
}
