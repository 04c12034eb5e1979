//! Pulls of messages that exist: from the entries of a queue to the bytes of a response.
//!
//! Most pulls repeat the one before with another offset. What Python has found out for the first of
//! them (whether it is allowed, the queue, the filter, the limits) is a *plan*, which holds for all
//! until something changes that it depends on; then all plans are dropped. A pull that has no plan,
//! or finds nothing, or finds a damaged record, is not plain.
//!
//! Records come from the tail of the log or from blocks that Python reads. What was read from the
//! disk is checked before it is sent, as store/log_reads.py does; checked blocks are kept for a
//! while, because the next consumer often follows. Neighbouring records are not copied: a response
//! consists of pieces, and long ones are parts of an append or a block.

use std::collections::{BTreeMap, HashSet, VecDeque};
use std::hash::BuildHasher;
use std::ops::Range;

use hashbrown::{DefaultHashBuilder, HashMap, HashTable};
use pyo3::prelude::*;
use pyo3::types::{PyAnyMethods, PyBytes, PyString};

use crate::header::{Head, PullHeader};
use crate::log_check::RecordCheck;
use crate::log_tail::LogTail;
use crate::response;
use crate::shared_bytes::{Piece, SharedBytes};

const ENTRY_BYTES: usize = 20;
/// The size in the entry of a message that does not exist any more.
const BLANK_SIZE: u32 = 0x7FFF_FFFF;
/// Entries that are fetched at once: four pulls of 32 messages.
const WINDOW_ENTRIES: i64 = 128;
const WINDOWS_MAX: usize = 1024;
/// Clients choose the names in a plan.
const PLANS_MAX: usize = 4096;
/// Consumers of one topic that are less than this apart read and check its messages only once.
const BLOCKS_BYTES_MAX: usize = 64 << 20;
const BLOCKS_MAX: usize = 1024;
/// Blocks of scattered records may overlap. So many that begin before a record are looked at.
const OVERLAPPING_BLOCKS_MAX: usize = 4;
/// To copy less than this takes less time than another piece.
const PIECE_BYTES_MIN: usize = 4 << 10;
/// Records of a queue lie between those of others. To read a gap takes less time than another read.
const GAP_BYTES_MAX: i64 = 16 << 10;
const READ_BYTES_MAX: i64 = 512 << 10;
/// A record has more bytes than this, so that at most one begins in so many bytes.
const SLOT_BYTES: usize = 64;
/// Of the header of a response, whatever its numbers are.
const HEADER_BYTES_MAX: usize = 512;
const FLAG_COMMIT_OFFSET: i32 = 1;

/// What Python says of a pull: `PullPlan` in broker/processors/pull.py.
#[derive(FromPyObject)]
struct PlanFields {
    queue: Py<PyAny>,
    tags_codes: Option<HashSet<i64>>,
    count_max: usize,
    bytes_max: usize,
    scan_max: usize,
    min_offset: i64,
    magic: u32,
    topic_field: Vec<u8>,
    topic_sys_flag: i32,
    group_sys_flag: i32,
}

struct Plan {
    request_code: i32,
    group: Py<PyString>,
    topic: Py<PyString>,
    names: Names,
    queue_id: i32,
    max_messages: i32,
    sys_flag: i32,
    sub_version: i64,
    max_bytes: Option<i32>,
    fields: PlanFields,
}

struct Names {
    group: Box<[u8]>,
    topic: Box<[u8]>,
    subscription: Option<Box<[u8]>>,
    expression_type: Option<Box<[u8]>>,
}

impl Plan {
    fn is_for(&self, request_code: i32, header: &PullHeader<'_>) -> bool {
        self.request_code == request_code
            && self.queue_id == header.queue_id
            && self.max_messages == header.max_messages
            && self.sys_flag == header.sys_flag
            && self.sub_version == header.sub_version
            && self.max_bytes == header.max_bytes
            && *self.names.group == *header.group
            && *self.names.topic == *header.topic
            && self.names.subscription.as_deref() == header.subscription
            && self.names.expression_type.as_deref() == header.expression_type
    }

    fn hash(&self, hasher: &DefaultHashBuilder) -> u64 {
        hasher.hash_one((&*self.names.group, &*self.names.topic, self.queue_id))
    }

