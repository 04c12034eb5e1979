//! Plain requests of one turn: read from the chunks of many connections, encoded for the log.
//!
//!     PlainRequests.read(chunks) -> Batch      requests are read; keys and halves are reserved
//!     Batch.encode(...)                        records, queue entries and keys, for known offsets
//!     Batch.apply() or Batch.cancel()          the records are stored, or could not be
//!     Batch.responses()
//!
//! `read` stops at the first request of a chunk that is not plain. That one and whatever follows it
//! goes to the Python path, which handles it after the batch is stored, so the requests of a
//! connection keep their order. Nothing is visible to anybody before `apply`.

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;

use hashbrown::HashMap;
use pyo3::exceptions::PyBaseException;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList, PyMemoryView, PyString, PyTuple};

use crate::access::{Access, Grants, Host};
use crate::half::{Half, HalfTable, HalfTotals, Name};
use crate::header::{self, EndHeader, Head, PlainHeader, PullHeader, SendHeader, SignedFields};
use crate::java_hash;
use crate::key_index::KeyBlock;
use crate::log_tail::LogTail;
use crate::properties::{self, ITEM_END, PlainProperties};
use crate::pull::{Deliveries, PullReader};
use crate::record::{self, BLANK_BYTES, Fields, Parts};
use crate::response::{Position, ResponseEncoder, number};
use crate::shared_bytes::{Piece, SharedBytes, shared_view};

const PREFIX_BYTES: usize = 8;
/// A longer frame is not plain. So a connection never keeps more than this of an incomplete one.
const FRAME_BYTES_MAX: usize = 64 << 10;
const PROPERTIES_BYTES_MAX: usize = 4096;
const GROUP_BYTES_MAX: usize = 63;
const TOPIC_BYTES_MAX: usize = 127;
const UNIQUE_KEY_BYTES_MAX: usize = 255;
const IMMUNITIES_MAX: usize = 4096;
/// Of one connection in one batch, and of all. So many take one millisecond, and some.
const CONNECTION_PULLS_MAX: usize = 64;
const PULLS_MAX: usize = 512;
/// Responses to pulls of one connection in one batch; then the Python path has a look at it. The
/// kernel takes one to two milliseconds to accept so much from the broker.
const PULLED_BYTES_MAX: usize = 256 << 10;
/// The same of all connections. What comes behind has its share of time in the Python path: forty
/// connections with a MiB each made turns of 50 ms, when records were copied.
const BATCH_PULLED_BYTES_MAX: usize = 4 << 20;
/// The bits of a sysFlag that a client sets: the body is compressed and how, several tags.
const CLIENT_SYS_FLAGS: i32 = 0x703;
const TRANSACTION_COMMIT: i32 = 8;
const HALF_TOPIC: &str = "RMQ_SYS_TRANS_HALF_TOPIC";
pub const OP_TOPIC: &str = "RMQ_SYS_TRANS_OP_HALF_TOPIC";
const OP_TAGS_CODE: i64 = b'd' as i64;
pub const COMMIT_PROPERTIES: &[u8] = b"TAGS\x01d\x02ENDED\x01c\x02";
const ROLLBACK_PROPERTIES: &[u8] = b"TAGS\x01d\x02ENDED\x01r\x02KEYS\x01";

/// What may be stored. It changes with the settings of the broker.
#[derive(Clone, Copy, Default)]
struct Limits {
    message_bytes: usize,
    record_bytes: usize,
    half_bytes: usize,
    open: u64,
    open_bytes: u64,
    group_open: u64,
    group_open_bytes: u64,
}

/// A topic that a request of this turn has named.
struct Topic {
    name: Arc<Name>,
    hash: u32,                 // of `topic#`
    queue_count: Option<i32>,  // to which clients may send; None if not asked yet
    queues: Vec<(i32, usize)>, // queue ids, and where the queues are in the batch
}

/// The plain path of one broker.
#[pyclass(module = "escrowmq_native")]
pub struct PlainRequests {
    table: Py<HalfTable>,
    queue_counts: Py<PyDict>, // by topic: the live table of topics that clients may send to
    immunity_ms: Option<Py<PyAny>>,
    immunities: HashMap<Box<str>, HashMap<Box<str>, i64>>, // by topic and group
    limits: Limits,
    grants: Option<Grants>, // None: no request needs an account
    store_host: [u8; 8],
    has_crc: bool,
    added_properties: Vec<u8>,
    responses: Arc<ResponseEncoder>,
    tail: LogTail,
    pulls: PullReader,
    half_name: Arc<Name>,
    op_name: Arc<Name>,
    properties: Vec<u8>, // of the request that is being read
}

#[pymethods]
impl PlainRequests {
    /// `queue_counts`: how many queues each topic has that clients may send to; it may change.
    /// `send_tail`: what ends the response to a send. `plan_pull` says how a pull is to be answered,
    /// `read_log` reads the log, `commit_offset` stores the offset that a pull brings along.
    /// `needs_account`: only what was granted is plain.
    #[new]
    #[pyo3(signature = (table, queue_counts, *, store_host, has_crc, added_properties, send_tail, tail_bytes, plan_pull, read_log, commit_offset, needs_account))]
    #[allow(clippy::too_many_arguments)] // they are named
    fn new(
        py: Python<'_>,
        table: Py<HalfTable>,
        queue_counts: Py<PyDict>,
        store_host: [u8; 8],
        has_crc: bool,
        added_properties: &[u8],
        send_tail: &[u8],
        tail_bytes: usize,
        plan_pull: Py<PyAny>,
        read_log: Py<PyAny>,
        commit_offset: Py<PyAny>,
        needs_account: bool,
    ) -> PlainRequests {
        PlainRequests {
            table,
            queue_counts,
            immunity_ms: None,
            immunities: HashMap::new(),
            limits: Limits::default(),
            grants: needs_account.then(Grants::default),
            store_host,
            has_crc,
            added_properties: added_properties.to_vec(),
            responses: Arc::new(ResponseEncoder::new(store_host, send_tail)),
            tail: LogTail::new(tail_bytes),
            pulls: PullReader::new(plan_pull, read_log, commit_offset),
            half_name: Name::new(py, HALF_TOPIC),
            op_name: Name::new(py, OP_TOPIC),
            properties: Vec::new(),
        }
    }

