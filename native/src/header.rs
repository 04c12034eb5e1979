//! The JSON header of a request, read without allocating anything.
//!
//!     {"code":310,"extFields":{"a":"group","b":"topic",...},"flag":0,"opaque":7,...}
//!
//! Only a *plain* header is read: the form that real clients write, with the keys that the plain
//! path understands. `None` means "not plain", never "invalid": the Python path reads such a header
//! again and decides. So every check here may be stricter than the Python path, and none may be
//! more lenient. In particular a key that occurs twice, a number with a leading zero, a character
//! outside of printable ASCII, and any key that is not expected are not plain. Neither is an escape,
//! except in the properties of a message, which have separators: whether it is valid is not known
//! here.

/// The part of a header that all requests share.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Head {
    pub code: i32,
    pub opaque: i32,
    pub is_oneway: bool,
}

/// SEND_MESSAGE_V2. The properties are decoded into the buffer that `parse` got.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct SendHeader<'a> {
    pub topic: &'a [u8],
    pub queue_id: i32,
    pub sys_flag: i32,
    pub born_ms: i64,
    pub flag: i32,
    pub reconsume_times: i32,
}

/// END_TRANSACTION, sent by a producer of its own accord.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct EndHeader<'a> {
    pub group: &'a [u8],
    pub queue_offset: i64,
    pub log_offset: i64,
    pub is_commit: bool,
}

/// PULL_MESSAGE and LITE_PULL_MESSAGE.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct PullHeader<'a> {
    pub group: &'a [u8],
    pub topic: &'a [u8],
    pub queue_id: i32,
    pub queue_offset: i64,
    pub max_messages: i32,
    pub sys_flag: i32,
    pub commit_offset: i64,
    pub subscription: Option<&'a [u8]>,
    pub sub_version: i64,
    pub expression_type: Option<&'a [u8]>,
    pub max_bytes: Option<i32>,
}

/// The extFields of a request as a signature covers them.
#[derive(Debug, Default)]
pub struct SignedFields<'a> {
    pub access_key: &'a [u8],
    pub signature: &'a [u8],
    values: [(&'a [u8], &'a [u8]); FIELDS_MAX], // names and raw values, without the signature
    count: usize,
}

impl<'a> SignedFields<'a> {
    fn add(&mut self, name: &'a [u8], value: &'a [u8]) -> Option<()> {
        *self.values.get_mut(self.count)? = (name, value);
        self.count += 1;
        Some(())
    }

    /// Return the values in the order of their names. `properties` are those of a send: their value
    /// is the only one that has to be decoded.
    pub fn sorted_values<'b>(&'b mut self, properties: &'b [u8]) -> impl Iterator<Item = &'b [u8]> {
        let values = &mut self.values[..self.count];
        values.sort_unstable();
        values.iter().map(move |(name, value)| {
            if *name == PROPERTIES {
                properties
            } else {
                value
            }
        })
    }
}

