//! The whole native path, with an interpreter: read, encode, apply or cancel, respond.
//!
//! The input is a script. Requests are separated by 0xFF; each has a byte that says what happens
//! around it, a header, and behind 0xFE a body. The frame around them is made here, because a
//! mutated length would hide everything else. `$q` and `$l` in a header stand for the offsets of an
//! open half, so that ends meet their halves.
#![no_main]

use std::cell::RefCell;

use escrowmq_native::escrowmq_native;
use libfuzzer_sys::fuzz_target;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList};

const SEGMENT_BYTES: i64 = 1 << 16;
const REQUEST_END: u8 = 0xFF;
const HEADER_END: u8 = 0xFE;
const ENDS_TURN: u8 = 1;
const IS_REFUSED: u8 = 2; // the turn: its batch cannot be stored
const IS_CUT: u8 = 4; // the frame: its end comes with the next chunk
const IS_OTHER_CONNECTION: u8 = 8;

/// What the driver in Python needs; it is the broker of this test.
const BROKER: &std::ffi::CStr = c"
import escrowmq_native as native

class Broker:
    def __init__(self):
        self.table = native.HalfTable(decided_max=3)
        self.requests = native.PlainRequests(
            self.table, {'T': 2, 'orders': 1}, store_host=b'\\x7f\\0\\0\\1\\0\\0\\x2a\\x9f', has_crc=True,
            added_properties=b'CLUSTER\\x01c\\x02', send_tail=b'}}', tail_bytes=1 << 15)
        self.requests.configure(
            message_bytes=4096, record_bytes=4096, half_bytes=2048, open_max=5, open_bytes=1 << 14,
            group_open_max=4, group_open_bytes=1 << 13, immunity_ms=lambda topic, group: 6000)
        self.end, self.offsets, self.now_ms = 0, {}, 1

    def halves(self):
        return [(half.queue_offset, half.log_offset) for half in self.table]

    def turn(self, chunks, segment_bytes, is_refused):
        self.now_ms += 1
        before = self.state()
        chunks = [('peer', bytes(8), rest, data) for rest, data in chunks]
        batch = self.requests.read(chunks, self.now_ms, 16)
        kept = sum(len(rest) for _, rest, _ in batch.leftovers)
        assert kept <= sum(len(chunk[2]) + len(chunk[3]) for chunk in chunks)
        assert len({index for index, _, _ in batch.leftovers}) == len(batch.leftovers)
        if len(batch):
            queues = batch.queues
            offsets = [self.offsets.get(queue, 0) for queue in queues]
            batch.encode(self.end, segment_bytes, self.now_ms, offsets)
            self.check(batch, offsets)
            if is_refused:
                batch.cancel()
                assert self.state() == before
                assert len(batch.requests()) == len(batch)
            else:
                self.store(batch, queues, offsets)
        return {index: rest for index, rest, is_stopped in batch.leftovers if not is_stopped}

    def state(self):
        halves = [(h.queue_offset, h.is_being_decided, h.size) for h in self.table]
        return halves, self.table.total.count, self.table.total.size

    def check(self, batch, offsets):
        'Every entry names a record of its size, queue and queue offset.'
        pieces = [(begin, bytes(piece)) for begin, piece in batch.pieces]
        count = 0
        for (topic, queue_id), entries, offset in zip(batch.queues, batch.entries, offsets):
            assert len(entries) % 20 == 0
            for at in range(0, len(entries), 20):
                log_offset = int.from_bytes(entries[at:at + 8], 'big')
                size = int.from_bytes(entries[at + 8:at + 12], 'big')
                data = next(piece[log_offset - begin:][:size] for begin, piece in reversed(pieces)
                            if begin <= log_offset)
                field = bytes([len(topic)]) + topic.encode()
                place = log_offset, log_offset + size, offset + at // 20
                assert native.records_are_right(data, log_offset, [place], 0xDAA320A7, field, queue_id)
                count += 1
        assert count == batch.record_count
        assert pieces[-1][0] + len(pieces[-1][1]) == batch.end

    def store(self, batch, queues, offsets):
        for number, (queue, offset) in enumerate(zip(queues, offsets)):
            self.offsets[queue] = offset + len(batch.entries[number]) // 20
            assert len(batch.arrivals(number)) * 20 <= len(batch.entries[number])
        keys = batch.take_keys()
        assert len(keys.hashes) // 4 == len(keys.log_offsets) // 8
        before, self.end = len(self.table), batch.end
        applied = batch.apply()
        assert len(self.table) == before + applied.half_count - applied.end_count
        assert applied.send_count + applied.end_count == len(batch)
        assert len(applied.ended) == len(applied.committed) + len(applied.rolled_back)
        assert not any(half.is_being_decided for half in self.table)
        assert sum(half.size for half in self.table) == self.table.total.size
        answered = sum(not is_oneway for _, _, _, is_oneway, _, _ in batch.requests())
        assert answered == sum(frames(data) for _, data in batch.responses())