    /// Set what may be stored. `immunity_ms(topic, group)` says when a half is due first; None if
    /// no half may be parked.
    #[pyo3(signature = (*, message_bytes, record_bytes, half_bytes, open_max, open_bytes, group_open_max, group_open_bytes, immunity_ms))]
    #[allow(clippy::too_many_arguments)] // they are named
    fn configure(
        &mut self,
        message_bytes: usize,
        record_bytes: usize,
        half_bytes: usize,
        open_max: u64,
        open_bytes: u64,
        group_open_max: u64,
        group_open_bytes: u64,
        immunity_ms: Option<Py<PyAny>>,
    ) {
        self.limits = Limits {
            message_bytes,
            record_bytes,
            half_bytes,
            open: open_max,
            open_bytes,
            group_open: group_open_max,
            group_open_bytes,
        };
        self.immunity_ms = immunity_ms;
        self.immunities.clear();
        self.pulls.clear();
    }

    /// Let requests from a host pass without an account.
    fn trust_host(&mut self, host: Host) {
        if let Some(grants) = &mut self.grants {
            grants.trust(host);
        }
    }

    /// Let an account send to a topic, and end its halves, from a host.
    fn grant(
        &mut self,
        access_key: &Bound<'_, PyString>,
        secret: &[u8],
        host: Host,
        topic: &str,
    ) -> PyResult<()> {
        match &mut self.grants {
            Some(grants) => grants.grant(access_key, secret, host, topic),
            None => Ok(()),
        }
    }

    /// Forget everything that was granted, and all secrets.
    fn clear_grants(&mut self) {
        if let Some(grants) = &mut self.grants {
            *grants = Grants::default();
        }
    }

    /// Remember bytes that Python has appended to the log. Halves in them can be committed here.
    fn remember_append(&mut self, py: Python<'_>, log_offset: i64, data: Py<PyBytes>) {
        self.tail.push(py, log_offset, SharedBytes::Python(data));
    }

    /// Read the plain requests of chunks: tuples of connection, host, incomplete frame, chunk.
    /// `pull_version`: where the log begins, and a number that changes whenever a pull might have
    /// to be answered in another way. None if no pull is plain.
    fn read(
        slf: Bound<'_, Self>,
        chunks: &Bound<'_, PyList>,
        now_ms: i64,
        requests_max: usize,
        pull_version: Option<(i64, i64)>,
    ) -> PyResult<Batch> {
        let mut batch = Batch::new(slf.clone().unbind(), now_ms);
        batch.allows_pulls = pull_version.is_some();
        // Keys and halves that are reserved have to be released whatever happens, also in a panic:
        // the Python path reads the same bytes again, and must not meet them.
        let result = catch_unwind(AssertUnwindSafe(|| {
            let mut own = slf.borrow_mut();
            if let Some(version) = pull_version {
                own.pulls.update(version);
            }
            own.read_chunks(&mut batch, chunks, requests_max)
        }));
        if !matches!(result, Ok(Ok(()))) {
            batch.cancel(slf.py());
        }
        result.unwrap_or_else(|panic| resume_unwind(panic))?;
        Ok(batch)
    }
}

struct Connection<'py> {
    producer: Bound<'py, PyAny>,
    host: [u8; 8],
    index: usize, // of its chunk
}

/// A request with all that its signature covers.
struct SignedRequest<'a, 's> {
    head: Head,
    signed: Option<&'s mut SignedFields<'a>>, // None where clients need no account
    properties: &'a [u8],                     // of a send, decoded
    body: &'a [u8],
}

impl PlainRequests {
    fn read_chunks(
        &mut self,
        batch: &mut Batch,
        chunks: &Bound<'_, PyList>,
        requests_max: usize,
    ) -> PyResult<()> {
        for (index, chunk) in chunks.iter().enumerate() {
            let chunk = chunk.cast_into::<PyTuple>()?;
            let host: [u8; 8] = chunk.get_item(1)?.extract()?;
            let rest = chunk.get_item(2)?.cast_into::<PyBytes>()?;
            let data = chunk.get_item(3)?.cast_into::<PyBytes>()?;
            let connection = Connection {
                producer: chunk.get_item(0)?,
                host,
                index,
            };
            let (rest, data) = (rest.as_bytes(), data.as_bytes());
            self.read_chunk(chunks.py(), batch, &connection, rest, data, requests_max)?;
        }
        Ok(())
    }

    /// Read one chunk. What is not read of it becomes a leftover of the batch.
    fn read_chunk(
        &mut self,
        py: Python<'_>,
        batch: &mut Batch,
        connection: &Connection<'_>,
        rest: &[u8],
        data: &[u8],
        requests_max: usize,
    ) -> PyResult<()> {
        let mut position = 0;
        let mut count = 0;
        if !rest.is_empty() {
            let mut joined = rest.to_vec();
            position = complete_frame(&mut joined, data);
            let is_read = match frame_bytes(&joined) {
                Frame::Complete(_) => self.read_frame(py, batch, connection, &joined)?,
                Frame::Incomplete => {
                    batch.leftovers.push((connection.index, joined, false));
                    return Ok(());
                }
                Frame::NotPlain => false,
            };
            if !is_read {
                joined.extend_from_slice(&data[position..]);
                batch.leftovers.push((connection.index, joined, true));
                return Ok(());
            }
            count = 1;
        }
        while position < data.len() {
            let remaining = &data[position..];
            let is_stopped = match frame_bytes(remaining) {
                Frame::Incomplete => false,
                Frame::NotPlain => true,
                Frame::Complete(size) => {
                    if count < requests_max
                        && self.read_frame(py, batch, connection, &remaining[..size])?
                    {
                        position += size;
                        count += 1;
                        continue;
                    }
                    true
                }
            };
            batch
                .leftovers
                .push((connection.index, remaining.to_vec(), is_stopped));
            break;
        }
        Ok(())
    }

    /// Add the request in a frame to the batch. Return whether it is plain; if not, nothing is
    /// changed.
    fn read_frame(
        &mut self,
        py: Python<'_>,
        batch: &mut Batch,
        connection: &Connection<'_>,
        frame: &[u8],
    ) -> PyResult<bool> {
        let header_bytes = u32::from_be_bytes([0, frame[5], frame[6], frame[7]]) as usize;
        let (header, body) = frame[PREFIX_BYTES..].split_at(header_bytes);
        let mut properties = std::mem::take(&mut self.properties);
        let mut signed = self.grants.is_some().then(SignedFields::default);
        let is_plain = match header::parse(header, &mut properties, signed.as_mut()) {
            Some((head, PlainHeader::Send(send))) if !batch.has_pulls_of(connection) => {
                let request = SignedRequest {
                    head,
                    signed: signed.as_mut(),
                    properties: &properties,
                    body,
                };
                self.read_send(py, batch, connection, request, &send)?
            }
            Some((head, PlainHeader::End(end)))
                if body.is_empty() && !batch.has_pulls_of(connection) =>
            {
                let request = SignedRequest {
                    head,
                    signed: signed.as_mut(),
                    properties: b"",
                    body,
                };
                self.read_end(py, batch, connection, request, &end)
            }
            Some((head, PlainHeader::Pull(pull))) if body.is_empty() && !head.is_oneway => {
                self.read_pull(py, batch, connection, head, &pull)
            }
            _ => false,
        };
        self.properties = properties;
        Ok(is_plain)
    }