#[derive(Debug, PartialEq, Eq)]
pub enum PlainHeader<'a> {
    Send(SendHeader<'a>),
    End(EndHeader<'a>),
    Pull(PullHeader<'a>),
}

/// The bytes that a string may contain as they are: printable ASCII but for quote and backslash.
const IS_ORDINARY: [bool; 256] = {
    let mut table = [false; 256];
    let mut byte = b' ';
    while byte <= b'~' {
        table[byte as usize] = byte != b'"' && byte != b'\\';
        byte += 1;
    }
    table
};

const SEND_MESSAGE_V2: i32 = 310;
const END_TRANSACTION: i32 = 37;
const PULL_MESSAGE: i32 = 11;
const LITE_PULL_MESSAGE: i32 = 361;
const FLAG_RESPONSE: i32 = 1;
const FLAG_ONEWAY: i32 = 2;
const VERDICT_COMMIT: i32 = 8;
const VERDICT_ROLLBACK: i32 = 12;
const PROPERTIES: &[u8] = b"i"; // in a send
/// More than any plain request has: a send has 14 fields, and 3 if it is signed.
const FIELDS_MAX: usize = 20;
// The bits of fields that any request may have. Those of its own come before them.
const ACCESS_KEY_BIT: u32 = 29;
const SIGNATURE_BIT: u32 = 30;
const SECURITY_TOKEN_BIT: u32 = 31;

/// Read a plain header. The decoded properties of a send replace the content of `properties`.
/// `signed` gets what a signature covers; it is large, so there is none where nobody verifies it.
pub fn parse<'a>(
    header: &'a [u8],
    properties: &mut Vec<u8>,
    signed: Option<&mut SignedFields<'a>>,
) -> Option<(Head, PlainHeader<'a>)> {
    let mut cursor = Cursor {
        bytes: header,
        position: 0,
        signed,
    };
    let mut head = Head::default();
    let mut fields: Option<PlainHeader<'a>> = None;
    let mut has_remark = false;
    let mut seen = 0u32;
    cursor.expect(b'{')?;
    loop {
        let (name, _) = cursor.string()?;
        cursor.expect(b':')?;
        let bit = match name {
            b"code" => {
                head.code = cursor.number()?;
                1
            }
            b"flag" => {
                let flag: i32 = cursor.number()?;
                if flag & FLAG_RESPONSE != 0 || flag & !FLAG_ONEWAY != 0 {
                    return None;
                }
                head.is_oneway = flag & FLAG_ONEWAY != 0;
                2
            }
            b"opaque" => {
                head.opaque = cursor.number()?;
                4
            }
            b"version" => {
                let _: i32 = cursor.number()?;
                8
            }
            b"language" => {
                cursor.text()?;
                16
            }
            b"serializeTypeCurrentRPC" => {
                cursor.text()?;
                32
            }
            b"remark" => {
                if !cursor.null() {
                    has_remark = !cursor.text()?.is_empty();
                }
                64
            }
            // The keys that are read depend on the code, which every known client writes first.
            b"extFields" => {
                fields = Some(match head.code {
                    SEND_MESSAGE_V2 => PlainHeader::Send(cursor.send_fields(properties)?),
                    END_TRANSACTION => PlainHeader::End(cursor.end_fields()?),
                    PULL_MESSAGE | LITE_PULL_MESSAGE => PlainHeader::Pull(cursor.pull_fields()?),
                    _ => return None,
                });
                128
            }
            _ => return None,
        };
        if seen & bit != 0 {
            return None;
        }
        seen |= bit;
        if !cursor.more()? {
            break;
        }
    }
    if cursor.position != header.len() {
        return None;
    }
    let fields = fields?;
    // The remark of a commit is not kept; that of a rollback is, by the Python path.
    if has_remark && !matches!(&fields, PlainHeader::End(end) if end.is_commit) {
        return None;
    }
    Some((head, fields))
}

struct Cursor<'a, 's> {
    bytes: &'a [u8],
    position: usize,
    signed: Option<&'s mut SignedFields<'a>>,
}

impl<'a> Cursor<'a, '_> {
    fn peek(&self) -> Option<u8> {
        self.bytes.get(self.position).copied()
    }

    fn expect(&mut self, byte: u8) -> Option<()> {
        self.skip_spaces();
        (self.peek()? == byte).then(|| self.position += 1)
    }

    fn skip_spaces(&mut self) {
        while self.peek() == Some(b' ') {
            self.position += 1;
        }
    }

    /// Pass the comma before the next item, or the end of the object. Return whether there is one.
    fn more(&mut self) -> Option<bool> {
        self.skip_spaces();
        let byte = self.peek()?;
        self.position += 1;
        match byte {
            b',' => Some(true),
            b'}' => Some(false),
            _ => None,
        }
    }

    fn null(&mut self) -> bool {
        self.skip_spaces();
        let is_null = self.bytes[self.position.min(self.bytes.len())..].starts_with(b"null");
        if is_null {
            self.position += 4;
        }
        is_null
    }

    /// Return the raw content of a string, and whether it contains escapes.
    fn string(&mut self) -> Option<(&'a [u8], bool)> {
        self.expect(b'"')?;
        let rest = &self.bytes[self.position..];
        let mut length = 0;
        let mut has_escapes = false;
        loop {
            length += rest
                .get(length..)?
                .iter()
                .position(|byte| !IS_ORDINARY[usize::from(*byte)])?;
            match rest[length] {
                b'"' => break,
                b'\\' => {
                    has_escapes = true;
                    length += 2;
                }
                _ => return None,
            }
        }
        self.position += length + 1;
        Some((&rest[..length], has_escapes))
    }

    fn text(&mut self) -> Option<&'a [u8]> {
        let (content, has_escapes) = self.string()?;
        (!has_escapes).then_some(content)
    }

    /// Pass a string that is not needed, and return the bit of its name.
    fn skipped_text(&mut self, bit: u32) -> Option<u32> {
        self.text().map(|_| bit)
    }

    /// Read a JSON number.
    fn number<T: TryFrom<i64>>(&mut self) -> Option<T> {
        self.skip_spaces();
        let begin = self.position;
        while matches!(self.peek(), Some(b'0'..=b'9' | b'-')) {
            self.position += 1;
        }
        T::try_from(decimal(&self.bytes[begin..self.position])?).ok()
    }

    /// Read a number that is written as a string, as all numbers in extFields are.
    fn text_number<T: TryFrom<i64>>(&mut self) -> Option<T> {
        T::try_from(decimal(self.text()?)?).ok()
    }

    fn text_boolean(&mut self) -> Option<bool> {
        match self.text()? {
            b"true" => Some(true),
            b"false" => Some(false),
            _ => None,
        }
    }

    /// Read extFields. `field` gets each name and reads its value; it returns a bit that stands
    /// for the name. Return all bits.
    fn fields(&mut self, mut field: impl FnMut(&mut Self, &[u8]) -> Option<u32>) -> Option<u32> {
        let mut seen = 0u32;
        self.expect(b'{')?;
        loop {
            let name = self.text()?;
            self.expect(b':')?;
            self.skip_spaces();
            let begin = self.position;
            let bit = 1
                << match name {
                    b"AccessKey" => {
                        let access_key = self.text()?;
                        if let Some(signed) = &mut self.signed {
                            signed.access_key = access_key;
                        }
                        ACCESS_KEY_BIT
                    }
                    b"Signature" => {
                        let signature = self.text()?;
                        if let Some(signed) = &mut self.signed {
                            signed.signature = signature;
                        }
                        SIGNATURE_BIT
                    }
                    b"SecurityToken" => self.skipped_text(SECURITY_TOKEN_BIT)?,
                    _ => field(self, name)?,
                };
            if bit != 1 << SIGNATURE_BIT
                && let Some(signed) = &mut self.signed
            {
                // Every value is a string: leave out its quotes.
                let value = &self.bytes[begin + 1..self.position - 1];
                signed.add(name, value)?;
            }
            if seen & bit != 0 {
                return None;
            }
            seen |= bit;
            if !self.more()? {
                return Some(seen);
            }
        }
    }

    fn send_fields(&mut self, properties: &mut Vec<u8>) -> Option<SendHeader<'a>> {
        let mut header = SendHeader::default();
        properties.clear();
        let seen = self.fields(|cursor, name| {
            let [letter @ b'a'..=b'n'] = name else {
                return None;
            };
            match letter {
                b'a' | b'c' | b'n' => {
                    cursor.text()?;
                }
                b'b' => header.topic = cursor.text()?,
                b'd' | b'l' => {
                    let _: i32 = cursor.text_number()?;
                }
                b'e' => header.queue_id = cursor.text_number()?,
                b'f' => header.sys_flag = cursor.text_number()?,
                b'g' => header.born_ms = cursor.text_number()?,
                b'h' => header.flag = cursor.text_number()?,
                b'i' => unescape(cursor.string()?.0, properties)?,
                b'j' => header.reconsume_times = cursor.text_number()?,
                b'k' => {
                    cursor.text_boolean()?;
                }
                // `m`: the body is a batch.
                _ => {
                    if cursor.text_boolean()? {
                        return None;
                    }
                }
            }
            Some(u32::from(letter - b'a'))
        })?;
        let required = 1 << 0 | 1 << 1 | 1 << 4; // group, topic, queue id
        (seen & required == required).then_some(header)
    }

    fn end_fields(&mut self) -> Option<EndHeader<'a>> {
        let mut header = EndHeader::default();
        let seen = self.fields(|cursor, name| {
            Some(match name {
                b"producerGroup" => {
                    header.group = cursor.text()?;
                    0
                }
                b"tranStateTableOffset" => {
                    header.queue_offset = cursor.text_number()?;
                    1
                }
                b"commitLogOffset" => {
                    header.log_offset = cursor.text_number()?;
                    2
                }
                b"commitOrRollback" => {
                    header.is_commit = match cursor.text_number::<i32>()? {
                        VERDICT_COMMIT => true,
                        VERDICT_ROLLBACK => false,
                        _ => return None,
                    };
                    3
                }
                b"fromTransactionCheck" => {
                    if cursor.text_boolean()? {
                        return None;
                    }
                    4
                }
                b"topic" => cursor.skipped_text(5)?,
                b"msgId" => cursor.skipped_text(6)?,
                b"transactionId" => cursor.skipped_text(7)?,
                b"bname" => cursor.skipped_text(8)?,
                _ => return None,
            })
        })?;
        (seen & 0b1111 == 0b1111).then_some(header)
    }
}

