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
        let mut reader = Reader {
            data,
            data_begin,
            magic,
            topic_field,
            queue_id,
        };
        reader.range_is_right(position, queue_offset)
    })
}

struct Reader<'a> {
    data: &'a [u8], // up to the end of the range
    data_begin: i64,
    magic: u32,
    topic_field: &'a [u8],
    queue_id: i32,
}

impl Reader<'_> {
    fn range_is_right(&mut self, mut position: usize, mut queue_offset: i64) -> bool {
        while position < self.data.len() {
            let Some(size) = self.right_record_bytes(position, queue_offset) else {
                return false;
            };
            position += size;
            queue_offset += 1;
        }
        true
    }

    /// Return the size of the record at a position, if it is the expected one and right.
    fn right_record_bytes(&self, position: usize, queue_offset: i64) -> Option<usize> {
        let rest = &self.data[position..];
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
            && get_i64(rest, 28) == self.data_begin + position as i64
            && get_u32(rest, 36) & HOST_BITS == 0
            && topic_end + 2 <= size
            && record.get(topic_begin..topic_end)? == self.topic_field;
        (is_expected && has_right_checksum(record, &record[HEAD_BYTES..topic_begin]))
            .then_some(size)
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