    fn read_pull(
        &mut self,
        py: Python<'_>,
        batch: &mut Batch,
        connection: &Connection<'_>,
        head: Head,
        pull: &PullHeader<'_>,
    ) -> bool {
        // With accounts, the Python path says who may read.
        if self.grants.is_some() || !batch.accepts_pull(connection) {
            return false;
        }
        let deliveries = &mut batch.deliveries;
        match self.pulls.answer(py, &self.tail, head, pull, deliveries) {
            Ok(Some(response)) => {
                batch.add_pull_response(connection, response);
                true
            }
            Ok(None) => false,
            Err(error) => {
                batch.pull_errors.push(error); // the Python path answers
                false
            }
        }
    }

    /// Return whether a request is known to be allowed, and note the account of its connection.
    fn is_allowed(
        &self,
        py: Python<'_>,
        batch: &mut Batch,
        connection: &Connection<'_>,
        request: SignedRequest<'_, '_>,
        topic: &[u8],
    ) -> bool {
        let SignedRequest {
            signed,
            properties,
            body,
            ..
        } = request;
        let Some(grants) = &self.grants else {
            return true;
        };
        let Some(signed) = signed else {
            return false;
        };
        let [a, b, c, d, ..] = connection.host;
        match grants.check([a, b, c, d], topic, signed, properties, body) {
            Access::Open => true,
            Access::Granted(account) => {
                // Only the first account of a connection counts.
                if batch
                    .accounts
                    .last()
                    .is_none_or(|(chunk, _)| *chunk != connection.index)
                {
                    let access_key = account.access_key.clone_ref(py);
                    batch.accounts.push((connection.index, access_key));
                }
                true
            }
            Access::Unknown => false,
        }
    }

    fn read_send(
        &mut self,
        py: Python<'_>,
        batch: &mut Batch,
        connection: &Connection<'_>,
        request: SignedRequest<'_, '_>,
        send: &SendHeader<'_>,
    ) -> PyResult<bool> {
        let SignedRequest {
            head,
            properties,
            body,
            ..
        } = request;
        let limits = &self.limits;
        if body.len() > limits.message_bytes || properties.len() > PROPERTIES_BYTES_MAX {
            return Ok(false);
        }
        let Some(parsed) = properties::parse(properties) else {
            return Ok(false);
        };
        let Some(topic) = self.open_topic(py, batch, send)? else {
            return Ok(false);
        };
        if !self.is_allowed(py, batch, connection, request, send.topic) {
            return Ok(false);
        }
        let Some((mark_begin, mark_end)) = parsed.half_mark else {
            // A prepared or rolled-back plain message would never be seen.
            if send.sys_flag & !CLIENT_SYS_FLAGS != 0 {
                return Ok(false);
            }
            let stored = batch.store(body, &[properties], &self.added_properties);
            if stored.bytes() > limits.record_bytes {
                batch.discard(&stored);
                return Ok(false);
            }
            let queue = batch.queue(topic, send.queue_id);
            let message = Message {
                queue,
                flag: send.flag,
                sys_flag: send.sys_flag,
                born_ms: send.born_ms,
                reconsume_times: send.reconsume_times,
                host: connection.host,
                tags_code: java_hash::tags_code(parsed.tags),
                key_count: batch.add_keys(queue, &parsed),
                stored,
            };
            batch.add(connection, head, Kind::Send(message));
            return Ok(true);
        };
        let (group, key) = (parsed.group, parsed.unique_key);
        if group.is_empty() || group.len() > GROUP_BYTES_MAX || key.len() > UNIQUE_KEY_BYTES_MAX {
            return Ok(false);
        }
        // The header is ASCII, so this cannot fail.
        let Ok(group) = std::str::from_utf8(group) else {
            return Ok(false);
        };
        let kept = [&properties[..mark_begin], &properties[mark_end..]];
        let stored = batch.store(body, &kept, &self.added_properties);
        let topic = batch.topics[topic].name.clone();
        let size = stored.bytes() + half_tail_bytes(key, &topic.text);
        let is_within_limits = size <= self.limits.record_bytes && size <= self.limits.half_bytes;
        let due_ms = self.due_ms(py, batch.now_ms, &topic.text, group)?;
        let table = self.table.clone_ref(py);
        let mut table = table.borrow_mut(py);
        let (Some(due_ms), true, false) = (
            due_ms,
            is_within_limits && self.has_room(table.total(), table.totals_of(group), size as u64),
            table.knows(py, (group, &topic.text, key)),
        ) else {
            batch.discard(&stored);
            return Ok(false);
        };
        let group = table.group_name(py, group);
        let mut half = Half::parked(
            topic,
            send.queue_id,
            group,
            key,
            batch.now_ms,
            due_ms,
            Some(connection.producer.clone().unbind()),
        );
        half.final_properties_bytes = stored.properties.len() as u16;
        let identity = half.identity();
        let half_topic = batch.topic(&self.half_name);
        let queue = batch.queue(half_topic, 0);
        let message = Message {
            queue,
            flag: send.flag,
            sys_flag: send.sys_flag & CLIENT_SYS_FLAGS,
            born_ms: send.born_ms,
            reconsume_times: send.reconsume_times.max(0),
            host: connection.host,
            tags_code: java_hash::tags_code(parsed.tags),
            key_count: batch.add_keys(queue, &parsed),
            stored,
        };
        // The batch has it before it is reserved, so that it can be released in any case.
        let index = batch.keep_half(half);
        batch.add(connection, head, Kind::Half(message, index));
        table.reserve_new(identity);
        Ok(true)
    }

    fn has_room(&self, total: HalfTotals, group: HalfTotals, size: u64) -> bool {
        total.count < self.limits.open
            && group.count < self.limits.group_open
            && total.size + size <= self.limits.open_bytes
            && group.size + size <= self.limits.group_open_bytes
    }

    /// Return the topic of a send, if a client may send to this queue.
    fn open_topic(
        &self,
        py: Python<'_>,
        batch: &mut Batch,
        send: &SendHeader<'_>,
    ) -> PyResult<Option<usize>> {
        let index = match batch.topic_index.get(send.topic) {
            Some(index) => *index,
            None => {
                // The header is ASCII, so this cannot fail.
                let Ok(text) = std::str::from_utf8(send.topic) else {
                    return Ok(None);
                };
                batch.topic(&Name::new(py, text))
            }
        };
        let topic = &mut batch.topics[index];
        let queue_count = match topic.queue_count {
            Some(count) => count,
            None => {
                let count = self.queue_counts.bind(py).get_item(&*topic.name.text)?;
                let count = count.map_or(Ok(0), |count| count.extract())?;
                *topic.queue_count.insert(count)
            }
        };
        let is_open =
            (0..queue_count).contains(&send.queue_id) && send.topic.len() <= TOPIC_BYTES_MAX;
        Ok(is_open.then_some(index))
    }

