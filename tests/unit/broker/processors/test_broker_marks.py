"""Every path that stores a client's message: nothing that only a broker may write is stored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from escrowmq.message import names
from escrowmq.message.batch import BatchItem, encode_batch
from escrowmq.message.broker_marks import (
    BROKER_PROPERTIES,
    CLIENT_SYS_FLAGS,
    may_have_broker_properties,
    remove_broker_properties,
)
from escrowmq.message.properties import decode_properties
from escrowmq.message.record import StoredRecord
from escrowmq.remoting.codes import RequestCode
from escrowmq.remoting.headers import ConsumerSendMessageBack, SendMessage, SendMessageV2
from escrowmq.store.config_files import GroupConfig
from tests.support.broker_requests import CallableChannel, new_request, stored_records
from tests.support.escrows import (
    COMMIT,
    EscrowBench,
    decide_batch_request,
    heartbeat_request,
    position_of,
)
from tests.support.stores import NOW_MS

RESERVED: Final = (*BROKER_PROPERTIES, "ESCROW_COPY_OF", "ESCROW_PACKED", "ESCROW_NOT_YET_KNOWN")
FORGED: Final = "".join(f"{name}\x01forged\x02" for name in RESERVED)
CRC: Final = f"{names.RECORD_CRC}\x010123456789\x02"
# Every bit that a client has no business with, except those that refuse the message.
FOREIGN_FLAGS: Final = 0x8 | 0x10 | 0x20 | 0x40 | 0x80 | 0x7FFFF800


def header(request_type: type[SendMessage] = SendMessage, **changes: Any) -> SendMessage:
    fields = {"producer_group": "p", "topic": "T", "default_topic": "TBW102", "queue_id": 0}
    return request_type(**{**fields, "sys_flag": FOREIGN_FLAGS, **changes})


def properties(*more: str) -> str:
    return f"UNIQ_KEY\x01k\x02mine\x01kept\x02{FORGED}{''.join(more)}{CRC}"


def single(bench: EscrowBench, code: RequestCode, **changes: Any) -> list[StoredRecord]:
    is_v1 = code in (RequestCode.SEND_MESSAGE, RequestCode.SEND_REPLY_MESSAGE)
    request_type = SendMessage if is_v1 else SendMessageV2
    fields = header(request_type, **{"properties": properties(), **changes})
    assert bench.request(new_request(code, fields, b"k")).code == 0
    return bench.messages()


def send_v1(bench: EscrowBench) -> list[StoredRecord]:
    return single(bench, RequestCode.SEND_MESSAGE)


def send_v2(bench: EscrowBench) -> list[StoredRecord]:
    return single(bench, RequestCode.SEND_MESSAGE_V2)


def send_flags_alone(bench: EscrowBench) -> list[StoredRecord]:
    return single(bench, RequestCode.SEND_MESSAGE_V2, properties="UNIQ_KEY\x01k\x02mine\x01kept")


def send_batch(bench: EscrowBench, text: str = "", **changes: Any) -> list[StoredRecord]:
    items = [BatchItem(0, b"k", (text or properties()).encode()) for _ in range(2)]
    fields = header(SendMessageV2, **{"batch": True, "sys_flag": FOREIGN_FLAGS & ~8, **changes})
    request = new_request(RequestCode.SEND_BATCH_MESSAGE, fields, encode_batch(items))
    response = bench.request(request)
    assert response.code == 0, response.remark
    return bench.messages()


def send_bulk_batch(bench: EscrowBench) -> list[StoredRecord]:
    return send_batch(bench, "UNIQ_KEY\x01k\x02")


def delayed(bench: EscrowBench, delay: str) -> list[StoredRecord]:
    fields = header(SendMessageV2, properties=properties(delay))
    assert bench.request(new_request(RequestCode.SEND_MESSAGE_V2, fields, b"k")).code == 0
    bench.tick(after_ms=2_000)
    return bench.messages()


def send_delayed(bench: EscrowBench) -> list[StoredRecord]:
    return delayed(bench, "DELAY\x011\x02")


def send_timer(bench: EscrowBench) -> list[StoredRecord]:
    return delayed(bench, "TIMER_DELAY_MS\x011000\x02")


def commit_half(bench: EscrowBench) -> list[StoredRecord]:
    half = "TRAN_MSG\x01true\x02PGROUP\x01p\x02"
    response = bench.request(
        new_request(RequestCode.SEND_MESSAGE_V2, header(properties=properties(half)), b"k")
    )
    [stored] = stored_records(bench.store, names.HALF_TOPIC)
    assert not stored.sys_flag & ~CLIENT_SYS_FLAGS
    stored_properties = decode_properties(stored.properties)
    assert "forged" not in stored_properties.values()
    assert "ESCROW_NOT_YET_KNOWN" not in stored_properties
    assert bench.end(position_of(response), COMMIT).code == 0
    [final] = bench.messages()
    assert final.prepared_offset == stored.log_offset
    return []  # a final has marks, which the broker has set


def commit_plain_half(bench: EscrowBench) -> list[StoredRecord]:
    text = "UNIQ_KEY\x01k\x02TRAN_MSG\x01true\x02PGROUP\x01p\x02mine\x01kept\x02"
    fields = header(sys_flag=FOREIGN_FLAGS | 4, properties=text)
    response = bench.request(new_request(RequestCode.SEND_MESSAGE_V2, fields, b"k"))
    [stored] = stored_records(bench.store, names.HALF_TOPIC)
    assert not stored.sys_flag & ~CLIENT_SYS_FLAGS
    assert bench.end(position_of(response), COMMIT).code == 0
    [final] = bench.messages()
    assert final.sys_flag & ~CLIENT_SYS_FLAGS == 8
    return []


def decide_packed_half(bench: EscrowBench) -> list[StoredRecord]:
    writer = "ESCROW_WRITER\x01w\x02ESCROW_BATCH\x010\x02ESCROW_ATTEMPT\x01a\x02"
    half = f"UNIQ_KEY\x01half\x02TRAN_MSG\x01true\x02PGROUP\x01p\x02{writer}"
    item = BatchItem(0, b"k", properties().removesuffix(CRC).encode())
    fields = header(SendMessageV2, batch=True, properties=half)
    request = new_request(RequestCode.SEND_BATCH_MESSAGE, fields, encode_batch([item]))
    assert bench.request(request).code == 0
    assert bench.request(decide_batch_request(0, 0, [("a", 1)])).code == 0
    [final] = bench.messages()
    values = decode_properties(final.properties)
    assert (values["mine"], final.sys_flag) == ("kept", 8)
    assert not {*RESERVED, names.WRITER} & values.keys()
    return []


def send_to_retry_topic(bench: EscrowBench) -> list[StoredRecord]:
    bench.broker.groups.put(GroupConfig(group_name="g"), now_ms=NOW_MS)
    single(bench, RequestCode.SEND_MESSAGE_V2, topic="%RETRY%g", reconsume_times=1)
    return bench.messages("%RETRY%g")


def send_to_retry_topic_too_often(bench: EscrowBench) -> list[StoredRecord]:
    bench.broker.groups.put(GroupConfig(group_name="g"), now_ms=NOW_MS)
    single(bench, RequestCode.SEND_MESSAGE_V2, topic="%RETRY%g", reconsume_times=99)
    return bench.messages("%DLQ%g")


def send_back(bench: EscrowBench) -> list[StoredRecord]:
    """Send the final of a transaction back: the retry is not a final."""
    bench.broker.groups.put(GroupConfig(group_name="g"), now_ms=NOW_MS)
    bench.end(bench.park("k", mine="kept"), COMMIT)
    [final] = bench.messages()
    fields = ConsumerSendMessageBack(offset=final.log_offset, group="g", delay_level=1)
    assert bench.request(new_request(RequestCode.CONSUMER_SEND_MSG_BACK, fields)).code == 0
    bench.tick(after_ms=2_000)
    return bench.messages("%RETRY%g")


def reply(bench: EscrowBench) -> list[StoredRecord]:
    requester = CallableChannel("127.0.0.1:40001")
    bench.turn(heartbeat_request(requester, "p"), channel=requester)
    text = properties(f"REPLY_TO_CLIENT\x01client of {requester.address}\x02")
    fields = header(SendMessageV2, properties=text)
    bench.turn(new_request(RequestCode.SEND_REPLY_MESSAGE_V2, fields, b"k"))
    [(_, pushed, _, _)] = requester.calls
    assert pushed.sys_flag & ~CLIENT_SYS_FLAGS == 0  # type: ignore[attr-defined]
    assert "forged" not in pushed.properties  # type: ignore[attr-defined]
    return bench.messages()


PATHS: Final[dict[str, Callable[[EscrowBench], list[StoredRecord]]]] = {
    path.__name__: path
    for path in (
        send_v1,
        send_v2,
        send_flags_alone,
        send_batch,
        send_bulk_batch,
        send_delayed,
        send_timer,
        commit_half,
        commit_plain_half,
        decide_packed_half,
        send_to_retry_topic,
        send_to_retry_topic_too_often,
        send_back,
        reply,
    )
}


@pytest.mark.parametrize("path", PATHS)
def test_no_mark_of_a_client_is_stored(path: str) -> None:
    bench = EscrowBench()
    for record in PATHS[path](bench):
        values = decode_properties(record.properties)
        assert record.sys_flag & ~CLIENT_SYS_FLAGS == 0
        assert record.prepared_offset == 0
        assert not set(RESERVED) - {names.REAL_TOPIC, names.REAL_QUEUE_ID} & values.keys()
        assert "forged" not in values.values(), values
        if path != "send_bulk_batch":
            assert values["mine"] == "kept"
    bench.killed(with_snapshot=False)  # every record can be read again


def test_a_plain_message_cannot_belong_to_a_writer() -> None:
    bench = EscrowBench()
    [message] = single(bench, RequestCode.SEND_MESSAGE, properties="ESCROW_WRITER\x01w\x02")
    assert names.WRITER not in decode_properties(message.properties)


def test_a_message_marked_as_prepared_is_refused_on_every_path() -> None:
    for code in (RequestCode.SEND_MESSAGE_V2, RequestCode.SEND_REPLY_MESSAGE_V2):
        for sys_flag in (4, 12):
            fields = header(sys_flag=sys_flag, properties="UNIQ_KEY\x01k\x02")
            bench = EscrowBench()
            assert bench.request(new_request(code, fields, b"k")).code == 13
            assert bench.messages() == []


@pytest.mark.parametrize("name", [*RESERVED, names.WRITER, names.FENCE])
def test_the_quick_search_finds_every_reserved_property(name: str) -> None:
    assert may_have_broker_properties(f"a\x01b\x02{name}\x01c\x02")
    assert may_have_broker_properties(f"{name}\x01c")


PROPERTY_NAMES: Final = st.sampled_from([*RESERVED, "mine", "TRAN_MSG", "REAL", "XREAL_TOPIC", ""])
ITEMS: Final = st.lists(st.tuples(PROPERTY_NAMES, st.sampled_from(["true", "x", ""])), max_size=6)


@given(ITEMS, st.booleans())
def test_what_is_not_reserved_stays_as_it_was(items: list[tuple[str, str]], has_end: bool) -> None:
    text = "\x02".join(f"{name}\x01{value}" for name, value in items) + "\x02" * has_end
    kept = decode_properties(remove_broker_properties(text.encode()))
    expected = {
        name: value
        for name, value in decode_properties(text.encode()).items()
        if name not in RESERVED
    }
    assert kept == expected
    if not may_have_broker_properties(text):
        assert kept == decode_properties(text.encode())
