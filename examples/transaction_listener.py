"""RocketMQ's classic example: a listener leaves transactions open, and checks decide them.

escrowmq serve -c examples/short_checks.conf     in one terminal
python examples/transaction_listener.py          in another

Ten messages are sent in transactions. Each local transaction returns UNKNOW, as if the process had
lost its answer, so the broker asks. The answer is the number of the message modulo 3: UNKNOW,
COMMIT_MESSAGE or ROLLBACK_MESSAGE. The table at the end shows what became of each message.
examples/java is the same program for RocketMQ's Java client; it prints the same table.
"""

from __future__ import annotations

import itertools
import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from escrowmq import LocalTransactionState, Message, ReceivedMessage, TransactionListener
from escrowmq.blocking import LiteConsumer, TransactionProducer

SERVERS = os.environ.get("SERVERS", "127.0.0.1:9876")
WAIT_S = float(os.environ.get("WAIT_S", "60"))
TOPIC = "TopicTest1234"
STRANDED_TOPIC = "TRANS_CHECK_MAX_TIME_TOPIC"  # what was checked as often as the broker allows
TAGS = ("TagA", "TagB", "TagC", "TagD", "TagE")
STATES = (
    LocalTransactionState.UNKNOW,
    LocalTransactionState.COMMIT_MESSAGE,
    LocalTransactionState.ROLLBACK_MESSAGE,
)


class RemainderListener(TransactionListener):
    def __init__(self) -> None:
        self.answers: dict[str, LocalTransactionState] = {}  # to checks, by transaction id
        self._states: dict[str, LocalTransactionState] = {}  # a database in a real application
        self._index = itertools.count()

    def execute_local_transaction(self, message: Message, arg: Any) -> LocalTransactionState:
        self._states[message.transaction_id] = STATES[next(self._index) % len(STATES)]
        return LocalTransactionState.UNKNOW

    def check_local_transaction(self, message: ReceivedMessage) -> LocalTransactionState:
        # A transaction of an earlier run is not in the dictionary: its state is not known.
        answer = self._states.get(message.transaction_id, LocalTransactionState.UNKNOW)
        self.answers[message.transaction_id] = answer
        return answer


def send_all(producer: TransactionProducer) -> list[str]:
    """Send ten messages and return their transaction ids."""
    transaction_ids = []
    for number in range(10):
        tag = TAGS[number % len(TAGS)]
        body = f"Hello RocketMQ {number}".encode()
        result = producer.send_in_transaction(Message(TOPIC, body, keys=f"KEY{number}", tags=tag))
        transaction_ids.append(result.transaction_id)
    return transaction_ids


def result_of(transaction_id: str, listener: RemainderListener, topics: dict[str, str]) -> str:
    """Return what became of a message; `topics` are those that it was read from, by its id."""
    if transaction_id in topics:
        return "delivered" if topics[transaction_id] == TOPIC else "stranded"
    answer = listener.answers.get(transaction_id)
    return "rolled back" if answer is LocalTransactionState.ROLLBACK_MESSAGE else "open"


def main() -> None:
    listener = RemainderListener()
    topics: dict[str, str] = {}
    with (
        ThreadPoolExecutor(5, "check") as executor,
        TransactionProducer(
            SERVERS, group="listener-example", listener=listener, check_executor=executor
        ) as producer,
        LiteConsumer(
            SERVERS, group="listener-example-reader", subscribe={TOPIC: "*", STRANDED_TOPIC: "*"}
        ) as consumer,
    ):
        transaction_ids = send_all(producer)
        print(f"10 messages sent; waiting up to {WAIT_S:g} s for the checks", flush=True)
        deadline_s = time.monotonic() + WAIT_S
        while time.monotonic() < deadline_s and "open" in [
            result_of(transaction_id, listener, topics) for transaction_id in transaction_ids
        ]:
            for message in consumer.poll(timeout_s=1):
                topics[message.message_id] = message.topic
    print(f"{'key':<6}{'tag':<6}{'check':<10}result")
    for number, transaction_id in enumerate(transaction_ids):
        answer = listener.answers[transaction_id].name if transaction_id in listener.answers else ""
        result = result_of(transaction_id, listener, topics)
        print(f"KEY{number:<3}{TAGS[number % len(TAGS)]:<6}{answer:<10}{result}")


if __name__ == "__main__":
    main()