    fn due_ms(
        &mut self,
        py: Python<'_>,
        now_ms: i64,
        topic: &str,
        group: &str,
    ) -> PyResult<Option<i64>> {
        let Some(immunity_ms) = &self.immunity_ms else {
            return Ok(None);
        };
        let known = self
            .immunities
            .get(topic)
            .and_then(|groups| groups.get(group));
        if let Some(immunity) = known {
            return Ok(Some(now_ms + immunity));
        }
        let immunity: i64 = immunity_ms.bind(py).call1((topic, group))?.extract()?;
        // Clients choose the names.
        if self.immunities.values().map(HashMap::len).sum::<usize>() >= IMMUNITIES_MAX {
            self.immunities.clear();
        }
        self.immunities
            .entry(topic.into())
            .or_default()
            .insert(group.into(), immunity);
        Ok(Some(now_ms + immunity))
    }

    fn read_end(
        &mut self,
        py: Python<'_>,
        batch: &mut Batch,
        connection: &Connection<'_>,
        request: SignedRequest<'_, '_>,
        end: &EndHeader<'_>,
    ) -> bool {
        let head = request.head;
        let table = self.table.clone_ref(py);
        let mut table = table.borrow_mut(py);
        let Some(decided) = table.plain_half(py, end.queue_offset) else {
            return false;
        };
        // The Python path parks halves whose keys need escapes in a response.
        let is_plain_key = decided.key_bytes().iter().all(u8::is_ascii_alphanumeric);
        if !is_plain_key
            || decided.log_offset != end.log_offset
            || decided.group.text.as_bytes() != end.group
        {
            return false;
        }
        if !self.is_allowed(
            py,
            batch,
            connection,
            request,
            decided.topic.text.as_bytes(),
        ) {
            return false;
        }
        let mut ending = Ending {
            half: 0,
            host: connection.host,
            op_queue: 0,
            final_message: None,
        };
        if end.is_commit {
            let final_properties_bytes = usize::from(decided.final_properties_bytes);
            let Some(stored) = self
                .tail
                .find(py, decided.log_offset)
                .and_then(|data| record::read_half(data, final_properties_bytes))
            else {
                return false;
            };
            // Of other text, tags and keys are hashed by UTF-16 units.
            if !stored.final_properties.is_ascii() {
                return false;
            }
            let client_properties = stored
                .final_properties
                .strip_suffix(&*self.added_properties);
            let Some(parsed) = client_properties.and_then(properties::parse) else {
                return false;
            };
            let topic = batch.topic(&decided.topic);
            let queue = batch.queue(topic, decided.queue_id);
            let message = Message {
                queue,
                flag: stored.flag,
                sys_flag: stored.sys_flag | TRANSACTION_COMMIT,
                born_ms: stored.born_ms,
                reconsume_times: stored.reconsume_times,
                host: stored.born_host,
                tags_code: java_hash::tags_code(parsed.tags),
                key_count: batch.add_keys(queue, &parsed),
                stored: batch.store(stored.body, &[stored.final_properties], b""),
            };
            ending.final_message = Some((message, stored.body_crc));
        }
        batch.topic(&decided.topic); // for the counters
        let op_topic = batch.topic(&self.op_name);
        ending.op_queue = batch.queue(op_topic, 0);
        if !end.is_commit {
            let mut key = Vec::new();
            number(&mut key, end.queue_offset);
            batch
                .hashes
                .push(java_hash::index_hash(batch.topics[op_topic].hash, &key));
        }
        ending.half = batch.keep_half(decided);
        batch.add(connection, head, Kind::End(ending));
        table.set_being_decided(py, end.queue_offset, true);
        true
    }
}

enum Frame {
    Complete(usize),
    Incomplete,
    NotPlain,
}

/// Return what is known of the frame at the begin of the data.
fn frame_bytes(data: &[u8]) -> Frame {
    let Some(prefix) = data.get(..PREFIX_BYTES) else {
        return Frame::Incomplete;
    };
    let length = u32::from_be_bytes([prefix[0], prefix[1], prefix[2], prefix[3]]) as usize;
    let header_bytes = u32::from_be_bytes([0, prefix[5], prefix[6], prefix[7]]) as usize;
    let serializer = prefix[4];
    if serializer != 0 || length < 4 || length + 4 > FRAME_BYTES_MAX || header_bytes > length - 4 {
        return Frame::NotPlain;
    }
    if data.len() < length + 4 {
        Frame::Incomplete
    } else {
        Frame::Complete(length + 4)
    }
}

/// Add to an incomplete frame what it lacks. Return how many bytes of the data it took.
fn complete_frame(partial: &mut Vec<u8>, data: &[u8]) -> usize {
    let mut taken = 0;
    if partial.len() < PREFIX_BYTES {
        taken = data.len().min(PREFIX_BYTES - partial.len());
        partial.extend_from_slice(&data[..taken]);
    }
    if partial.len() >= 4 {
        let length = u32::from_be_bytes([partial[0], partial[1], partial[2], partial[3]]) as usize;
        let missing = (length + 4)
            .min(FRAME_BYTES_MAX)
            .saturating_sub(partial.len());
        let end = data.len().min(taken + missing);
        partial.extend_from_slice(&data[taken..end]);
        taken = end;
    }
    taken
}

/// Where the body and the properties of a message are in the buffer of a batch.
struct StoredParts {
    body: Range<usize>,
    properties: Range<usize>,
}

impl StoredParts {
    fn bytes(&self) -> usize {
        self.body.len() + self.properties.len()
    }
}

/// A message whose offsets are not known yet.
struct Message {
    queue: usize,
    flag: i32,
    sys_flag: i32,
    born_ms: i64,
    reconsume_times: i32,
    host: [u8; 8],
    tags_code: i64,
    key_count: usize, // of the hashes that the batch has
    stored: StoredParts,
}

struct Ending {
    half: usize, // of the halves that the batch has
    host: [u8; 8],
    op_queue: usize,
    /// Of a commit: the final, and the CRC of its body.
    final_message: Option<(Message, u32)>,
}

enum Kind {
    Send(Message),
    Half(Message, usize), // of the halves that the batch has
    End(Ending),
}

struct Request {
    chunk: usize,
    head: Head,
    kind: Kind,
    position: Position, // of the message: the half, or the final of a commit
}

/// A queue to which a batch adds messages.
struct Queue {
    topic: usize,
    queue_id: i32,
    next_offset: i64,
    entries: Vec<u8>,
    count: usize,
}

