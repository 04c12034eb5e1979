//! Responses to plain requests. The bytes are those of remoting/responses.py.

/// What all responses of one broker have in common.
pub struct ResponseEncoder {
    /// The store host in hexadecimal digits: the begin of every message id.
    host_text: [u8; 16],
    /// What follows the fields of a send: region and trace flag, and the ends of both objects.
    send_tail: Vec<u8>,
}

const START: &[u8] = br#"{"code":0,"language":"PYTHON","version":479,"opaque":"#;
const AFTER_OPAQUE: &[u8] = br#","flag":1,"serializeTypeCurrentRPC":"JSON","extFields":{"#;
const AFTER_OPAQUE_FOUND: &[u8] =
    br#","flag":1,"serializeTypeCurrentRPC":"JSON","remark":"FOUND","extFields":{"#;
const PREFIX_BYTES: usize = 8;

/// Where a message was stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Position {
    pub log_offset: i64,
    pub queue_id: i32,
    pub queue_offset: i64,
}

impl ResponseEncoder {
    pub fn new(store_host: [u8; 8], send_tail: &[u8]) -> ResponseEncoder {
        let mut host_text = [0; 16];
        for (index, byte) in store_host.iter().enumerate() {
            host_text[2 * index] = hex_digit(byte >> 4);
            host_text[2 * index + 1] = hex_digit(byte & 15);
        }
        ResponseEncoder {
            host_text,
            send_tail: send_tail.to_vec(),
        }
    }

    /// Append the response to a send. A half message has a transaction id.
    pub fn send(&self, out: &mut Vec<u8>, opaque: i32, position: Position, id: Option<&[u8]>) {
        frame(out, |out| {
            start(out, opaque);
            out.extend_from_slice(br#""msgId":""#);
            self.message_id(out, position.log_offset);
            out.extend_from_slice(br#"","queueId":""#);
            number(out, i64::from(position.queue_id));
            out.extend_from_slice(br#"","queueOffset":""#);
            number(out, position.queue_offset);
            out.push(b'"');
            if let Some(id) = id {
                out.extend_from_slice(br#","transactionId":""#);
                out.extend_from_slice(id);
                out.push(b'"');
            }
            out.extend_from_slice(&self.send_tail);
        });
    }

    /// Append the response to the end of a transaction. Without a position it was rolled back.
    pub fn end(
        &self,
        out: &mut Vec<u8>,
        opaque: i32,
        id: &[u8],
        topic: &[u8],
        queue_id: i32,
        position: Option<Position>,
    ) {
        let state: &[u8] = if position.is_some() {
            b"committed"
        } else {
            b"rolled_back"
        };
        frame(out, |out| {
            start(out, opaque);
            out.extend_from_slice(br#""state":""#);
            out.extend_from_slice(state);
            out.extend_from_slice(br#"","transactionId":""#);
            out.extend_from_slice(id);
            out.extend_from_slice(br#"","topic":""#);
            out.extend_from_slice(topic);
            out.extend_from_slice(br#"","queueId":""#);
            number(out, i64::from(queue_id));
            if let Some(position) = position {
                out.extend_from_slice(br#"","queueOffset":""#);
                number(out, position.queue_offset);
                out.extend_from_slice(br#"","msgId":""#);
                self.message_id(out, position.log_offset);
            }
            out.extend_from_slice(br#""}}"#);
        });
    }

    fn message_id(&self, out: &mut Vec<u8>, log_offset: i64) {
        out.extend_from_slice(&self.host_text);
        out.extend(
            (0..16)
                .rev()
                .map(|digit| hex_digit((log_offset >> (4 * digit)) as u8 & 15)),
        );
    }
}

/// The offsets in a response to a pull.
#[derive(Clone, Copy, Debug)]
pub struct PullOffsets {
    pub next: i64,
    pub min: i64,
    pub max: i64,
}

/// Append the header of a response to a pull that found messages. A body of this size follows.
pub fn pull(
    out: &mut Vec<u8>,
    opaque: i32,
    offsets: PullOffsets,
    (topic_sys_flag, group_sys_flag): (i32, i32),
    body_bytes: usize,
) {
    frame_with_body(out, body_bytes, |out| {
        out.extend_from_slice(START);
        number(out, i64::from(opaque));
        out.extend_from_slice(AFTER_OPAQUE_FOUND);
        for (name, value) in [
            (&br#""suggestWhichBrokerId":""#[..], 0),
            (br#"","nextBeginOffset":""#, offsets.next),
            (br#"","minOffset":""#, offsets.min),
            (br#"","maxOffset":""#, offsets.max),
            (br#"","topicSysFlag":""#, i64::from(topic_sys_flag)),
            (br#"","groupSysFlag":""#, i64::from(group_sys_flag)),
        ] {
            out.extend_from_slice(name);
            number(out, value);
        }
        out.extend_from_slice(br#""}}"#);
    });
}

/// Append a frame with a JSON header, which `header` writes, and without a body.
fn frame(out: &mut Vec<u8>, header: impl FnOnce(&mut Vec<u8>)) {
    frame_with_body(out, 0, header);
}

/// Append the begin of a frame, up to its body.
fn frame_with_body(out: &mut Vec<u8>, body_bytes: usize, header: impl FnOnce(&mut Vec<u8>)) {
    let begin = out.len();
    out.extend_from_slice(&[0; PREFIX_BYTES]);
    header(out);
    let header_bytes = (out.len() - begin - PREFIX_BYTES) as u32;
    let frame_bytes = 4 + header_bytes + body_bytes as u32;
    out[begin..begin + 4].copy_from_slice(&frame_bytes.to_be_bytes());
    // JSON is serializer 0, so the length of the header is the whole second word.
    out[begin + 4..begin + 8].copy_from_slice(&header_bytes.to_be_bytes());
}

fn start(out: &mut Vec<u8>, opaque: i32) {
    out.extend_from_slice(START);
    number(out, i64::from(opaque));
    out.extend_from_slice(AFTER_OPAQUE);
}

/// Append a number in decimal digits.
pub fn number(out: &mut Vec<u8>, value: i64) {
    let mut digits = [0; 20];
    let mut begin = digits.len();
    let mut rest = value.unsigned_abs();
    loop {
        begin -= 1;
        digits[begin] = b'0' + (rest % 10) as u8;
        rest /= 10;
        if rest == 0 {
            break;
        }
    }
    if value < 0 {
        begin -= 1;
        digits[begin] = b'-';
    }
    out.extend_from_slice(&digits[begin..]);
}

fn hex_digit(value: u8) -> u8 {
    b"0123456789ABCDEF"[usize::from(value)]
}
