"""Raw requests of transactional producers, for EscrowMQ and for Apache RocketMQ."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from tests.interop.producers import GROUP, TOPIC, Producer, unique_key
from tests.interop.records import Record
from tests.interop.remoting import Client, ResponseError, SendResult

CHECKS_MAX: Final = 3
END_TRANSACTION: Final = 37
STRANDED_TOPIC: Final = "TRANS_CHECK_MAX_TIME_TOPIC"


def end_fields(half: SendResult, verdict: int) -> dict[str, object]:
    """Return the fields of an END_TRANSACTION request."""
    return {
        "producerGroup": GROUP,
        "tranStateTableOffset": half.queue_offset,
        "commitLogOffset": half.log_offset,
        "commitOrRollback": verdict,
        "fromTransactionCheck": False,
        "msgId": half.transaction_id,
        "transactionId": half.transaction_id,
    }


def send_half(producer: Producer, name: str, **properties: str) -> SendResult:
    """Send a half to queue 1 of the topic, with the name as body."""
    return producer.client.send_half(
        *(TOPIC, name.encode(), {"UNIQ_KEY": unique_key(name), **properties}),
        queue_id=1,
        group=GROUP,
    )


def wait_until_delivered(producer: Producer, name: str) -> Record:
    """Return the message with this name once a consumer can read it."""
    producer.respond_until(lambda: producer.delivered()[name] > 0, {})
    [record] = [record for record in delivered_records(producer) if record.body == name.encode()]
    return record


def delivered_records(producer: Producer) -> list[Record]:
    return [record for queue_id in (0, 1) for record in producer.client.pull_all(TOPIC, queue_id)]


def records_after(client: Client, record: Record) -> Iterator[Record]:
    """Yield the records of the log that follow, whatever their topic.

    RocketMQ 4 refuses pulls of the half and op topics, but it shows any record by its log offset.
    """
    while True:
        try:
            record = client.view_by_id(f"{record.log_offset + record.size:032X}")
        except ResponseError:
            return
        yield record


def stranded_bodies(client: Client) -> list[bytes]:
    """Return the bodies in the topic of halves that were checked too often."""
    return [record.body for record in client.pull_all(STRANDED_TOPIC, 0)]