/// What was committed or rolled back: by topic, and how long after it was parked.
type Outcome = (usize, bool, i64);

/// The plain requests of one turn.
#[pyclass(module = "escrowmq_native")]
pub struct Batch {
    owner: Py<PlainRequests>,
    now_ms: i64,
    requests: Vec<Request>,
    halves: Vec<Half>, // new ones, and copies of those that are decided
    buffer: Vec<u8>,   // bodies and properties
    topics: Vec<Topic>,
    topic_index: HashMap<Box<[u8]>, usize>,
    queues: Vec<Queue>,
    hashes: Vec<u32>, // of keys, in the order of the records
    leftovers: Vec<(usize, Vec<u8>, bool)>,
    allows_pulls: bool,
    pull_responses: Vec<(usize, Vec<Piece>)>, // with the numbers of chunks
    pull_count: usize,
    connection_pulls: usize, // of the last of these chunks
    connection_pulled_bytes: usize,
    pulled_bytes: usize, // of all chunks
    deliveries: Deliveries,
    pull_errors: Vec<PyErr>,
    accounts: Vec<(usize, Py<PyString>)>, // by chunk: the access key of its first signed request
    // Set by `encode`.
    pieces: Vec<(i64, Arc<Vec<u8>>)>,
    end: i64,
    last_record_offset: i64,
    record_count: usize,
    key_offsets: Vec<i64>,
    stored_ms: i64,
    sizes: HashMap<(usize, bool, usize), u64>, // by topic, is half, size: number of messages
}

impl Batch {
    fn new(owner: Py<PlainRequests>, now_ms: i64) -> Batch {
        Batch {
            owner,
            now_ms,
            requests: Vec::new(),
            halves: Vec::new(),
            buffer: Vec::new(),
            topics: Vec::new(),
            topic_index: HashMap::new(),
            queues: Vec::new(),
            hashes: Vec::new(),
            leftovers: Vec::new(),
            allows_pulls: false,
            pull_responses: Vec::new(),
            pull_count: 0,
            connection_pulls: 0,
            connection_pulled_bytes: 0,
            pulled_bytes: 0,
            deliveries: Deliveries::new(),
            pull_errors: Vec::new(),
            accounts: Vec::new(),
            pieces: Vec::new(),
            end: 0,
            last_record_offset: -1,
            record_count: 0,
            key_offsets: Vec::new(),
            stored_ms: 0,
            sizes: HashMap::new(),
        }
    }

    // --- reading ---------------------------------------------------------------------------------

    fn add(&mut self, connection: &Connection<'_>, head: Head, kind: Kind) {
        let position = Position::default();
        self.requests.push(Request {
            chunk: connection.index,
            head,
            kind,
            position,
        });
    }

    /// Return whether requests of this chunk were pulls. Their responses leave at once, so what
    /// follows them and is stored first has to wait for the Python path.
    fn has_pulls_of(&self, connection: &Connection<'_>) -> bool {
        self.pull_responses
            .last()
            .is_some_and(|(chunk, _)| *chunk == connection.index)
    }

    fn accepts_pull(&self, connection: &Connection<'_>) -> bool {
        let is_first = !self.has_pulls_of(connection);
        let is_behind_others = self
            .requests
            .last()
            .is_some_and(|request| request.chunk == connection.index);
        self.allows_pulls
            && !is_behind_others
            && self.pull_count < PULLS_MAX
            && self.pulled_bytes < BATCH_PULLED_BYTES_MAX
            && (is_first
                || (self.connection_pulls < CONNECTION_PULLS_MAX
                    && self.connection_pulled_bytes < PULLED_BYTES_MAX))
    }

    fn add_pull_response(&mut self, connection: &Connection<'_>, response: Vec<Piece>) {
        if !self.has_pulls_of(connection) {
            (self.connection_pulls, self.connection_pulled_bytes) = (0, 0);
            self.pull_responses.push((connection.index, Vec::new()));
        }
        self.pull_count += 1;
        self.connection_pulls += 1;
        let bytes = response.iter().map(Piece::len).sum::<usize>();
        self.connection_pulled_bytes += bytes;
        self.pulled_bytes += bytes;
        if let Some((_, pieces)) = self.pull_responses.last_mut() {
            pieces.extend(response);
        }
    }

    /// Copy body and properties. The properties get a separator at the end, and `added`.
    fn store(&mut self, body: &[u8], properties: &[&[u8]], added: &[u8]) -> StoredParts {
        let begin = self.buffer.len();
        self.buffer.extend_from_slice(body);
        let body_end = self.buffer.len();
        for part in properties {
            self.buffer.extend_from_slice(part);
        }
        if self.buffer.last() != Some(&ITEM_END) {
            self.buffer.push(ITEM_END);
        }
        self.buffer.extend_from_slice(added);
        StoredParts {
            body: begin..body_end,
            properties: body_end..self.buffer.len(),
        }
    }

    /// Undo the last `store`.
    fn discard(&mut self, stored: &StoredParts) {
        self.buffer.truncate(stored.body.start);
    }

    /// Keep a half, and return its index.
    fn keep_half(&mut self, half: Half) -> usize {
        self.halves.push(half);
        self.halves.len() - 1
    }

    fn topic(&mut self, name: &Arc<Name>) -> usize {
        if let Some(index) = self.topic_index.get(name.text.as_bytes()) {
            return *index;
        }
        let hash = java_hash::topic_hash(name.text.as_bytes());
        let index = self.topics.len();
        self.topics.push(Topic {
            name: name.clone(),
            hash,
            queue_count: None,
            queues: Vec::new(),
        });
        self.topic_index.insert(name.text.as_bytes().into(), index);
        index
    }

    fn queue(&mut self, topic: usize, queue_id: i32) -> usize {
        let known = &mut self.topics[topic].queues;
        if let Some((_, index)) = known.iter().find(|(known_id, _)| *known_id == queue_id) {
            return *index;
        }
        let index = self.queues.len();
        known.push((queue_id, index));
        self.queues.push(Queue {
            topic,
            queue_id,
            next_offset: 0,
            entries: Vec::new(),
            count: 0,
        });
        index
    }

    fn add_keys(&mut self, queue: usize, parsed: &PlainProperties<'_>) -> usize {
        let topic_hash = self.topics[self.queues[queue].topic].hash;
        let before = self.hashes.len();
        let hashes =
            properties::index_keys(parsed).map(|key| java_hash::index_hash(topic_hash, key));
        self.hashes.extend(hashes);
        self.hashes.len() - before
    }

    // --- encoding --------------------------------------------------------------------------------

