//! Pulls of messages that exist: from the entries of a queue to the bytes of a response.
//!
//! Most pulls repeat the one before with another offset. What Python has found out for the first of
//! them (whether it is allowed, the queue, the filter, the limits) is a *plan*, which holds for all
//! until something changes that it depends on; then all plans are dropped. A pull that has no plan,
//! or finds nothing, or finds a damaged record, is not plain.
//!
//! Records are copied from the tail of the log or from blocks that Python reads. What was read from
//! the disk is checked before it is sent, as store/log_reads.py does.

use std::collections::{HashSet, VecDeque};
use std::hash::BuildHasher;

use hashbrown::{DefaultHashBuilder, HashMap, HashTable};
use pyo3::prelude::*;
use pyo3::types::{PyAnyMethods, PyBytes, PyString};

use crate::header::{Head, PullHeader};
use crate::log_check::RecordCheck;
use crate::log_tail::LogTail;
use crate::response;

const ENTRY_BYTES: usize = 20;
/// The size in the entry of a message that does not exist any more.
const BLANK_SIZE: u32 = 0x7FFF_FFFF;
/// Entries that are fetched at once: four pulls of 32 messages.
const WINDOW_ENTRIES: usize = 128;
/// Clients choose the names in a plan.
const PLANS_MAX: usize = 4096;
const BLOCKS_BYTES_MAX: usize = 16 << 20;
const BLOCKS_MAX: usize = 256;
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
    // Entries that were fetched before.
    window_offset: i64,
    window: Vec<u8>,
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

    /// Return an entry, from the window or from Python.
    fn entry(&mut self, py: Python<'_>, queue_offset: i64, end: i64) -> PyResult<Option<Entry>> {
        if let Some(entry) = self.entry_in_window(queue_offset) {
            return Ok(Some(entry));
        }
        let count = WINDOW_ENTRIES.min((end - queue_offset).max(0) as usize);
        let entries = self
            .fields
            .queue
            .bind(py)
            .call_method1("copy_entries", (queue_offset, count))?;
        self.window.clear();
        self.window
            .extend_from_slice(entries.cast_into::<PyBytes>()?.as_bytes());
        self.window_offset = queue_offset;
        Ok(self.entry_in_window(queue_offset))
    }

    fn entry_in_window(&self, queue_offset: i64) -> Option<Entry> {
        let index = usize::try_from(queue_offset - self.window_offset).ok()?;
        let begin = index.checked_mul(ENTRY_BYTES)?;
        let bytes = self.window.get(begin..begin.checked_add(ENTRY_BYTES)?)?;
        Some(Entry {
            log_offset: i64::from_be_bytes(bytes[..8].try_into().ok()?),
            size: u32::from_be_bytes(bytes[8..12].try_into().ok()?),
            tags_code: i64::from_be_bytes(bytes[12..].try_into().ok()?),
            queue_offset,
        })
    }
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
    fn end(&self) -> i64 {
        self.log_offset + i64::from(self.size)
    }
}

/// Bytes that were read from the disk.
struct Block {
    begin: i64, // log offsets
    end: i64,
    bytes: Py<PyBytes>,
    checked: Vec<u64>, // bits of the slots in which a record begins whose checksum is right
}

impl Block {
    /// Return whether a record is right. Its checksum is computed only once.
    fn is_right(&mut self, py: Python<'_>, check: &RecordCheck<'_>, entry: &Entry) -> bool {
        let position = (entry.log_offset - self.begin) as usize;
        let slot = position / SLOT_BYTES;
        let (word, bit) = (slot / 64, 1 << (slot % 64));
        let record = &self.bytes.as_bytes(py)[position..position + entry.size as usize];
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
    blocks: VecDeque<Block>,
    blocks_bytes: usize,
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
            blocks: VecDeque::new(),
            blocks_bytes: 0,
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
        self.blocks.clear();
        self.blocks_bytes = 0;
    }