impl<'a> Cursor<'a, '_> {
    fn pull_fields(&mut self) -> Option<PullHeader<'a>> {
        let mut header = PullHeader::default();
        let seen = self.fields(|cursor, name| {
            Some(match name {
                b"consumerGroup" => {
                    header.group = cursor.text()?;
                    0
                }
                b"topic" => {
                    header.topic = cursor.text()?;
                    1
                }
                b"queueId" => {
                    header.queue_id = cursor.text_number()?;
                    2
                }
                b"queueOffset" => {
                    header.queue_offset = cursor.text_number()?;
                    3
                }
                b"maxMsgNums" => {
                    header.max_messages = cursor.text_number()?;
                    4
                }
                b"sysFlag" => {
                    header.sys_flag = cursor.text_number()?;
                    5
                }
                b"commitOffset" => {
                    header.commit_offset = cursor.text_number()?;
                    6
                }
                b"suspendTimeoutMillis" => {
                    let _: i64 = cursor.text_number()?;
                    7
                }
                b"subscription" => {
                    header.subscription = Some(cursor.text()?);
                    8
                }
                b"subVersion" => {
                    header.sub_version = cursor.text_number()?;
                    9
                }
                b"expressionType" => {
                    header.expression_type = Some(cursor.text()?);
                    10
                }
                b"maxMsgBytes" => {
                    header.max_bytes = Some(cursor.text_number()?);
                    11
                }
                b"bname" => cursor.skipped_text(12)?,
                _ => return None,
            })
        })?;
        (seen & 0b11_1111 == 0b11_1111).then_some(header)
    }
}

