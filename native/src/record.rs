//! Encode records of the commit log, as message/record.py does.
//!
//! Hosts are IPv4 addresses and topics have at most 127 bytes; everything else is not plain.

use crate::properties::ITEM_END;

pub const HEAD_BYTES: usize = 88;
pub const BLANK_BYTES: i64 = 8;
const MAGIC: u32 = 0xDAA3_20A7;
const MAGIC_BLANK: u32 = 0xCBD4_3194;
const CRC_MASK: u32 = 0x7FFF_FFFF;
const CRC_NAME: &[u8] = b"__CRC32#\x01";
const CRC_DIGITS: usize = 10;
const CRC_PROPERTY_BYTES: usize = CRC_NAME.len() + CRC_DIGITS + 1;
const HOST_BITS: u32 = 0x30;
const BODY_CRC_POSITION: usize = 8;
const BODY_BYTES_POSITION: usize = 84;

/// The fields of a record that are not its body, topic and properties.
#[derive(Clone, Copy, Debug)]
pub struct Fields {
    pub queue_id: i32,
    pub flag: i32,
    pub queue_offset: i64,
    pub log_offset: i64,
    pub sys_flag: i32,
    pub born_ms: i64,
    pub born_host: [u8; 8],
    pub stored_ms: i64,
    pub store_host: [u8; 8],
    pub reconsume_times: i32,
    pub prepared_offset: i64,
}

/// The parts that vary in length. The properties are the concatenation of `properties`.
#[derive(Clone, Copy, Debug)]
pub struct Parts<'a> {
    pub body: &'a [u8],
    pub topic: &'a [u8],
    pub properties: &'a [&'a [u8]],
    /// The CRC of the body, if it is known already.
    pub body_crc: Option<u32>,
}

impl Parts<'_> {
    /// Return the size of the record. The properties must end with a separator.
    pub fn record_bytes(&self, has_crc: bool) -> usize {
        HEAD_BYTES + self.body.len() + 1 + self.topic.len() + 2 + self.properties_bytes(has_crc)
    }

    fn properties_bytes(&self, has_crc: bool) -> usize {
        let own: usize = self.properties.iter().map(|part| part.len()).sum();
        own + if has_crc { CRC_PROPERTY_BYTES } else { 0 }
    }
}

/// Append a record to the buffer.
pub fn encode(buffer: &mut Vec<u8>, fields: &Fields, parts: &Parts, has_crc: bool) {
    debug_assert_eq!(
        parts.properties.last().and_then(|part| part.last()),
        Some(&ITEM_END)
    );
    let begin = buffer.len();
    buffer.reserve(parts.record_bytes(has_crc));
    let body_crc = parts
        .body_crc
        .unwrap_or_else(|| crc32fast::hash(parts.body) & CRC_MASK);
    put_u32(buffer, parts.record_bytes(has_crc) as u32);
    put_u32(buffer, MAGIC);
    put_u32(buffer, body_crc);
    put_u32(buffer, fields.queue_id as u32);
    put_u32(buffer, fields.flag as u32);
    put_u64(buffer, fields.queue_offset);
    put_u64(buffer, fields.log_offset);
    put_u32(buffer, fields.sys_flag as u32);
    put_u64(buffer, fields.born_ms);
    buffer.extend_from_slice(&fields.born_host);
    put_u64(buffer, fields.stored_ms);
    buffer.extend_from_slice(&fields.store_host);
    put_u32(buffer, fields.reconsume_times as u32);
    put_u64(buffer, fields.prepared_offset);
    put_u32(buffer, parts.body.len() as u32);
    buffer.extend_from_slice(parts.body);
    buffer.push(parts.topic.len() as u8);
    buffer.extend_from_slice(parts.topic);
    buffer.extend_from_slice(&(parts.properties_bytes(has_crc) as u16).to_be_bytes());
    for part in parts.properties {
        buffer.extend_from_slice(part);
    }
    if has_crc {
        let crc = crc32fast::hash(&buffer[begin..]) & CRC_MASK;
        put_crc_property(buffer, crc);
    }
}