    fn is_wanted(&self, entry: &Entry) -> bool {
        let codes = self.fields.tags_codes.as_ref();
        entry.size != BLANK_SIZE && codes.is_none_or(|codes| codes.contains(&entry.tags_code))
    }
}

/// Entries of queues that were fetched before, in windows of neighbours.
#[derive(Default)]
struct Windows {
    windows: HashMap<(usize, i64), Window>, // by address of the queue, and number of the window
}

struct Window {
    first_offset: i64,
    entries: Vec<u8>,
    has_blank: bool,
}

impl Window {
    fn new(first_offset: i64, entries: Vec<u8>) -> Window {
        let (chunks, _) = entries.as_chunks::<ENTRY_BYTES>();
        let has_blank = chunks
            .iter()
            .any(|entry| entry[8..12] == BLANK_SIZE.to_be_bytes());
        Window {
            first_offset,
            entries,
            has_blank,
        }
    }

    fn entries_from(&self, queue_offset: i64) -> &[u8] {
        let index = usize::try_from(queue_offset - self.first_offset).unwrap_or(usize::MAX);
        let begin = index.saturating_mul(ENTRY_BYTES);
        self.entries.get(begin..).unwrap_or_default()
    }
}

impl Windows {
    /// Return entries from a queue offset on: at least one, unless the queue has none there. The
    /// queue must live as long as these windows.
    fn entries(
        &mut self,
        py: Python<'_>,
        fields: &PlanFields,
        queue_offset: i64,
        end: i64,
    ) -> PyResult<&[u8]> {
        let number = queue_offset / WINDOW_ENTRIES;
        let key = (fields.queue.as_ptr() as usize, number);
        // The entry of a message that could not be read for a while may come back.
        let is_known = self.windows.get(&key).is_some_and(|window| {
            !window.has_blank && !window.entries_from(queue_offset).is_empty()
        });
        if !is_known {
            if self.windows.len() >= WINDOWS_MAX {
                self.windows.clear();
            }
            let window = fetch_window(py, fields, number, queue_offset, end)?;
            self.windows.insert(key, window);
        }
        let window = self.windows.get(&key);
        Ok(window.map_or(&[], |window| window.entries_from(queue_offset)))
    }
}

fn fetch_window(
    py: Python<'_>,
    fields: &PlanFields,
    number: i64,
    queue_offset: i64,
    end: i64,
) -> PyResult<Window> {
    let first_offset = fields.min_offset.max(number * WINDOW_ENTRIES);
    let last_offset = end.min((number + 1) * WINDOW_ENTRIES);
    let fetch = |first_offset: i64| -> PyResult<Window> {
        let entries = fields
            .queue
            .bind(py)
            .call_method1("copy_entries", (first_offset, last_offset - first_offset))?;
        let entries = entries.cast_into::<PyBytes>()?.as_bytes().to_vec();
        Ok(Window::new(first_offset, entries))
    };
    let window = fetch(first_offset)?;
    // Python may return fewer than were wanted.
    if window.entries_from(queue_offset).is_empty() {
        return fetch(queue_offset);
    }
    Ok(window)
}

/// Where a message of a queue is in the log.
#[derive(Clone, Copy)]
struct Entry {
    log_offset: i64,
    size: u32,
    tags_code: i64,
    queue_offset: i64,
}

impl Entry {
    fn new(bytes: &[u8; ENTRY_BYTES], queue_offset: i64) -> Entry {
        let (log_offset, rest) = bytes.split_at(8);
        let (size, tags_code) = rest.split_at(4);
        Entry {
            log_offset: i64::from_be_bytes(log_offset.try_into().unwrap_or_default()),
            size: u32::from_be_bytes(size.try_into().unwrap_or_default()),
            tags_code: i64::from_be_bytes(tags_code.try_into().unwrap_or_default()),
            queue_offset,
        }
    }

    fn end(&self) -> i64 {
        self.log_offset + i64::from(self.size)
    }
}

/// Bytes that were read from the disk.
struct Block {
    begin: i64, // log offsets
    end: i64,
    bytes: SharedBytes,
    checked: Vec<u64>, // bits of the slots in which a record begins whose checksum is right
}

impl Block {
    fn size(&self) -> usize {
        (self.end - self.begin) as usize
    }

