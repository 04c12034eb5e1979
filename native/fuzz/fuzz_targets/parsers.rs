//! The parts that read bytes of clients and of the log, without an interpreter.
//!
//! They must not panic, and what they accept must have a meaning that can be written down again.
#![no_main]
#![allow(dead_code)] // each module is used in part

#[path = "../../src/header.rs"]
mod header;
#[path = "../../src/java_hash.rs"]
mod java_hash;
#[path = "../../src/properties.rs"]
mod properties;
#[path = "../../src/record.rs"]
mod record;
#[path = "../../src/response.rs"]
mod response;

use header::{PlainHeader, SignedFields};
use libfuzzer_sys::fuzz_target;
use record::{Fields, Parts};

const FINAL_PROPERTIES_BYTES_MAX: usize = 1 << 15;

fuzz_target!(|data: &[u8]| {
    read_header(data);
    read_properties(data);
    read_half(data);
    encode_and_read(data);
});

fn read_header(data: &[u8]) {
    let mut decoded = b"of the request before".to_vec();
    let mut signed = SignedFields::default();
    let Some((head, fields)) = header::parse(data, &mut decoded, Some(&mut signed)) else {
        return;
    };
    assert!(
        data.is_ascii()
            && decoded
                .iter()
                .all(|byte| matches!(byte, 1 | 2 | b' '..=b'~'))
    );
    match fields {
        PlainHeader::Send(send) => {
            assert!(send.topic.iter().all(|byte| (b' '..=b'~').contains(byte)));
            let _ = properties::parse(&decoded);
        }
        PlainHeader::End(end) => assert!(std::str::from_utf8(end.group).is_ok()),
        PlainHeader::Pull(pull) => {
            let texts = [Some(pull.group), Some(pull.topic), pull.subscription];
            let mut texts = texts.into_iter().chain([pull.expression_type]).flatten();
            assert!(texts.all(|text| text.iter().all(|byte| (b' '..=b'~').contains(byte))));
        }
    }
    let unsigned = [signed.access_key, signed.signature];
    assert!(unsigned.iter().all(|text| text.is_ascii()));
    // The signature covers no byte that is not in the header, and none twice.
    let covered: usize = signed.sorted_values(b"").map(<[u8]>::len).sum();
    assert!(covered + signed.signature.len() < data.len());
    let mut opaque = Vec::new();
    response::number(&mut opaque, i64::from(head.opaque));
    assert_eq!(
        std::str::from_utf8(&opaque).unwrap().parse(),
        Ok(head.opaque)
    );
}

fn read_properties(data: &[u8]) {
    let Some(parsed) = properties::parse(data) else {
        return;
    };
    assert!(!parsed.unique_key.is_empty());
    assert_eq!(
        properties::index_keys(&parsed).next(),
        Some(parsed.unique_key)
    );
    for key in properties::index_keys(&parsed) {
        assert!(!key.is_empty() && java_hash::index_hash(7, key) < 1 << 31);
    }
    if let Some((begin, end)) = parsed.half_mark {
        assert_eq!(&data[begin..end], b"TRAN_MSG\x01true\x02");
        // What is kept of a half has the same meaning, without the mark.
        let kept = [&data[..begin], &data[end..]].concat();
        let again = properties::parse(&kept).expect("the rest is plain too");
        assert_eq!((again.half_mark, again.tags), (None, parsed.tags));
        assert_eq!((again.keys, again.group), (parsed.keys, parsed.group));
    }
}

/// Whatever is in the log: what is read of it lies within it.
fn read_half(data: &[u8]) {
    let Some((size, data)) = data.split_first() else {
        return;
    };
    for final_properties_bytes in [0, usize::from(*size), FINAL_PROPERTIES_BYTES_MAX] {
        if let Some(half) = record::read_half(data, final_properties_bytes) {
            assert_eq!(half.final_properties.len(), final_properties_bytes);
            assert!(half.body.len() + final_properties_bytes <= data.len());
        }
    }
}

/// A half that is encoded is read again as it was.
fn encode_and_read(data: &[u8]) {
    if data.len() < 48 || data.len() > 4096 {
        return;
    }
    let (head, rest) = data.split_at(48);
    let number = |at: usize| i64::from_be_bytes(head[at..at + 8].try_into().unwrap());
    let (body, properties) = rest.split_at(rest.len() / 2);
    let fields = Fields {
        queue_id: number(0) as i32,
        flag: number(8) as i32,
        queue_offset: number(16),
        log_offset: number(24),
        sys_flag: number(32) as i32 & 0x703,
        born_ms: number(40),
        born_host: head[..8].try_into().unwrap(),
        stored_ms: number(16),
        store_host: head[8..16].try_into().unwrap(),
        reconsume_times: number(4) as i32,
        prepared_offset: number(12),
    };
    let parts = Parts {
        body,
        topic: b"T",
        properties: &[properties, b"\x02"],
        body_crc: None,
    };
    for has_crc in [false, true] {
        let mut log = Vec::new();
        record::encode(&mut log, &fields, &parts, has_crc);
        assert_eq!(log.len(), parts.record_bytes(has_crc));
        let half = record::read_half(&log, properties.len() + 1).expect("it is all there");
        assert_eq!((half.body, half.flag), (body, fields.flag));
        assert_eq!(
            (half.born_ms, half.born_host),
            (fields.born_ms, fields.born_host)
        );
        assert_eq!(half.final_properties, [properties, b"\x02"].concat());
        assert!(
            record::read_half(&log[..log.len() - 1], properties.len() + 2).is_none() || has_crc
        );
    }
}