def frames(data):
    count = 0
    while data:
        data = data[4 + int.from_bytes(data[:4], 'big'):]
        count += 1
    return count
";

thread_local! {
    static BROKER_CLASS: RefCell<Option<Py<PyAny>>> = const { RefCell::new(None) };
}

fuzz_target!(init: {
    pyo3::append_to_inittab!(escrowmq_native);
    Python::initialize();
}, |data: &[u8]| {
    Python::attach(|py| {
        if let Err(error) = run(py, data) {
            error.print(py);
            panic!("a check has failed");
        }
    });
});

fn run(py: Python<'_>, data: &[u8]) -> PyResult<()> {
    let broker = broker_class(py)?.call0(py)?.into_bound(py);
    let mut rests: [Vec<u8>; 2] = Default::default();
    let mut chunks: [Vec<u8>; 2] = Default::default();
    for request in data.split(|byte| *byte == REQUEST_END) {
        let Some((control, request)) = request.split_first() else {
            continue;
        };
        let connection = usize::from(control & IS_OTHER_CONNECTION != 0);
        let halves: Vec<(i64, i64)> = broker.call_method0("halves")?.extract()?;
        let half = halves.get(usize::from(control >> 4) % halves.len().max(1));
        let frame = frame(request, half.copied().unwrap_or_default());
        let cut = if control & IS_CUT != 0 {
            frame.len() / 2
        } else {
            frame.len()
        };
        chunks[connection].extend_from_slice(&frame[..cut]);
        if control & ENDS_TURN != 0 {
            end_turn(py, &broker, &mut rests, &chunks, control & IS_REFUSED != 0)?;
            chunks = Default::default();
        }
        chunks[connection].extend_from_slice(&frame[cut..]);
    }
    end_turn(py, &broker, &mut rests, &chunks, false)
}

fn broker_class(py: Python<'_>) -> PyResult<Py<PyAny>> {
    BROKER_CLASS.with_borrow_mut(|class| {
        if let Some(class) = class {
            return Ok(class.clone_ref(py));
        }
        let names = PyDict::new(py);
        py.run(BROKER, Some(&names), None)?;
        let created = names.get_item("Broker")?.expect("the class").unbind();
        *class = Some(created.clone_ref(py));
        Ok(created)
    })
}

fn end_turn(
    py: Python<'_>,
    broker: &Bound<'_, PyAny>,
    rests: &mut [Vec<u8>; 2],
    chunks: &[Vec<u8>; 2],
    is_refused: bool,
) -> PyResult<()> {
    let chunks = PyList::new(
        py,
        (0..2).map(|i| (PyBytes::new(py, &rests[i]), PyBytes::new(py, &chunks[i]))),
    )?;
    let left = broker.call_method1("turn", (chunks, SEGMENT_BYTES, is_refused))?;
    for (index, rest) in rests.iter_mut().enumerate() {
        *rest = left
            .call_method1("get", (index, PyBytes::new(py, b"")))?
            .extract()?;
    }
    Ok(())
}

/// Return the frame of a request, with the offsets of a half in its header.
fn frame(request: &[u8], half: (i64, i64)) -> Vec<u8> {
    let (header, body) = match request.iter().position(|byte| *byte == HEADER_END) {
        Some(position) => (&request[..position], &request[position + 1..]),
        None => (request, &b""[..]),
    };
    let mut text = Vec::new();
    let mut bytes = header.iter().copied().peekable();
    while let Some(byte) = bytes.next() {
        match (byte, bytes.peek()) {
            (b'$', Some(b'q')) => text.extend(half.0.to_string().bytes()),
            (b'$', Some(b'l')) => text.extend(half.1.to_string().bytes()),
            _ => {
                text.push(byte);
                continue;
            }
        }
        bytes.next();
    }
    let length = (4 + text.len() + body.len()) as u32;
    [
        &length.to_be_bytes()[..],
        &(text.len() as u32).to_be_bytes(),
        &text,
        body,
    ]
    .concat()
}