    /// Return whether a record is right. Its checksum is computed only once.
    fn is_right(&mut self, py: Python<'_>, check: &RecordCheck<'_>, entry: &Entry) -> bool {
        let position = (entry.log_offset - self.begin) as usize;
        let slot = position / SLOT_BYTES;
        let (word, bit) = (slot / 64, 1 << (slot % 64));
        let record = &self.bytes.bytes(py)[position..position + entry.size as usize];
        let is_checked = self.checked[word] & bit != 0;
        let is_right = check.is_right(record, entry.log_offset, entry.queue_offset, is_checked);
        if is_right {
            self.checked[word] |= bit;
        }
        is_right
    }
}

/// Answers plain pulls.
pub struct PullReader {
    plan_pull: Py<PyAny>,
    read_log: Py<PyAny>,
    commit_offset: Py<PyAny>,
    plans: HashTable<Plan>,
    hasher: DefaultHashBuilder,
    version: (i64, i64),
    blocks: Blocks,
    windows: Windows,
    entries: Vec<Entry>, // of the pull that is being read
}

/// What the plain pulls of a batch have delivered: by request code, topic and group, the numbers of
/// pulls, messages and bytes.
pub type Deliveries = HashMap<(i32, Box<[u8]>, Box<[u8]>), (u64, u64, u64)>;

impl PullReader {
    pub fn new(plan_pull: Py<PyAny>, read_log: Py<PyAny>, commit_offset: Py<PyAny>) -> PullReader {
        PullReader {
            plan_pull,
            read_log,
            commit_offset,
            plans: HashTable::new(),
            hasher: DefaultHashBuilder::default(),
            version: (0, 0),
            blocks: Blocks::default(),
            windows: Windows::default(),
            entries: Vec::new(),
        }
    }

    /// Drop all plans if anything has changed that they depend on, or if the log begins elsewhere.
    pub fn update(&mut self, version: (i64, i64)) {
        if self.version != version {
            self.version = version;
            self.clear();
        }
    }

    pub fn clear(&mut self) {
        self.plans.clear();
        self.windows = Windows::default(); // before their queues may be gone
        self.blocks = Blocks::default();
    }

    /// Return the response to a pull; None if it is not plain, and then nothing is changed.
    pub fn answer(
        &mut self,
        py: Python<'_>,
        tail: &LogTail,
        head: Head,
        header: &PullHeader<'_>,
        deliveries: &mut Deliveries,
    ) -> PyResult<Option<Vec<Piece>>> {
        let hash = self
            .hasher
            .hash_one((header.group, header.topic, header.queue_id));
        let is_same = |plan: &Plan| plan.is_for(head.code, header);
        if self.plans.find(hash, is_same).is_none() && !self.add_plan(py, hash, head, header)? {
            return Ok(None);
        }
        let Some(plan) = self.plans.find(hash, is_same) else {
            return Ok(None);
        };
        let max_offset: i64 = plan
            .fields
            .queue
            .bind(py)
            .getattr("visible_end")?
            .extract()?;
        if !(plan.fields.min_offset..max_offset).contains(&header.queue_offset) {
            return Ok(None);
        }
        self.entries.clear();
        let next_offset = select(
            py,
            plan,
            &mut self.windows,
            header.queue_offset,
            max_offset,
            &mut self.entries,
        )?;
        if self.entries.is_empty() {
            return Ok(None);
        }
        let offsets = response::PullOffsets {
            next: next_offset,
            min: plan.fields.min_offset,
            max: max_offset,
        };
        let body_bytes: usize = self.entries.iter().map(|entry| entry.size as usize).sum();
        let sys_flags = (plan.fields.topic_sys_flag, plan.fields.group_sys_flag);
        let mut response = Response::default();
        response.copied.reserve(HEADER_BYTES_MAX);
        response::pull(
            &mut response.copied,
            head.opaque,
            offsets,
            sys_flags,
            body_bytes,
        );
        let records = RecordSource {
            tail,
            blocks: &mut self.blocks,
            read_log: &self.read_log,
        };
        let is_complete = records.add_records(py, plan, &self.entries, &mut response);
        if !matches!(is_complete, Ok(true)) {
            // Perhaps the entries were not right. Python fetches them again.
            self.windows = Windows::default();
            return is_complete.map(|_| None);
        }
        if plan.sys_flag & FLAG_COMMIT_OFFSET != 0 {
            let (topic, group) = (plan.topic.clone_ref(py), plan.group.clone_ref(py));
            let arguments = (topic, group, plan.queue_id, header.commit_offset);
            self.commit_offset.bind(py).call1(arguments)?;
        }
        let key = (head.code, header.topic.into(), header.group.into());
        let (pulls, messages, bytes) = deliveries.entry(key).or_default();
        *pulls += 1;
        *messages += self.entries.len() as u64;
        *bytes += body_bytes as u64;
        Ok(Some(response.into_pieces()))
    }

