//! Check records that were read from the disk for a pull, as store/log_reads.py does.

use pyo3::prelude::*;
use pyo3::types::PyBytes;

const HEAD_BYTES: usize = 88;
const RECORD_BYTES_MIN: usize = 91;
const HOST_BITS: u32 = 0x30;
const CRC_MASK: u32 = 0x7FFF_FFFF;
const SEAL_BYTES: usize = 20;
const SEAL_NAME: &[u8] = b"__CRC32#\x01";
const SEAL_END: u8 = 2;

/// Begin and end of neighbouring records in the log, and the queue offset of the first.
type LogRange = (i64, i64, i64);

/// Return whether ranges of neighbouring records of one queue are right.
///
/// `data` begins at the log offset `data_begin`. `topic_field` is the topic with its length, as
/// records with this `magic` hold it. False also for a record that is right but unusual: the Python
/// version looks at it then, and says what is wrong if anything is.
#[pyfunction]
pub fn records_are_right(
    data: &Bound<'_, PyBytes>,
    data_begin: i64,
    ranges: Vec<LogRange>,
    magic: u32,
    topic_field: &[u8],
    queue_id: i32,
) -> bool {
    let data = data.as_bytes();
    ranges.into_iter().all(|(begin, end, queue_offset)| {
        let position = usize::try_from(begin - data_begin);
        let end = usize::try_from(end - data_begin);
        let (Ok(position), Ok(end)) = (position, end) else {
            return false;
        };
        let Some(data) = data.get(..end) else {
            return false;
        };
        let check = RecordCheck {
            magic,
            topic_field,
            queue_id,
        };
        let data = data.get(position..).unwrap_or_default();
        check.range_is_right(data, begin, queue_offset)
    })
}

/// What all records of one queue have in common.
pub struct RecordCheck<'a> {
    pub magic: u32,
    pub topic_field: &'a [u8],
    pub queue_id: i32,
}

impl RecordCheck<'_> {
    /// Return whether this is exactly the expected record. `is_checked`: its checksum is right.
    pub fn is_right(
        &self,
        record: &[u8],
        log_offset: i64,
        queue_offset: i64,
        is_checked: bool,
    ) -> bool {
        let found = self.expected_record(record, log_offset, queue_offset);
        found.is_some_and(|(bytes, body)| {
            bytes.len() == record.len() && (is_checked || has_right_checksum(bytes, body))
        })
    }

    /// Return body and properties of a record without its seal, if it is exactly the expected one
    /// and its checksum is right.
    pub fn parts_of<'d>(
        &self,
        record: &'d [u8],
        log_offset: i64,
        queue_offset: i64,
    ) -> Option<(&'d [u8], &'d [u8])> {
        let (bytes, body) = self.expected_record(record, log_offset, queue_offset)?;
        if bytes.len() != record.len() || !has_right_checksum(bytes, body) {
            return None;
        }
        let length_at = HEAD_BYTES + body.len() + self.topic_field.len();
        let (length, properties) = record[length_at..].split_at_checked(2)?;
        if usize::from(u16::from_be_bytes([length[0], length[1]])) != properties.len() {
            return None;
        }
        let kept = match properties.len().checked_sub(SEAL_BYTES) {
            Some(end) if properties[end..].starts_with(SEAL_NAME) => &properties[..end],
            _ => properties,
        };
        Some((body, kept))
    }

    /// Return whether data that begins at a log offset are records that follow each other.
    fn range_is_right(&self, data: &[u8], log_offset: i64, mut queue_offset: i64) -> bool {
        let mut position = 0;
        while position < data.len() {
            let record_offset = log_offset + position as i64;
            let rest = &data[position..];
            let Some(size) = self.right_record_bytes(rest, record_offset, queue_offset) else {
                return false;
            };
            position += size;
            queue_offset += 1;
        }
        true
    }

    /// Return the size of the record at the begin of the data, if it is the expected one and right.
    fn right_record_bytes(&self, rest: &[u8], log_offset: i64, queue_offset: i64) -> Option<usize> {
        let (record, body) = self.expected_record(rest, log_offset, queue_offset)?;
        has_right_checksum(record, body).then_some(record.len())
    }

    /// Return the record at the begin of the data and its body, if it is the expected one. Its
    /// checksum may be wrong.
    fn expected_record<'d>(
        &self,
        rest: &'d [u8],
        log_offset: i64,
        queue_offset: i64,
    ) -> Option<(&'d [u8], &'d [u8])> {
        if rest.len() < RECORD_BYTES_MIN {
            return None;
        }
        let size = usize::try_from(get_u32(rest, 0) as i32).ok()?;
        let body_bytes = usize::try_from(get_u32(rest, 84) as i32).ok()?;
        let record = rest.get(..size)?;
        let topic_begin = HEAD_BYTES.checked_add(body_bytes)?;
        let topic_end = topic_begin.checked_add(self.topic_field.len())?;
        let is_expected = get_u32(rest, 4) == self.magic
            && get_u32(rest, 12) as i32 == self.queue_id
            && get_i64(rest, 20) == queue_offset
            && get_i64(rest, 28) == log_offset
            && get_u32(rest, 36) & HOST_BITS == 0
            && topic_end + 2 <= size
            && record.get(topic_begin..topic_end)? == self.topic_field;
        is_expected.then(|| (record, &record[HEAD_BYTES..topic_begin]))
    }
}

fn has_right_checksum(record: &[u8], body: &[u8]) -> bool {
    let (sealed, seal) = record.split_at(record.len() - SEAL_BYTES);
    if seal.starts_with(SEAL_NAME) {
        let mut rest = crc32fast::hash(sealed) & CRC_MASK;
        let digits = &seal[SEAL_NAME.len()..SEAL_BYTES - 1];
        let are_right = digits.iter().all(|digit| {
            let expected = b'0' + (rest % 10) as u8; // the least significant digit first
            rest /= 10;
            *digit == expected
        });
        return are_right && seal[SEAL_BYTES - 1] == SEAL_END;
    }
    if seal[9..19].iter().all(u8::is_ascii_digit) {
        return false; // perhaps the name is damaged
    }
    crc32fast::hash(body) & CRC_MASK == get_u32(record, 8)
}

fn get_u32(data: &[u8], position: usize) -> u32 {
    u32::from_be_bytes([
        data[position],
        data[position + 1],
        data[position + 2],
        data[position + 3],
    ])
}

fn get_i64(data: &[u8], position: usize) -> i64 {
    (i64::from(get_u32(data, position)) << 32) | i64::from(get_u32(data, position + 4))
}
