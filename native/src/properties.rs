//! The properties of a message, as far as the plain path has to know them.
//!
//!     name 0x01 value 0x02 name 0x01 value 0x02 ...

use memchr::memchr;

const NAME_END: u8 = 1;
pub const ITEM_END: u8 = 2;

/// What is needed of the properties of a message to store it. The slices are parts of them.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct PlainProperties<'a> {
    pub unique_key: &'a [u8],
    pub tags: &'a [u8],
    pub keys: &'a [u8],
    pub group: &'a [u8],
    /// Where the item TRAN_MSG begins and ends, if the message is a half message.
    pub half_mark: Option<(usize, usize)>,
}

/// Read properties in which nothing is special. `None`: the Python path has to read them.
///
/// Special is whatever delays a message, is reserved for the broker, or asks for something (see
/// message/broker_marks.py), and every form that a real client does not write: an empty name or
/// value, or a name that occurs twice.
pub fn parse(properties: &[u8]) -> Option<PlainProperties<'_>> {
    let mut parsed = PlainProperties::default();
    let mut begin = 0;
    while begin < properties.len() {
        let item_end =
            memchr(ITEM_END, &properties[begin..]).map_or(properties.len(), |i| begin + i);
        let item = &properties[begin..item_end];
        let name_end = memchr(NAME_END, item)?;
        let (name, value) = (&item[..name_end], &item[name_end + 1..]);
        if name.is_empty() || value.is_empty() || memchr(NAME_END, value).is_some() {
            return None;
        }
        match name {
            b"UNIQ_KEY" => set(&mut parsed.unique_key, value)?,
            b"TAGS" => set(&mut parsed.tags, value)?,
            b"KEYS" => set(&mut parsed.keys, value)?,
            b"PGROUP" => set(&mut parsed.group, value)?,
            b"TRAN_MSG" => {
                // It is cut out with its separator.
                if value != b"true" || parsed.half_mark.is_some() || item_end == properties.len() {
                    return None;
                }
                parsed.half_mark = Some((begin, item_end + 1));
            }
            b"WAIT" if value != b"true" => return None,
            _ if is_special(name) => return None,
            _ => {}
        }
        begin = item_end + 1;
    }
    // A half repeats its key as the transaction id, in responses too: nothing needs an escape.
    let is_valid_key =
        !parsed.unique_key.is_empty() && parsed.unique_key.iter().all(u8::is_ascii_alphanumeric);
    is_valid_key.then_some(parsed)
}

fn set<'a>(field: &mut &'a [u8], value: &'a [u8]) -> Option<()> {
    if !field.is_empty() {
        return None;
    }
    *field = value;
    Some(())
}

fn is_special(name: &[u8]) -> bool {
    match name[0] {
        b'_' => name.starts_with(b"__"),
        b'C' => name.starts_with(b"CHECK_") || name == b"CLUSTER",
        b'D' => name == b"DELAY",
        b'E' => name.starts_with(b"ESCROW_"),
        b'M' => name == b"MSG_REGION",
        b'P' => name.starts_with(b"POP_"),
        b'R' => name.starts_with(b"REAL_"),
        b'T' => name.starts_with(b"TRAN_") || name.starts_with(b"TIMER_") || name == b"TRACE_ON",
        _ => false,
    }
}

/// Yield the keys of a message for the key index: the unique key first.
pub fn index_keys<'a>(parsed: &PlainProperties<'a>) -> impl Iterator<Item = &'a [u8]> + use<'a> {
    let user_keys = parsed.keys;
    std::iter::once(parsed.unique_key).chain(
        user_keys
            .split(|byte| *byte == b' ')
            .filter(|key| !key.is_empty()),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    const HALF: &[u8] = b"UNIQ_KEY\x01A1\x02TRAN_MSG\x01true\x02PGROUP\x01g\x02KEYS\x01k1  k2\x02";

    #[test]
    fn a_half_has_a_mark_and_keys() {
        let parsed = parse(HALF).unwrap();
        let (begin, end) = parsed.half_mark.unwrap();
        assert_eq!(&HALF[begin..end], b"TRAN_MSG\x01true\x02");
        let keys: Vec<&[u8]> = index_keys(&parsed).collect();
        assert_eq!(keys, [&b"A1"[..], b"k1", b"k2"]);
    }

    #[test]
    fn properties_that_are_cut_or_damaged_do_no_harm() {
        for end in 0..HALF.len() {
            let _ = parse(&HALF[..end]);
            for byte in [0, 1, 2, b'_', 0xFF] {
                let mut damaged = HALF.to_vec();
                damaged[end] = byte;
                let _ = parse(&damaged);
            }
        }
    }
}