    /// Append the response to a pull. Return false if it is not plain; nothing is changed then.
    pub fn answer(
        &mut self,
        py: Python<'_>,
        tail: &LogTail,
        head: Head,
        header: &PullHeader<'_>,
        out: &mut Vec<u8>,
        deliveries: &mut Deliveries,
    ) -> PyResult<bool> {
        let hash = self
            .hasher
            .hash_one((header.group, header.topic, header.queue_id));
        let is_same = |plan: &Plan| plan.is_for(head.code, header);
        if self.plans.find(hash, is_same).is_none() && !self.add_plan(py, hash, head, header)? {
            return Ok(false);
        }
        let Some(plan) = self.plans.find_mut(hash, is_same) else {
            return Ok(false);
        };
        let max_offset: i64 = plan
            .fields
            .queue
            .bind(py)
            .getattr("visible_end")?
            .extract()?;
        if !(plan.fields.min_offset..max_offset).contains(&header.queue_offset) {
            return Ok(false);
        }
        self.entries.clear();
        let next_offset = select(py, plan, header.queue_offset, max_offset, &mut self.entries)?;
        if self.entries.is_empty() {
            return Ok(false);
        }
        let begin = out.len();
        let offsets = response::PullOffsets {
            next: next_offset,
            min: plan.fields.min_offset,
            max: max_offset,
        };
        let body_bytes: usize = self.entries.iter().map(|entry| entry.size as usize).sum();
        out.reserve_exact(HEADER_BYTES_MAX + body_bytes);
        let sys_flags = (plan.fields.topic_sys_flag, plan.fields.group_sys_flag);
        response::pull(out, head.opaque, offsets, sys_flags, body_bytes);
        let mut blocks = Blocks {
            read_log: &self.read_log,
            blocks: &mut self.blocks,
            bytes: &mut self.blocks_bytes,
        };
        let is_copied = blocks.copy(py, tail, plan, &self.entries, out);
        if !matches!(is_copied, Ok(true)) {
            // Perhaps the entries were not right. Python fetches them again.
            plan.window.clear();
            out.truncate(begin);
            return is_copied;
        }
        if plan.sys_flag & FLAG_COMMIT_OFFSET != 0 {
            let (topic, group) = (plan.topic.clone_ref(py), plan.group.clone_ref(py));
            let arguments = (topic, group, plan.queue_id, header.commit_offset);
            if let Err(error) = self.commit_offset.bind(py).call1(arguments) {
                out.truncate(begin);
                return Err(error);
            }
        }
        let key = (head.code, header.topic.into(), header.group.into());
        let (pulls, messages, bytes) = deliveries.entry(key).or_default();
        *pulls += 1;
        *messages += self.entries.len() as u64;
        *bytes += body_bytes as u64;
        Ok(true)
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
            window_offset: 0,
            window: Vec::new(),
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
    plan: &mut Plan,
    first_offset: i64,
    end: i64,
    selected: &mut Vec<Entry>,
) -> PyResult<i64> {
    let mut offset = first_offset;
    let mut bytes = 0;
    let last = end.min(first_offset.saturating_add(plan.fields.scan_max as i64));
    while offset < last {
        let Some(entry) = plan.entry(py, offset, end)? else {
            break;
        };
        if plan.is_wanted(&entry) {
            bytes += entry.size as usize;
            // The byte limit does not apply to the first record.
            if bytes > plan.fields.bytes_max && !selected.is_empty() {
                break;
            }
            selected.push(entry);
        }
        offset += 1;
        if selected.len() == plan.fields.count_max || bytes > plan.fields.bytes_max {
            break;
        }
    }
    Ok(offset)
}

struct Blocks<'a> {
    read_log: &'a Py<PyAny>,
    blocks: &'a mut VecDeque<Block>,
    bytes: &'a mut usize,
}

impl Blocks<'_> {
    /// Append the records of these entries. Return false if one is not as it should be.
    fn copy(
        &mut self,
        py: Python<'_>,
        tail: &LogTail,
        plan: &Plan,
        entries: &[Entry],
        out: &mut Vec<u8>,
    ) -> PyResult<bool> {
        let check = RecordCheck {
            magic: plan.fields.magic,
            topic_field: &plan.fields.topic_field,
            queue_id: plan.queue_id,
        };
        for (index, entry) in entries.iter().enumerate() {
            let size = entry.size as usize;
            // What was appended a moment ago is sent as it is.
            if let Some(record) = tail
                .find(py, entry.log_offset)
                .and_then(|bytes| bytes.get(..size))
            {
                out.extend_from_slice(record);
                continue;
            }
            if self.find(entry).is_none() {
                self.read(py, &entries[index..])?;
            }
            let Some(number) = self.find(entry) else {
                return Ok(false);
            };
            let block = &mut self.blocks[number];
            if !block.is_right(py, &check, entry) {
                return Ok(false);
            }
            let position = (entry.log_offset - block.begin) as usize;
            out.extend_from_slice(&block.bytes.as_bytes(py)[position..position + size]);
        }
        Ok(true)
    }

    /// Return the number of the block with a record.
    fn find(&self, entry: &Entry) -> Option<usize> {
        // The newest first: pulls follow each other.
        let has_record =
            |block: &Block| block.begin <= entry.log_offset && entry.end() <= block.end;
        self.blocks.iter().rposition(has_record)
    }

    /// Let Python read the first of these entries, and those that are near it.
    fn read(&mut self, py: Python<'_>, entries: &[Entry]) -> PyResult<()> {
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
        let read = self.read_log.bind(py).call1((begin, end, is_dense))?;
        let (begin, bytes): (i64, Py<PyBytes>) = read.extract()?;
        let size = bytes.as_bytes(py).len();
        *self.bytes += size;
        self.blocks.push_back(Block {
            begin,
            end: begin + size as i64,
            bytes,
            checked: vec![0; size / SLOT_BYTES / 64 + 1],
        });
        while *self.bytes > BLOCKS_BYTES_MAX || self.blocks.len() > BLOCKS_MAX {
            let Some(dropped) = self.blocks.pop_front() else {
                break;
            };
            *self.bytes -= (dropped.end - dropped.begin) as usize;
        }
        Ok(())
    }
}
