//! Restore open half messages from the log at a start, and read decisions, many at a time.
//!
//! escrow/recovery.py does the same one by one and is the specification. It handles every half and
//! every op that is unusual in any way: this module stops in front of the first one.

use std::sync::Arc;

use memchr::memmem::Finder;
use pyo3::prelude::*;

use crate::batch::{COMMIT_PROPERTIES, OP_TOPIC};
use crate::half::{Half, HalfTable, Name};
use crate::log_check::RecordCheck;

const ENTRY_BYTES: usize = 20;
const MAGIC_V1: u32 = 0xDAA3_20A7;
const OFFSET_DIGITS_MAX: usize = 18;
const BORN_HOST_IPV6: u32 = 0x10;
const STORE_HOST_IPV6: u32 = 0x20;
const SEAL_BYTES: usize = 20;
const SEAL_NAME: &[u8] = b"__CRC32#\x01";
const TAIL: &[u8] = b"TRAN_MSG\x01true\x02REAL_TOPIC\x01";
const QUEUE_ID: &[u8] = b"REAL_QID\x01";
/// What makes a half unusual: its own immunity, a writer, a copy, checks of RocketMQ, a delay.
const UNUSUAL: [&[u8]; 5] = [
    b"ESCROW_",
    b"CHECK_IMMUNITY",
    b"TRANSACTION_CHECK_TIMES\x01",
    b"DELAY\x01",
    b"TIMER_D",
];

/// What is needed of the record of a half.
struct PlainHalf<'a> {
    stored_ms: i64,
    topic: &'a str,
    queue_id: i32,
    group: &'a str,
    key: &'a [u8],
}

/// Times of a half: parked, due, and the log offset up to which they hold for equal halves.
type HalfTimes = (i64, i64, i64);

/// What the next half has in common with the last one, in most cases.
struct Last {
    topic: Arc<Name>,
    group: Arc<Name>,
    stored_ms: i64,
    times: HalfTimes,
}

impl Last {
    fn has_names(&self, plain: &PlainHalf<'_>) -> bool {
        *self.topic.text == *plain.topic && *self.group.text == *plain.group
    }

    fn has_times(&self, plain: &PlainHalf<'_>, log_offset: i64) -> bool {
        let (_, _, end) = self.times;
        self.has_names(plain) && self.stored_ms == plain.stored_ms && log_offset < end
    }
}

/// Neighbouring records of one queue: their queue entries, and a part of the log with them.
pub struct RecordWindow<'a> {
    pub first_offset: i64,
    pub entries: &'a [u8],
    pub data: &'a [u8],
    pub data_begin: i64,
}

/// Add the halves of a window up to the first unusual one.
///
/// `times` is called with topic, group, stored time and log offset. Return pairs of a due time and
/// the number of halves, one after the other, that have it.
pub fn restore(
    table: &Bound<'_, HalfTable>,
    window: &RecordWindow<'_>,
    times: &Bound<'_, PyAny>,
) -> PyResult<Vec<(i64, usize)>> {
    let (py, marks) = (table.py(), Marks::new());
    let mut runs: Vec<(i64, usize)> = Vec::new();
    let mut last: Option<Last> = None;
    let offsets = window.first_offset..;
    for (queue_offset, entry) in offsets.zip(window.entries.chunks_exact(ENTRY_BYTES)) {
        let (log_offset, size) = (get_i64(entry, 0), get_u32(entry, 8));
        let Some(plain) = record_at(window, log_offset, size)
            .and_then(|record| parse(record, queue_offset, &marks))
        else {
            break;
        };
        let triple = (plain.group, plain.topic, plain.key);
        if table.borrow().knows(py, triple) {
            break;
        }
        let half_times = match &last {
            Some(last) if last.has_times(&plain, log_offset) => last.times,
            _ => times
                .call1((plain.topic, plain.group, plain.stored_ms, log_offset))?
                .extract()?,
        };
        let mut table = table.borrow_mut();
        let (topic, group) = match &last {
            Some(last) if last.has_names(&plain) => (last.topic.clone(), last.group.clone()),
            _ => (
                table.topic_name(py, plain.topic),
                table.group_name(py, plain.group),
            ),
        };
        let (parked_ms, due_ms, _) = half_times;
        let mut half = Half::parked(
            topic.clone(),
            plain.queue_id,
            group.clone(),
            plain.key,
            parked_ms,
            due_ms,
            None,
        );
        (half.queue_offset, half.log_offset, half.size) = (queue_offset, log_offset, size);
        table.add_half(py, half);
        last = Some(Last {
            topic,
            group,
            stored_ms: plain.stored_ms,
            times: half_times,
        });
        match runs.last_mut() {
            Some((run_due_ms, count)) if *run_due_ms == due_ms => *count += 1,
            _ => runs.push((due_ms, 1)),
        }
    }
    Ok(runs)
}