/// Append the record CRC as the last property: the least significant digit first.
fn put_crc_property(buffer: &mut Vec<u8>, crc: u32) {
    buffer.extend_from_slice(CRC_NAME);
    let mut rest = crc;
    for _ in 0..CRC_DIGITS {
        buffer.push(b'0' + (rest % 10) as u8);
        rest /= 10;
    }
    buffer.push(ITEM_END);
}

/// Append the record that fills the end of a segment.
pub fn encode_blank(buffer: &mut Vec<u8>, remaining_bytes: i64) {
    put_u32(buffer, remaining_bytes as u32);
    put_u32(buffer, MAGIC_BLANK);
}

fn put_u32(buffer: &mut Vec<u8>, value: u32) {
    buffer.extend_from_slice(&value.to_be_bytes());
}

fn put_u64(buffer: &mut Vec<u8>, value: i64) {
    buffer.extend_from_slice(&value.to_be_bytes());
}

/// A plain half message in the log, written by either path.
#[derive(Debug)]
pub struct StoredHalf<'a> {
    pub body_crc: u32,
    pub flag: i32,
    pub sys_flag: i32,
    pub born_ms: i64,
    pub born_host: [u8; 8],
    pub reconsume_times: i32,
    pub body: &'a [u8],
    /// The properties of the final: those of the half begin with them.
    pub final_properties: &'a [u8],
}

/// Read what a final needs of its half, whose record begins `data`. `None` if it is not all there.
pub fn read_half(data: &[u8], final_properties_bytes: usize) -> Option<StoredHalf<'_>> {
    let head = data.get(..HEAD_BYTES)?;
    if get_u32(head, 36) & HOST_BITS != 0 {
        return None; // a longer head, with an IPv6 address
    }
    let body_bytes = get_u32(head, BODY_BYTES_POSITION) as usize;
    let body = data.get(HEAD_BYTES..HEAD_BYTES.checked_add(body_bytes)?)?;
    let after_body = &data[HEAD_BYTES + body_bytes..];
    let topic_bytes = usize::from(*after_body.first()?);
    let properties_begin = 1 + topic_bytes + 2;
    let final_properties =
        after_body.get(properties_begin..properties_begin + final_properties_bytes)?;
    Some(StoredHalf {
        body_crc: get_u32(head, BODY_CRC_POSITION),
        flag: get_u32(head, 16) as i32,
        sys_flag: get_u32(head, 36) as i32,
        born_ms: i64::from_be_bytes(head[40..48].try_into().ok()?),
        born_host: head[48..56].try_into().ok()?,
        reconsume_times: get_u32(head, 72) as i32,
        body,
        final_properties,
    })
}

fn get_u32(data: &[u8], position: usize) -> u32 {
    u32::from_be_bytes([
        data[position],
        data[position + 1],
        data[position + 2],
        data[position + 3],
    ])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_half_that_is_encoded_is_read_again() {
        let fields = Fields {
            queue_id: 1,
            flag: 17,
            queue_offset: 2,
            log_offset: 3,
            sys_flag: 1,
            born_ms: 1_700_000_000_123,
            born_host: *b"hostport",
            stored_ms: 4,
            store_host: [0; 8],
            reconsume_times: 5,
            prepared_offset: 6,
        };
        let properties: &[&[u8]] = &[b"UNIQ_KEY\x01A\x02", b"TRAN_MSG\x01true\x02"];
        let parts = Parts {
            body: b"hello",
            topic: b"T",
            properties,
            body_crc: None,
        };
        let mut log = Vec::new();
        encode(&mut log, &fields, &parts, true);
        assert_eq!(log.len(), parts.record_bytes(true));
        let half = read_half(&log, properties[0].len()).unwrap();
        assert_eq!(
            (half.body, half.final_properties),
            (&b"hello"[..], properties[0])
        );
        assert_eq!((half.flag, half.sys_flag, half.reconsume_times), (17, 1, 5));
        assert_eq!(
            (half.born_ms, half.born_host),
            (fields.born_ms, fields.born_host)
        );
        for end in 0..log.len() {
            let _ = read_half(&log[..end], properties[0].len());
        }
    }
}
