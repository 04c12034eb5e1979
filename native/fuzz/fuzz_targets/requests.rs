//! The whole native path, with an interpreter: read, encode, apply or cancel, respond.
//!
//! The input is a script. Requests are separated by 0xFF; each has a byte that says what happens
//! around it, a header, and behind 0xFE a body. The frame around them is made here, because a
//! mutated length would hide everything else. `$q` and `$l` in a header stand for the offsets of an
//! open half, so that ends meet their halves, and `$s` for the right signature. A script with a
//! signature goes to a broker with accounts. Every third read of its log returns a flipped bit.
#![no_main]

use std::cell::RefCell;

use escrowmq_native::escrowmq_native;
use libfuzzer_sys::fuzz_target;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList};

const SIGNATURE: &[u8] = b"Signature";
const SEGMENT_BYTES: i64 = 1 << 16;
const REQUEST_END: u8 = 0xFF;
const HEADER_END: u8 = 0xFE;
const ENDS_TURN: u8 = 1;
const IS_REFUSED: u8 = 2; // the turn: its batch cannot be stored
const IS_CUT: u8 = 4; // the frame: its end comes with the next chunk
const IS_OTHER_CONNECTION: u8 = 8;

/// What the driver in Python needs; it is the broker of this test.
const BROKER: &std::ffi::CStr = c"
import base64, hashlib, hmac, json
import escrowmq_native as native

MAGIC = 0xDAA320A7
HOSTS = bytes([10, 0, 0, 1, 0, 0, 1, 1]), bytes([10, 0, 0, 2, 0, 0, 1, 1])
NAMES = 'queue tags_codes count_max bytes_max scan_max min_offset magic topic_field'.split()

class Fields:
    pass

class Queue:
    def __init__(self):
        self.entries = b''

    @property
    def visible_end(self):
        return len(self.entries) // 20

    def copy_entries(self, first_offset, count):
        return self.entries[first_offset * 20:(first_offset + count) * 20]

def topic_field(topic):
    return bytes([len(topic)]) + topic.encode()