/// Return the halves that the ops of a window commit, up to the first op that is not plain.
///
/// An op is plain if it is exactly what this crate writes for a commit, and its checksum is right.
pub fn plain_commits(window: &RecordWindow<'_>) -> Vec<i64> {
    let mut topic_field = vec![OP_TOPIC.len() as u8];
    topic_field.extend(OP_TOPIC.as_bytes());
    let check = RecordCheck {
        magic: MAGIC_V1,
        topic_field: &topic_field,
        queue_id: 0,
    };
    let offsets = window.first_offset..;
    offsets
        .zip(window.entries.chunks_exact(ENTRY_BYTES))
        .map_while(|(queue_offset, entry)| {
            let (log_offset, size) = (get_i64(entry, 0), get_u32(entry, 8));
            let record = record_at(window, log_offset, size)?;
            let (body, properties) = check.parts_of(record, log_offset, queue_offset)?;
            let is_plain = properties == COMMIT_PROPERTIES
                && (1..=OFFSET_DIGITS_MAX).contains(&body.len())
                && body.iter().all(u8::is_ascii_digit);
            if !is_plain {
                return None;
            }
            std::str::from_utf8(body).ok()?.parse().ok()
        })
        .collect()
}

/// Searches that are prepared once for many records. Preparing them took longer than the searches.
struct Marks {
    unusual: [Finder<'static>; 5],
    tail: Finder<'static>,
    group: Finder<'static>,
    key: Finder<'static>,
}

impl Marks {
    fn new() -> Marks {
        Marks {
            unusual: UNUSUAL.map(Finder::new),
            tail: Finder::new(TAIL),
            group: Finder::new(b"PGROUP\x01"),
            key: Finder::new(b"UNIQ_KEY\x01"),
        }
    }
}

fn record_at<'a>(window: &RecordWindow<'a>, log_offset: i64, size: u32) -> Option<&'a [u8]> {
    let begin = usize::try_from(log_offset.checked_sub(window.data_begin)?).ok()?;
    window
        .data
        .get(begin..begin.checked_add(usize::try_from(size).ok()?)?)
}

/// Read the record of a plain half. `None`: the Python path has to read it.
fn parse<'a>(record: &'a [u8], queue_offset: i64, marks: &Marks) -> Option<PlainHalf<'a>> {
    let is_expected = record.len() > 88
        && get_u32(record, 0) as usize == record.len()
        && get_u32(record, 4) == MAGIC_V1
        && get_i64(record, 20) == queue_offset;
    if !is_expected {
        return None;
    }
    let host_bits = get_u32(record, 36);
    let stored_at = if host_bits & BORN_HOST_IPV6 == 0 {
        56
    } else {
        68
    };
    let body_at = stored_at
        + if host_bits & STORE_HOST_IPV6 == 0 {
            28
        } else {
            40
        };
    let body_bytes = get_u32(record.get(body_at..body_at + 4)?, 0) as usize;
    let after_body = record.get((body_at + 4).checked_add(body_bytes)?..)?;
    let after_topic = after_body.get(1 + usize::from(*after_body.first()?)..)?;
    let (length, properties) = after_topic.split_at_checked(2)?;
    if usize::from(u16::from_be_bytes([length[0], length[1]])) != properties.len() {
        return None;
    }
    let stored_ms = get_i64(record, stored_at);
    parse_properties(properties, stored_ms, marks)
}

fn parse_properties<'a>(
    properties: &'a [u8],
    stored_ms: i64,
    marks: &Marks,
) -> Option<PlainHalf<'a>> {
    if marks
        .unusual
        .iter()
        .any(|mark| mark.find(properties).is_some())
    {
        return None;
    }
    let properties = match properties.len().checked_sub(SEAL_BYTES) {
        Some(end) if properties[end..].starts_with(SEAL_NAME) => &properties[..end],
        _ => properties,
    };
    let tail_at = marks.tail.find_iter(properties).last()?;
    let (kept, tail) = (&properties[..tail_at], &properties[tail_at + TAIL.len()..]);
    let topic_end = memchr::memchr(2, tail)?;
    let queue_id = tail[topic_end + 1..]
        .strip_prefix(QUEUE_ID)?
        .strip_suffix(b"\x02")?;
    let is_number =
        (1..=9).contains(&queue_id.len()) && queue_id.iter().all(|byte| byte.is_ascii_digit());
    let (group, key) = (
        last_value(kept, &marks.group)?,
        last_value(kept, &marks.key)?,
    );
    if !is_number || topic_end == 0 || group.is_empty() || key.is_empty() {
        return None;
    }
    Some(PlainHalf {
        stored_ms,
        topic: std::str::from_utf8(&tail[..topic_end]).ok()?,
        queue_id: std::str::from_utf8(queue_id).ok()?.parse().ok()?,
        group: std::str::from_utf8(group).ok()?,
        key,
    })
}

/// Return the value of the last property with a name, which ends with its separator.
fn last_value<'a>(properties: &'a [u8], name: &Finder<'_>) -> Option<&'a [u8]> {
    // The names cannot overlap themselves, so that no occurrence is skipped.
    let begin = name
        .find_iter(properties)
        .filter(|begin| *begin == 0 || properties[begin - 1] == 2)
        .last()?;
    let value = &properties[begin + name.needle().len()..];
    Some(&value[..memchr::memchr(2, value).unwrap_or(value.len())])
}

fn get_u32(data: &[u8], position: usize) -> u32 {
    let mut bytes = [0; 4];
    bytes.copy_from_slice(&data[position..position + 4]);
    u32::from_be_bytes(bytes)
}

fn get_i64(data: &[u8], position: usize) -> i64 {
    let mut bytes = [0; 8];
    bytes.copy_from_slice(&data[position..position + 8]);
    i64::from_be_bytes(bytes)
}