/// Return a number in the form that every client writes it.
fn decimal(digits: &[u8]) -> Option<i64> {
    let (is_negative, magnitude) = match digits {
        [b'-', rest @ ..] => (true, rest),
        _ => (false, digits),
    };
    // 18 digits fit into 64 bits; no offset and no time has more.
    if magnitude.is_empty()
        || magnitude.len() > 18
        || (magnitude[0] == b'0' && (magnitude.len() > 1 || is_negative))
    {
        return None;
    }
    let mut value = 0i64;
    for digit in magnitude {
        if !digit.is_ascii_digit() {
            return None;
        }
        value = value * 10 + i64::from(digit - b'0');
    }
    Some(if is_negative { -value } else { value })
}

/// Decode the escapes of properties: the two separators and printable ASCII.
fn unescape(raw: &[u8], decoded: &mut Vec<u8>) -> Option<()> {
    let mut rest = raw;
    while let Some(position) = memchr::memchr(b'\\', rest) {
        decoded.extend_from_slice(&rest[..position]);
        let escape = &rest[position + 1..];
        match escape.first()? {
            b'u' => {
                let digits = escape.get(1..5)?;
                let code = u16::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()?;
                // from_str_radix accepts a sign.
                if !digits[0].is_ascii_hexdigit() || !matches!(code, 1 | 2 | 0x20..=0x7e) {
                    return None;
                }
                decoded.push(code as u8);
                rest = &escape[5..];
            }
            byte @ (b'"' | b'\\' | b'/') => {
                decoded.push(*byte);
                rest = &escape[1..];
            }
            _ => return None,
        }
    }
    decoded.extend_from_slice(rest);
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const SEND: &str = r#"{"code":310,"extFields":{"a":"g","b":"T","e":"1","i":"UNIQ_KEY\u0001A\u0002"},"flag":2,"opaque":-7}"#;
    const END: &str = r#"{"code":37,"extFields":{"producerGroup":"g","tranStateTableOffset":"3","commitLogOffset":"99","commitOrRollback":"12"},"flag":0,"opaque":7,"remark":null}"#;

    // Miri takes seconds for what takes microseconds.
    const STEP: usize = if cfg!(miri) { 23 } else { 1 };

    #[test]
    fn a_send_is_read() {
        let mut properties = b"of the request before".to_vec();
        let (head, fields) = parse(SEND.as_bytes(), &mut properties, None).unwrap();
        assert_eq!((head.opaque, head.is_oneway), (-7, true));
        assert_eq!(properties, b"UNIQ_KEY\x01A\x02");
        let PlainHeader::Send(send) = fields else {
            panic!("it is a send");
        };
        assert_eq!((send.topic, send.queue_id), (&b"T"[..], 1));
    }

    #[test]
    fn an_end_is_read() {
        let (_, fields) = parse(END.as_bytes(), &mut Vec::new(), None).unwrap();
        let expected = EndHeader {
            group: b"g",
            queue_offset: 3,
            log_offset: 99,
            is_commit: false,
        };
        assert_eq!(fields, PlainHeader::End(expected));
    }

    #[test]
    fn a_header_that_is_cut_or_damaged_does_no_harm() {
        for text in [SEND, END] {
            for end in (0..text.len()).step_by(STEP) {
                assert!(parse(&text.as_bytes()[..end], &mut Vec::new(), None).is_none());
                for byte in [0, b'"', b'\\', b'{', b'9', 0xFF] {
                    let mut damaged = text.as_bytes().to_vec();
                    damaged[end] = byte;
                    let mut signed = SignedFields::default();
                    let _ = parse(&damaged, &mut Vec::new(), Some(&mut signed));
                }
            }
        }
    }

    #[test]
    fn numbers_have_one_form() {
        assert_eq!(decimal(b"-12"), Some(-12));
        assert_eq!(
            decimal(b"999999999999999999"),
            Some(999_999_999_999_999_999)
        );
        for text in ["", "-", "-0", "01", "+1", " 1", "1000000000000000000"] {
            assert_eq!(decimal(text.as_bytes()), None, "{text}");
        }
    }
}