    fn encode_requests(&mut self, log: &mut LogEncoder) {
        let mut requests = std::mem::take(&mut self.requests);
        let result = catch_unwind(AssertUnwindSafe(|| {
            for request in &mut requests {
                request.position = self.encode_request(log, request);
            }
        }));
        // After a panic too: `cancel` and `requests` need them.
        self.requests = requests;
        result.unwrap_or_else(|panic| resume_unwind(panic));
    }

    fn encode_request(&mut self, log: &mut LogEncoder, request: &Request) -> Position {
        match &request.kind {
            Kind::Send(message) => self.encode_message(log, message, &[], None, 0, false),
            Kind::Half(message, half) => {
                let half = &self.halves[*half];
                let queue_id = half.queue_id;
                let tail = half_tail(half.key_bytes(), &half.topic.text, queue_id);
                let position = self.encode_message(log, message, &tail, None, 0, true);
                // The sender expects the queue that it asked for.
                Position {
                    queue_id,
                    ..position
                }
            }
            Kind::End(ending) => self.encode_ending(log, ending),
        }
    }

    /// Encode the final of a commit, and the op. Return the position of the final.
    fn encode_ending(&mut self, log: &mut LogEncoder, ending: &Ending) -> Position {
        let half = &self.halves[ending.half];
        let (queue_offset, log_offset) = (half.queue_offset, half.log_offset);
        let mut body = Vec::new();
        number(&mut body, queue_offset);
        let mut position = Position::default();
        let mut properties: Vec<&[u8]> = vec![COMMIT_PROPERTIES];
        if let Some((message, body_crc)) = &ending.final_message {
            position = self.encode_message(log, message, &[], Some(*body_crc), log_offset, false);
        } else {
            properties = vec![ROLLBACK_PROPERTIES, &body, &[ITEM_END]];
        }
        let queue = &mut self.queues[ending.op_queue];
        let fields = Fields {
            queue_id: 0,
            flag: 0,
            queue_offset: queue.next_offset,
            log_offset: 0,
            sys_flag: 0,
            born_ms: self.now_ms,
            born_host: ending.host,
            stored_ms: self.stored_ms,
            store_host: log.store_host,
            reconsume_times: 0,
            prepared_offset: 0,
        };
        let topic = self.topics[queue.topic].name.text.as_bytes();
        let parts = Parts {
            body: &body,
            topic,
            properties: &properties,
            body_crc: None,
        };
        let (op_offset, size) = log.add(fields, &parts);
        queue.add(op_offset, size, OP_TAGS_CODE);
        if ending.final_message.is_none() {
            self.key_offsets.push(op_offset);
        }
        position
    }

    fn encode_message(
        &mut self,
        log: &mut LogEncoder,
        message: &Message,
        tail: &[u8],
        body_crc: Option<u32>,
        prepared_offset: i64,
        is_half: bool,
    ) -> Position {
        let queue = &mut self.queues[message.queue];
        let (queue_id, queue_offset) = (queue.queue_id, queue.next_offset);
        let fields = Fields {
            queue_id,
            flag: message.flag,
            queue_offset,
            log_offset: 0,
            sys_flag: message.sys_flag,
            born_ms: message.born_ms,
            born_host: message.host,
            stored_ms: self.stored_ms,
            store_host: log.store_host,
            reconsume_times: message.reconsume_times,
            prepared_offset,
        };
        let own_properties = &self.buffer[message.stored.properties.clone()];
        let properties: &[&[u8]] = if tail.is_empty() {
            &[own_properties]
        } else {
            &[own_properties, tail]
        };
        let parts = Parts {
            body: &self.buffer[message.stored.body.clone()],
            topic: self.topics[queue.topic].name.text.as_bytes(),
            properties,
            body_crc,
        };
        let (log_offset, size) = log.add(fields, &parts);
        queue.add(log_offset, size, message.tags_code);
        self.key_offsets
            .extend(std::iter::repeat_n(log_offset, message.key_count));
        if body_crc.is_none() && !is_half {
            *self.sizes.entry((queue.topic, false, size)).or_default() += 1;
        }
        Position {
            log_offset,
            queue_id,
            queue_offset,
        }
    }
}

impl Queue {
    fn add(&mut self, log_offset: i64, size: usize, tags_code: i64) {
        self.entries.extend_from_slice(&log_offset.to_be_bytes());
        self.entries.extend_from_slice(&(size as u32).to_be_bytes());
        self.entries.extend_from_slice(&tags_code.to_be_bytes());
        self.next_offset += 1;
        self.count += 1;
    }
}

/// Encodes records one after the other, and begins a new segment where one is full.
struct LogEncoder {
    store_host: [u8; 8],
    has_crc: bool,
    segment_bytes: i64,
    pieces: Vec<(i64, Arc<Vec<u8>>)>,
    piece: Vec<u8>,
    piece_begin: i64,
    remaining_bytes: i64, // of the segment, without the blank record that may end it
    record_count: usize,
    last_record_offset: i64,
}

impl LogEncoder {
    fn end(&self) -> i64 {
        self.piece_begin + self.piece.len() as i64
    }

    fn add(&mut self, fields: Fields, parts: &Parts) -> (i64, usize) {
        let size = parts.record_bytes(self.has_crc);
        if size as i64 > self.remaining_bytes {
            let remaining = self.remaining_bytes + BLANK_BYTES;
            let next_begin = self.end() + remaining;
            record::encode_blank(&mut self.piece, remaining);
            self.finish_piece();
            self.piece_begin = next_begin;
            self.remaining_bytes = self.segment_bytes - BLANK_BYTES;
        }
        let log_offset = self.end();
        record::encode(
            &mut self.piece,
            &Fields {
                log_offset,
                ..fields
            },
            parts,
            self.has_crc,
        );
        self.remaining_bytes -= size as i64;
        self.record_count += 1;
        self.last_record_offset = log_offset;
        (log_offset, size)
    }

    fn finish_piece(&mut self) {
        let piece = std::mem::take(&mut self.piece);
        self.pieces.push((self.piece_begin, Arc::new(piece)));
    }
}

/// Return the properties that only a half has.
fn half_tail(key: &[u8], topic: &str, queue_id: i32) -> Vec<u8> {
    let mut tail = Vec::with_capacity(half_tail_bytes(key, topic));
    tail.extend_from_slice(b"__transactionId__\x01");
    tail.extend_from_slice(key);
    tail.extend_from_slice(b"\x02TRAN_MSG\x01true\x02REAL_TOPIC\x01");
    tail.extend_from_slice(topic.as_bytes());
    tail.extend_from_slice(b"\x02REAL_QID\x01");
    number(&mut tail, i64::from(queue_id));
    tail.push(ITEM_END);
    tail
}