class Broker:
    def __init__(self, needs_account):
        self.table = native.HalfTable(decided_max=3)
        self.requests = native.PlainRequests(
            self.table, {'T': 2, 'orders': 1}, store_host=b'\\x7f\\0\\0\\1\\0\\0\\x2a\\x9f', has_crc=True,
            added_properties=b'CLUSTER\\x01c\\x02', send_tail=b'}}', tail_bytes=1 << 10,
            plan_pull=self.plan_pull, read_log=self.read_log, commit_offset=self.commit_offset,
            needs_account=needs_account)
        self.requests.configure(
            message_bytes=4096, record_bytes=4096, half_bytes=2048, open_max=5, open_bytes=1 << 14,
            group_open_max=4, group_open_bytes=1 << 13, immunity_ms=lambda topic, group: 6000)
        self.needs_account, self.signed_count, self.handled_count = needs_account, 0, 0
        for topic in ('T', 'orders'):
            self.requests.grant('app', b'secret', HOSTS[0][:4], topic)
        self.log, self.queues, self.reads = bytearray(), {}, 0
        self.end, self.now_ms = 0, 1

    def plan_pull(self, group, topic, queue_id, max_messages, sys_flag, subscription, sub_version,
                  expression_type, max_bytes):
        queue = self.queues.get((topic, queue_id))
        if queue is None:
            return None
        codes = {0} if subscription == 'none' else None
        values = queue, codes, max(1, min(max_messages, 32)), 4096, 64, 0, MAGIC, topic_field(topic)
        plan = Fields()
        plan.__dict__.update(zip(NAMES, values), topic_sys_flag=0, group_sys_flag=0)
        return plan

    def read_log(self, begin, end, is_dense):
        assert 0 <= begin < end <= self.end
        data = bytearray(self.log[begin:end])
        self.reads += 1
        if self.reads % 3 == 0:
            data[self.reads * 7919 % len(data)] ^= 4
        return begin, bytes(data)

    def commit_offset(self, topic, group, queue_id, queue_offset):
        assert (topic, queue_id) in self.queues

    def signature(self, header, body):
        'Sign a header if it is JSON, and count it.'
        try:
            fields = json.loads(header)['extFields']
            content = ''.join(fields[name] for name in sorted(fields) if name != 'Signature').encode()
        except (ValueError, KeyError, TypeError, AttributeError):
            return b''
        self.signed_count += 1
        return base64.b64encode(hmac.digest(b'secret', content + body, hashlib.sha1))

    def halves(self):
        return [(half.queue_offset, half.log_offset) for half in self.table]

    def turn(self, chunks, segment_bytes, is_refused):
        self.now_ms += 1
        before = self.state()
        chunks = [('peer', host, rest, data) for host, (rest, data) in zip(HOSTS, chunks)]
        batch = self.requests.read(chunks, self.now_ms, 16, (0, len(self.queues)))
        self.check_access(batch)
        self.check_pulls(batch)
        kept = sum(len(rest) for _, rest, _ in batch.leftovers)
        assert kept <= sum(len(chunk[2]) + len(chunk[3]) for chunk in chunks)
        assert len({index for index, _, _ in batch.leftovers}) == len(batch.leftovers)
        if len(batch):
            queues = batch.queues
            offsets = [self.queues[q].visible_end if q in self.queues else 0 for q in queues]
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

    def check_access(self, batch):
        'Only what has a right signature and comes from the right host is handled.'
        if self.needs_account:
            self.handled_count += len(batch)
            assert self.handled_count <= self.signed_count
            assert all(index == 0 for index, *_ in batch.requests())
            assert bool(len(batch)) <= bool(batch.accounts)
        assert set(batch.accounts) <= ({(0, 'app')} if self.needs_account else set())

    def check_pulls(self, batch):
        'Every record that was pulled is in the log as it is in the response.'
        assert not batch.pull_errors(), batch.pull_errors()
        responses = [b''.join(pieces) for _, pieces in batch.pull_responses()]
        deliveries = batch.deliveries()
        assert not (self.needs_account and responses)
        assert sum(pulls for *_, pulls, _, _ in deliveries) == sum(map(frames, responses))
        pulled = []
        for response in responses:
            body = response[8 + int.from_bytes(response[4:8], 'big') % (1 << 24):]
            while body:
                size = int.from_bytes(body[:4], 'big')
                log_offset = int.from_bytes(body[28:36], 'big')
                assert body[:size] == self.log[log_offset:log_offset + size]
                pulled.append(size)
                body = body[size:]
        assert sum(messages for *_, messages, _ in deliveries) == len(pulled)
        assert sum(size for *_, size in deliveries) == sum(pulled)

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
                place = log_offset, log_offset + size, offset + at // 20
                field = topic_field(topic)
                assert native.records_are_right(data, log_offset, [place], MAGIC, field, queue_id)
                count += 1
        assert count == batch.record_count
        assert pieces[-1][0] + len(pieces[-1][1]) == batch.end

    def store(self, batch, queues, offsets):
        for number, (queue, offset) in enumerate(zip(queues, offsets)):
            self.queues.setdefault(queue, Queue()).entries += batch.entries[number]
            assert len(batch.arrivals(number)) * 20 <= len(batch.entries[number])
        keys = batch.take_keys()
        assert len(keys.hashes) // 4 == len(keys.log_offsets) // 8
        for begin, piece in batch.pieces:
            self.log.extend(bytes(begin - len(self.log)))  # the rest of a segment
            self.log.extend(piece)
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
    let needs_account = data.windows(SIGNATURE.len()).any(|word| word == SIGNATURE);
    let broker = broker_class(py)?.call1(py, (needs_account,))?;
    let broker = broker.into_bound(py);
    let mut rests: [Vec<u8>; 2] = Default::default();
    let mut chunks: [Vec<u8>; 2] = Default::default();
    for request in data.split(|byte| *byte == REQUEST_END) {
        let Some((control, request)) = request.split_first() else {
            continue;
        };
        let connection = usize::from(control & IS_OTHER_CONNECTION != 0);
        let halves: Vec<(i64, i64)> = broker.call_method0("halves")?.extract()?;
        let half = halves.get(usize::from(control >> 4) % halves.len().max(1));
        let frame = frame(&broker, request, half.copied().unwrap_or_default())?;
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

/// Return the frame of a request, with the offsets of a half and a signature in its header.
fn frame(broker: &Bound<'_, PyAny>, request: &[u8], half: (i64, i64)) -> PyResult<Vec<u8>> {
    let (header, body) = match request.iter().position(|byte| *byte == HEADER_END) {
        Some(position) => (&request[..position], &request[position + 1..]),
        None => (request, &b""[..]),
    };
    let header = replaced(header, b"$q", half.0.to_string().as_bytes());
    let mut header = replaced(&header, b"$l", half.1.to_string().as_bytes());
    if header.windows(2).any(|word| word == b"$s") {
        let py = broker.py();
        let arguments = (PyBytes::new(py, &header), PyBytes::new(py, body));
        let signature: Vec<u8> = broker.call_method1("signature", arguments)?.extract()?;
        header = replaced(&header, b"$s", &signature);
    }
    let length = (4 + header.len() + body.len()) as u32;
    Ok([
        &length.to_be_bytes()[..],
        &(header.len() as u32).to_be_bytes(),
        &header,
        body,
    ]
    .concat())
}

fn replaced(text: &[u8], mark: &[u8; 2], value: &[u8]) -> Vec<u8> {
    let mut result = Vec::new();
    let mut rest = text;
    while let Some(position) = rest.windows(2).position(|word| word == mark) {
        result.extend_from_slice(&rest[..position]);
        result.extend_from_slice(value);
        rest = &rest[position + 2..];
    }
    result.extend_from_slice(rest);
    result
}