    /// Ask Python for the plan of a pull. Return whether there is one.
    fn add_plan(
        &mut self,
        py: Python<'_>,
        hash: u64,
        head: Head,
        header: &PullHeader<'_>,
    ) -> PyResult<bool> {
        // The header is ASCII, so this cannot fail.
        let text = |bytes| std::str::from_utf8(bytes).unwrap_or_default();
        let (group, topic) = (
            PyString::new(py, text(header.group)),
            PyString::new(py, text(header.topic)),
        );
        let arguments = (
            &group,
            &topic,
            header.queue_id,
            header.max_messages,
            header.sys_flag,
            header.subscription.map(text),
            header.sub_version,
            header.expression_type.map(text),
            header.max_bytes,
        );
        let planned: Option<PlanFields> = self.plan_pull.bind(py).call1(arguments)?.extract()?;
        let Some(fields) = planned else {
            return Ok(false);
        };
        if self.plans.len() >= PLANS_MAX {
            self.windows = Windows::default();
            self.plans.clear();
        }
        let plan = Plan {
            request_code: head.code,
            group: group.unbind(),
            topic: topic.unbind(),
            names: Names {
                group: header.group.into(),
                topic: header.topic.into(),
                subscription: header.subscription.map(Into::into),
                expression_type: header.expression_type.map(Into::into),
            },
            queue_id: header.queue_id,
            max_messages: header.max_messages,
            sys_flag: header.sys_flag,
            sub_version: header.sub_version,
            max_bytes: header.max_bytes,
            fields,
        };
        let hasher = &self.hasher;
        self.plans
            .insert_unique(hash, plan, |plan| plan.hash(hasher));
        Ok(true)
    }
}

/// Select the messages that a pull delivers, as queue_reader.py does. Return the offset behind the
/// last entry that was looked at.
fn select(
    py: Python<'_>,
    plan: &Plan,
    windows: &mut Windows,
    first_offset: i64,
    end: i64,
    selected: &mut Vec<Entry>,
) -> PyResult<i64> {
    let mut offset = first_offset;
    let mut bytes = 0;
    let last = end.min(first_offset.saturating_add(plan.fields.scan_max as i64));
    while offset < last {
        let (entries, _) = windows
            .entries(py, &plan.fields, offset, end)?
            .as_chunks::<ENTRY_BYTES>();
        if entries.is_empty() {
            break;
        }
        for entry in entries.iter().take((last - offset) as usize) {
            let entry = Entry::new(entry, offset);
            if plan.is_wanted(&entry) {
                bytes += entry.size as usize;
                // The byte limit does not apply to the first record.
                if bytes > plan.fields.bytes_max && !selected.is_empty() {
                    return Ok(offset);
                }
                selected.push(entry);
            }
            offset += 1;
            if selected.len() == plan.fields.count_max || bytes > plan.fields.bytes_max {
                return Ok(offset);
            }
        }
    }
    Ok(offset)
}

/// The response to a pull: pieces that are shared with others, and what was copied behind them.
#[derive(Default)]
struct Response {
    pieces: Vec<Piece>,
    copied: Vec<u8>,
}

impl Response {
    fn add(&mut self, py: Python<'_>, bytes: &SharedBytes, range: Range<usize>) {
        if range.len() < PIECE_BYTES_MIN {
            self.copied.extend_from_slice(&bytes.bytes(py)[range]);
            return;
        }
        self.end_copied();
        self.pieces.push(Piece::new(py, bytes.clone_ref(py), range));
    }

    fn end_copied(&mut self) {
        if !self.copied.is_empty() {
            let copied = std::mem::take(&mut self.copied);
            self.pieces.push(Piece::whole(copied));
        }
    }

    fn into_pieces(mut self) -> Vec<Piece> {
        self.end_copied();
        self.pieces
    }
}

/// Where the records of a response come from.
struct RecordSource<'a> {
    tail: &'a LogTail,
    blocks: &'a mut Blocks,
    read_log: &'a Py<PyAny>,
}