/// Return how many bytes `half_tail` has at most.
fn half_tail_bytes(key: &[u8], topic: &str) -> usize {
    const NAMES_AND_DIGITS: usize = 80;
    NAMES_AND_DIGITS + key.len() + topic.len()
}

#[pymethods]
impl Batch {
    /// How many requests it has.
    fn __len__(&self) -> usize {
        self.requests.len()
    }

    /// What was not read: number of the chunk, remaining bytes, and whether they begin with a
    /// request that is not plain. If they do not, they are an incomplete frame.
    #[getter]
    fn leftovers<'py>(&self, py: Python<'py>) -> Vec<(usize, Bound<'py, PyBytes>, bool)> {
        let leftovers = self.leftovers.iter();
        leftovers
            .map(|(chunk, rest, is_stopped)| (*chunk, PyBytes::new(py, rest), *is_stopped))
            .collect()
    }

    /// Number of the chunk and access key, of each chunk whose requests are signed.
    #[getter]
    fn accounts(&self, py: Python<'_>) -> Vec<(usize, Py<PyString>)> {
        let accounts = self.accounts.iter();
        accounts
            .map(|(chunk, access_key)| (*chunk, access_key.clone_ref(py)))
            .collect()
    }

    /// Topic and queue id of each queue that gets messages.
    #[getter]
    fn queues(&self, py: Python<'_>) -> Vec<(Py<PyString>, i32)> {
        let queues = self.queues.iter();
        queues
            .map(|queue| (self.topics[queue.topic].name.object(py), queue.queue_id))
            .collect()
    }

    /// The responses to pulls: number of the chunk, and pieces of bytes.
    fn pull_responses<'py>(&self, py: Python<'py>) -> PyResult<Vec<PullResponses<'py>>> {
        let responses = self.pull_responses.iter();
        responses
            .map(|(chunk, pieces)| {
                let views: PyResult<_> = pieces.iter().map(|piece| piece.view(py)).collect();
                Ok((*chunk, views?))
            })
            .collect()
    }

    /// What was raised by the functions that pulls call.
    fn pull_errors(&self, py: Python<'_>) -> Vec<Py<PyBaseException>> {
        let errors = self.pull_errors.iter();
        errors
            .map(|error| error.value(py).clone().unbind())
            .collect()
    }

    /// What the pulls deliver: request code, topic, group, numbers of pulls, messages and bytes.
    fn deliveries(&self) -> Vec<(i32, String, String, u64, u64, u64)> {
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let deliveries = self.deliveries.iter();
        deliveries
            .map(|((code, topic, group), (pulls, messages, bytes))| {
                (*code, text(topic), text(group), *pulls, *messages, *bytes)
            })
            .collect()
    }

    /// Encode all records for the end of the log. `next_offsets` are those of the queues.
    fn encode(
        &mut self,
        py: Python<'_>,
        log_end: i64,
        segment_bytes: i64,
        stored_ms: i64,
        next_offsets: Vec<i64>,
    ) {
        let (store_host, has_crc) = {
            let owner = self.owner.borrow(py);
            (owner.store_host, owner.has_crc)
        };
        for (queue, next_offset) in self.queues.iter_mut().zip(next_offsets) {
            queue.next_offset = next_offset;
        }
        self.stored_ms = stored_ms;
        let mut log = LogEncoder {
            store_host,
            has_crc,
            segment_bytes,
            pieces: Vec::new(),
            piece: Vec::with_capacity(self.buffer.len() + 512 * self.requests.len()),
            piece_begin: log_end,
            remaining_bytes: segment_bytes - BLANK_BYTES - log_end % segment_bytes,
            record_count: 0,
            last_record_offset: -1,
        };
        self.encode_requests(&mut log);
        self.end = log.end();
        log.finish_piece();
        self.record_count = log.record_count;
        self.last_record_offset = log.last_record_offset;
        self.pieces = log.pieces;
    }

    /// The bytes to write, each with the log offset at which they begin.
    #[getter]
    fn pieces<'py>(&self, py: Python<'py>) -> PyResult<Vec<(i64, Bound<'py, PyMemoryView>)>> {
        let piece = |(begin, bytes): &(i64, Arc<Vec<u8>>)| Ok((*begin, shared_view(py, bytes)?));
        self.pieces.iter().map(piece).collect()
    }

    /// The log offset behind the last record.
    #[getter]
    fn end(&self) -> i64 {
        self.end
    }

    #[getter]
    fn last_record_offset(&self) -> i64 {
        self.last_record_offset
    }

    #[getter]
    fn record_count(&self) -> usize {
        self.record_count
    }

    /// The entries of each queue, in the order of `queues`.
    #[getter]
    fn entries<'py>(&self, py: Python<'py>) -> Vec<Bound<'py, PyBytes>> {
        self.queues
            .iter()
            .map(|queue| PyBytes::new(py, &queue.entries))
            .collect()
    }

    /// Tags code and properties of the messages that a queue gets, for consumers that wait.
    fn arrivals<'py>(&self, py: Python<'py>, queue: usize) -> Vec<(i64, Bound<'py, PyBytes>)> {
        let messages = self
            .requests
            .iter()
            .filter_map(|request| match &request.kind {
                Kind::Send(message) | Kind::Half(message, _) => Some(message),
                Kind::End(ending) => ending.final_message.as_ref().map(|(message, _)| message),
            });
        messages
            .filter(|message| message.queue == queue)
            .map(|message| {
                let properties = &self.buffer[message.stored.properties.clone()];
                (message.tags_code, PyBytes::new(py, properties))
            })
            .collect()
    }

    /// The keys of all records, for the key index.
    fn take_keys(&mut self) -> KeyBlock {
        let (hashes, offsets) = (
            std::mem::take(&mut self.hashes),
            std::mem::take(&mut self.key_offsets),
        );
        KeyBlock::new(hashes, offsets, self.stored_ms)
    }

    /// The records are stored: add the halves to the table, and remove those that are decided.
    fn apply(&mut self, py: Python<'_>) -> PyResult<Applied> {
        let mut owner = self.owner.borrow_mut(py);
        for (begin, bytes) in &self.pieces {
            owner
                .tail
                .push(py, *begin, SharedBytes::Native(bytes.clone()));
        }
        let table = owner.table.clone_ref(py);
        let mut table = table.borrow_mut(py);
        let mut applied = Applied::default();
        let mut outcomes: HashMap<Outcome, u64> = HashMap::new();
        for request in &self.requests {
            match &request.kind {
                Kind::Send(_) => applied.send_count += 1,
                Kind::Half(_, half) => {
                    applied.send_count += 1;
                    let position = request.position;
                    let mut half = self.halves[*half].copy(py);
                    half.queue_offset = position.queue_offset;
                    half.log_offset = position.log_offset;
                    half.size = self.size_at(position.log_offset);
                    let topic = self.topic_index[half.topic.text.as_bytes()];
                    *self
                        .sizes
                        .entry((topic, true, half.size as usize))
                        .or_default() += 1;
                    applied.add_half(half.queue_offset, half.due_ms);
                    table.add_half(py, half);
                }
                Kind::End(ending) => {
                    if applied.end_count == 0 {
                        let queue = &self.queues[ending.op_queue];
                        applied.first_op_offset = queue.next_offset - queue.count as i64;
                    }
                    applied.end_count += 1;
                    let is_commit = ending.final_message.is_some();
                    let half = &self.halves[ending.half];
                    let topic = self.topic_index[half.topic.text.as_bytes()];
                    let waited_ms = (self.now_ms - half.parked_ms).max(0);
                    *outcomes.entry((topic, is_commit, waited_ms)).or_default() += 1;
                    let offsets = if is_commit {
                        &mut applied.committed
                    } else {
                        &mut applied.rolled_back
                    };
                    offsets.extend_from_slice(&half.queue_offset.to_ne_bytes());
                    applied
                        .ended
                        .extend_from_slice(&half.queue_offset.to_ne_bytes());
                    table.set_being_decided(py, half.queue_offset, false);
                    table.close_at(py, half.queue_offset);
                }
            }
        }
        for ((topic, is_commit, waited_ms), count) in outcomes {
            let topic = self.topics[topic].name.text.to_string();
            applied.outcomes.push((topic, is_commit, waited_ms, count));
        }
        for ((topic, is_half, size), count) in &self.sizes {
            applied.sizes.push((
                self.topics[*topic].name.text.to_string(),
                *is_half,
                *size,
                *count,
            ));
        }
        Ok(applied)
    }

    /// The records could not be stored: everything is as it was before `read`.
    fn cancel(&mut self, py: Python<'_>) {
        let owner = self.owner.borrow(py);
        let mut table = owner.table.borrow_mut(py);
        for request in &self.requests {
            match &request.kind {
                Kind::Send(_) => {}
                Kind::Half(_, half) => table.release_key(self.halves[*half].triple()),
                Kind::End(ending) => {
                    let queue_offset = self.halves[ending.half].queue_offset;
                    table.set_being_decided(py, queue_offset, false);
                }
            }
        }
    }

    /// The successful responses: number of the chunk, and bytes. One-way requests get none.
    fn responses<'py>(&self, py: Python<'py>) -> Vec<(usize, Bound<'py, PyBytes>)> {
        let encoder = self.owner.borrow(py).responses.clone();
        let mut responses = Vec::new();
        let mut out = Vec::new();
        let mut requests = self.requests.iter().peekable();
        while let Some(request) = requests.next() {
            if !request.head.is_oneway {
                self.encode_response(&encoder, request, &mut out);
            }
            if requests
                .peek()
                .is_none_or(|next| next.chunk != request.chunk)
                && !out.is_empty()
            {
                responses.push((request.chunk, PyBytes::new(py, &out)));
                out.clear();
            }
        }
        responses
    }

    /// What a slow path needs to respond: number of the chunk, request code, opaque, one-way,
    /// and the position of the message, with the transaction id of a half.
    fn requests<'py>(&self, py: Python<'py>) -> Vec<RequestOutcome<'py>> {
        let outcome = |request: &Request| {
            let (code, key) = match &request.kind {
                Kind::Send(_) => (310, None),
                Kind::Half(_, half) => {
                    (310, Some(PyBytes::new(py, self.halves[*half].key_bytes())))
                }
                Kind::End(_) => (37, None),
            };
            let position = request.position;
            (
                request.chunk,
                code,
                request.head.opaque,
                request.head.is_oneway,
                (
                    position.log_offset,
                    position.queue_id,
                    position.queue_offset,
                ),
                key,
            )
        };
        self.requests.iter().map(outcome).collect()
    }
}

