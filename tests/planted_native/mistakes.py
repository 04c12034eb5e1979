"""The list of mistakes: a text of a source file, and what replaces it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Mistake:
    """A small change of meaning. `old` occurs in the file exactly once."""

    name: str
    path: str
    old: str
    new: str


BATCH: Final = "native/src/batch.rs"
HALF: Final = "native/src/half.rs"
HEADER: Final = "native/src/header.rs"
RECORD: Final = "native/src/record.rs"

MISTAKES: Final = (
    Mistake("wrong queue offset", BATCH, "self.next_offset += 1;", "self.next_offset += 2;"),
    Mistake(
        "a half lacks a property",
        BATCH,
        r'b"\x02TRAN_MSG\x01true\x02REAL_TOPIC\x01"',
        r'b"\x02REAL_TOPIC\x01"',
    ),
    Mistake(
        "the end of another group is accepted",
        BATCH,
        "            || decided.group.text.as_bytes() != end.group\n",
        "",
    ),
    Mistake(
        "an end for another log offset is accepted",
        BATCH,
        "            || decided.log_offset != end.log_offset\n",
        "",
    ),
    Mistake(
        "a rollback commits", HEADER, "VERDICT_ROLLBACK => false,", "VERDICT_ROLLBACK => true,"
    ),
    Mistake(
        "wrong due time",
        BATCH,
        "return Ok(Some(now_ms + immunity));",
        "return Ok(Some(now_ms + immunity / 2));",
    ),
    Mistake(
        "the limit of a group is not applied",
        BATCH,
        "            && group.count < self.limits.group_open\n",
        "",
    ),
    Mistake("wrong response code", "native/src/response.rs", '{"code":0', '{"code":1'),
    Mistake(
        "wrong hash of a negative key",
        "native/src/java_hash.rs",
        "hash.checked_abs().unwrap_or(0) as u32",
        "(hash & 0x7FFF_FFFF) as u32",
    ),
    Mistake(
        "wrong hash of tags",
        "native/src/java_hash.rs",
        "i64::from(extend(0, tags) as i32)",
        "i64::from(extend(0, tags))",
    ),
    Mistake(
        "wrong record CRC",
        RECORD,
        "put_crc_property(buffer, crc);",
        "put_crc_property(buffer, crc >> 1);",
    ),
    Mistake(
        "the record CRC is not checked",
        "native/src/log_check.rs",
        "return are_right && seal",
        "return seal",
    ),
    Mistake(
        "a half is removed twice",
        HALF,
        "            self.uncount(half);\n",
        "            self.uncount(half);\n            self.uncount(half);\n",
    ),
    Mistake(
        "the key of a decided half is forgotten",
        HALF,
        "self.remember(half.identity(), half.queue_offset, half.log_offset);",
        "",
    ),
    Mistake(
        "wrong waiting time in the counters",
        BATCH,
        "let waited_ms = (self.now_ms - half.parked_ms).max(0);",
        "let waited_ms = self.now_ms - self.now_ms;",
    ),
    Mistake("wrong number of ends", BATCH, "applied.end_count += 1;", "applied.end_count += 2;"),
    Mistake(
        "leftovers out of order",
        BATCH,
        "joined.extend_from_slice(&data[position..]);",
        "joined.splice(0..0, data[position..].iter().copied());",
    ),
    Mistake(
        "the share of a connection is not applied",
        BATCH,
        "if count < requests_max\n",
        "if (count < requests_max || true)\n",
    ),
    Mistake(
        "a cancelled half stays reserved",
        BATCH,
        "Kind::Half(_, half) => table.release_key(self.halves[*half].triple()),",
        "Kind::Half(..) => {}",
    ),
    Mistake(
        "a cancelled end leaves its half undecidable",
        BATCH,
        "table.set_being_decided(py, queue_offset, false);\n                }",
        "let _ = queue_offset;\n                }",
    ),
    Mistake(
        "a final does not name its half",
        BATCH,
        "Some(*body_crc), log_offset, false)",
        "Some(*body_crc), 0 * log_offset, false)",
    ),
    Mistake(
        "a final has no flag of a commit",
        BATCH,
        "stored.sys_flag | TRANSACTION_COMMIT",
        "stored.sys_flag | (TRANSACTION_COMMIT & 0)",
    ),
    Mistake(
        "a one-way request is answered",
        BATCH,
        "if !request.head.is_oneway {",
        "if !request.head.is_oneway || true {",
    ),
    Mistake(
        "a half can be decided twice in a turn",
        HALF,
        "self.is_stranded || self.is_being_decided ||",
        "self.is_stranded ||",
    ),
    Mistake(
        "a half that Python has becomes a row",
        HALF,
        "if unsafe { ffi::Py_REFCNT(object.as_ptr()) } > 1 {",
        "if unsafe { ffi::Py_REFCNT(object.as_ptr()) } > 9 {",
    ),
    Mistake(
        "a half loses its rare fields as a row",
        HALF,
        "            rare: self.rare.take(),\n",
        "            rare: None,\n",
    ),
    Mistake(
        "a half loses its producer as a row",
        HALF,
        "producer: self.producer.as_ref().map(|peer| peer.clone_ref(py)),",
        "producer: None,",
    ),
    Mistake(
        "a checked half is not in a snapshot",
        HALF,
        "if half.checks == 0 && remark.is_empty() {",
        "if remark.is_empty() {",
    ),
    Mistake(
        "a delayed message is plain",
        "native/src/properties.rs",
        """b'D' => name == b"DELAY",""",
        """b'D' => name == b"DELAYED",""",
    ),
    Mistake(
        "a segment is filled too far",
        BATCH,
        "self.remaining_bytes = self.segment_bytes - BLANK_BYTES;",
        "self.remaining_bytes = self.segment_bytes;",
    ),
    Mistake(
        "a damaged slot of the key index is believed",
        "native/src/key_index.rs",
        "if value < self.first { value } else { 0 }",
        "value",
    ),
    Mistake(
        "responses do not wait for the flush",
        "src/escrowmq/broker/native_requests.py",
        "        if self._when_flushed is None:\n",
        "        if self._when_flushed is None or batch:\n",
    ),
    Mistake(
        "pull: hidden messages are delivered",
        "native/src/pull.rs",
        'getattr("visible_end")',
        'getattr("next_offset")',
    ),
    Mistake(
        "pull: tags are not compared",
        "native/src/pull.rs",
        "codes.is_none_or(|codes| codes.contains(&entry.tags_code))",
        "codes.is_none_or(|_| true)",
    ),
    Mistake(
        "pull: the byte limit is passed by one record",
        "native/src/pull.rs",
        "if bytes > plan.fields.bytes_max && !selected.is_empty() {",
        "if bytes > plan.fields.bytes_max && selected.len() > 1 {",
    ),
    Mistake(
        "pull: plans outlive what they depend on",
        "native/src/pull.rs",
        "if self.version != version {",
        "if self.version.0 != version.0 {",
    ),
    Mistake(
        "pull: the offset is not committed",
        "native/src/pull.rs",
        "if plan.sys_flag & FLAG_COMMIT_OFFSET != 0 {",
        "if plan.sys_flag & FLAG_COMMIT_OFFSET > 1 {",
    ),
    Mistake(
        "pull: checksums are not compared",
        "native/src/log_check.rs",
        "(is_checked || has_right_checksum(bytes, body))",
        "(is_checked || !body.is_empty() || has_right_checksum(bytes, body))",
    ),
    Mistake(
        "pull: plans are found by fewer fields",
        "native/src/pull.rs",
        "            && self.names.subscription.as_deref() == header.subscription\n",
        "",
    ),
    Mistake(
        "start: the checksum of an op is not compared",
        "native/src/log_check.rs",
        "if bytes.len() != record.len() || !has_right_checksum(bytes, body) {",
        "if bytes.len() != record.len() {",
    ),
    Mistake(
        "start: every op counts as a commit",
        "native/src/restore.rs",
        "let is_plain = properties == COMMIT_PROPERTIES\n",
        "let is_plain = !properties.is_empty()\n",
    ),
    Mistake(
        "start: a window of ops begins with the wrong queue offset",
        "native/src/restore.rs",
        "check.parts_of(record, log_offset, queue_offset)?",
        "check.parts_of(record, log_offset, queue_offset + 1)?",
    ),
)