impl RecordSource<'_> {
    /// Append the records of these entries. Return false if one is not as it should be.
    fn add_records(
        self,
        py: Python<'_>,
        plan: &Plan,
        entries: &[Entry],
        response: &mut Response,
    ) -> PyResult<bool> {
        let check = RecordCheck {
            magic: plan.fields.magic,
            topic_field: &plan.fields.topic_field,
            queue_id: plan.queue_id,
        };
        let mut remaining = entries;
        while let Some(first) = remaining.first() {
            let begin = first.log_offset;
            // What was appended a moment ago is sent as it is.
            if let Some((append, position)) = self.tail.find_append(py, begin) {
                let append_end = begin + (append.bytes(py).len() - position) as i64;
                let count = count_adjacent(remaining, append_end);
                if count > 0 {
                    let size = (remaining[count - 1].end() - begin) as usize;
                    response.add(py, append, position..position + size);
                    remaining = &remaining[count..];
                    continue;
                }
            }
            if self.blocks.find(first).is_none() {
                self.blocks.read(py, self.read_log, remaining)?;
            }
            let Some(block) = self.blocks.find(first) else {
                return Ok(false);
            };
            let count = count_adjacent(remaining, block.end);
            let (run, rest) = remaining.split_at(count);
            if !run.iter().all(|entry| block.is_right(py, &check, entry)) {
                return Ok(false);
            }
            let (position, end) = (begin - block.begin, run[count - 1].end() - block.begin);
            response.add(py, &block.bytes, position as usize..end as usize);
            remaining = rest;
        }
        Ok(true)
    }
}

/// Return how many of the first records follow each other in the log and end before an offset.
fn count_adjacent(entries: &[Entry], end: i64) -> usize {
    let mut next = entries[0].log_offset;
    let mut count = 0;
    for entry in entries {
        if entry.log_offset != next || entry.end() > end {
            break;
        }
        next = entry.end();
        count += 1;
    }
    count
}

/// Blocks of the log that were read, by the log offset where they begin.
#[derive(Default)]
struct Blocks {
    blocks: BTreeMap<i64, Block>,
    order: VecDeque<i64>, // the oldest first
    bytes: usize,
}

impl Blocks {
    /// Return a block with a whole record.
    fn find(&mut self, entry: &Entry) -> Option<&mut Block> {
        self.blocks
            .range_mut(..=entry.log_offset)
            .rev()
            .take(OVERLAPPING_BLOCKS_MAX)
            .map(|(_, block)| block)
            .find(|block| entry.end() <= block.end)
    }

    /// Let Python read the first of these entries, and those that are near it.
    fn read(&mut self, py: Python<'_>, read_log: &Py<PyAny>, entries: &[Entry]) -> PyResult<()> {
        let begin = entries[0].log_offset;
        let mut end = entries[0].end();
        let mut wanted = i64::from(entries[0].size);
        for entry in &entries[1..] {
            let is_near = (0..=GAP_BYTES_MAX).contains(&(entry.log_offset - end));
            if !is_near || entry.end() - begin > READ_BYTES_MAX {
                break;
            }
            end = entry.end();
            wanted += i64::from(entry.size);
        }
        // Where most bytes are wanted, those around them soon will be.
        let is_dense = wanted * 8 >= end - begin;
        let read = read_log.bind(py).call1((begin, end, is_dense))?;
        let (begin, bytes): (i64, Py<PyBytes>) = read.extract()?;
        let size = bytes.as_bytes(py).len();
        self.bytes += size;
        let block = Block {
            begin,
            end: begin + size as i64,
            bytes: SharedBytes::Python(bytes),
            checked: vec![0; size / SLOT_BYTES / 64 + 1],
        };
        // A block that begins there too ended before the record, and the log has grown since.
        match self.blocks.insert(begin, block) {
            Some(replaced) => self.bytes -= replaced.size(),
            None => self.order.push_back(begin),
        }
        while self.bytes > BLOCKS_BYTES_MAX || self.blocks.len() > BLOCKS_MAX {
            let Some(oldest) = self.order.pop_front() else {
                break;
            };
            if let Some(dropped) = self.blocks.remove(&oldest) {
                self.bytes -= dropped.size();
            }
        }
        Ok(())
    }
}