type PullResponses<'py> = (usize, Vec<Bound<'py, PyMemoryView>>);

type RequestOutcome<'py> = (
    usize,
    i32,
    i32,
    bool,
    (i64, i32, i64),
    Option<Bound<'py, PyBytes>>,
);

impl Batch {
    fn encode_response(&self, encoder: &ResponseEncoder, request: &Request, out: &mut Vec<u8>) {
        let (opaque, position) = (request.head.opaque, request.position);
        match &request.kind {
            Kind::Send(_) => encoder.send(out, opaque, position, None),
            Kind::Half(_, half) => {
                encoder.send(out, opaque, position, Some(self.halves[*half].key_bytes()));
            }
            Kind::End(ending) => {
                let half = &self.halves[ending.half];
                let topic = half.topic.text.as_bytes();
                let position = ending.final_message.as_ref().map(|_| position);
                encoder.end(
                    out,
                    opaque,
                    half.key_bytes(),
                    topic,
                    half.queue_id,
                    position,
                );
            }
        }
    }

    /// Return the size of a record that this batch has encoded.
    fn size_at(&self, log_offset: i64) -> u32 {
        let index = self
            .pieces
            .partition_point(|(begin, _)| *begin <= log_offset)
            - 1;
        let (begin, bytes) = &self.pieces[index];
        let position = (log_offset - begin) as usize;
        u32::from_be_bytes([
            bytes[position],
            bytes[position + 1],
            bytes[position + 2],
            bytes[position + 3],
        ])
    }
}

/// What a batch has changed, for the parts of the broker that are in Python.
#[pyclass(module = "escrowmq_native", get_all)]
#[derive(Default)]
pub struct Applied {
    send_count: usize,
    end_count: usize,
    /// Due times, and the queue offsets of the halves with this due time as 64-bit numbers.
    due: Vec<(i64, Vec<u8>)>,
    last_half_offset: i64,
    half_count: usize,
    first_op_offset: i64,
    /// Queue offsets as 64-bit numbers: of all halves that were ended, in the order of their ops.
    ended: Vec<u8>,
    committed: Vec<u8>,
    rolled_back: Vec<u8>,
    /// Topic, whether it was committed, milliseconds since it was parked, number of halves.
    outcomes: Vec<(String, bool, i64, u64)>,
    /// Topic, whether it is a half, size of the record, number of messages.
    sizes: Vec<(String, bool, usize, u64)>,
}

impl Applied {
    fn add_half(&mut self, queue_offset: i64, due_ms: i64) {
        let index = match self
            .due
            .iter()
            .position(|(known_ms, _)| *known_ms == due_ms)
        {
            Some(index) => index,
            None => {
                self.due.push((due_ms, Vec::new()));
                self.due.len() - 1
            }
        };
        self.due[index]
            .1
            .extend_from_slice(&queue_offset.to_ne_bytes());
        self.last_half_offset = queue_offset;
        self.half_count += 1;
    }
}
