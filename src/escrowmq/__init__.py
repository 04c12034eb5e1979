"""EscrowMQ: a message is held until your database commits, then delivered.

    from escrowmq import Message, Producer, Rollback

    async with Producer("127.0.0.1:9876", group="orders") as producer:
        async with producer.transaction(Message("orders", b"o-17")):
            ...                      # local work; leaving the block delivers the message

`escrowmq` is the asyncio client and `escrowmq.blocking` the same for threads. `escrowmq.sql` and
`escrowmq.django` bind messages to a database transaction, `escrowmq.app` runs handlers of messages,
`escrowmq.spark` reads and writes them in Spark, `escrowmq.admin` looks at a cluster,
`escrowmq.testing` runs a broker for tests. All exceptions are in `escrowmq.errors`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from escrowmq.client.access import Access
    from escrowmq.client.consumer.consumer import Consumer
    from escrowmq.client.consumer.fetcher import ConsumerLimits
    from escrowmq.client.consumer.pull_consumers import LiteConsumer, PullConsumer
    from escrowmq.client.consumer.queue_client import PullResult
    from escrowmq.client.messages import (
        Message,
        MessageQueue,
        ReceivedMessage,
        SendResult,
        SendStatus,
    )
    from escrowmq.client.producer.producer import Producer
    from escrowmq.client.producer.transaction import Transaction, TransactionOutcome
    from escrowmq.client.producer.transaction_producer import (
        TransactionListener,
        TransactionProducer,
        TransactionSendResult,
    )
    from escrowmq.errors import EscrowError, Rollback
    from escrowmq.message.delivery_failure import DeliveryFailure
    from escrowmq.message.filter import SqlFilter
    from escrowmq.message.transaction import LocalTransactionState, Verdict

# The module of each public name. Modules are imported on first use, so that a broker or a command
# does not load the client.
_MODULES = {
    "Access": "escrowmq.client.access",
    "Consumer": "escrowmq.client.consumer.consumer",
    "ConsumerLimits": "escrowmq.client.consumer.fetcher",
    "DeliveryFailure": "escrowmq.message.delivery_failure",
    "EscrowError": "escrowmq.errors",
    "LiteConsumer": "escrowmq.client.consumer.pull_consumers",
    "LocalTransactionState": "escrowmq.message.transaction",
    "Message": "escrowmq.client.messages",
    "MessageQueue": "escrowmq.client.messages",
    "Producer": "escrowmq.client.producer.producer",
    "PullConsumer": "escrowmq.client.consumer.pull_consumers",
    "PullResult": "escrowmq.client.consumer.queue_client",
    "ReceivedMessage": "escrowmq.client.messages",
    "Rollback": "escrowmq.errors",
    "SendResult": "escrowmq.client.messages",
    "SendStatus": "escrowmq.client.messages",
    "SqlFilter": "escrowmq.message.filter",
    "Transaction": "escrowmq.client.producer.transaction",
    "TransactionListener": "escrowmq.client.producer.transaction_producer",
    "TransactionOutcome": "escrowmq.client.producer.transaction",
    "TransactionProducer": "escrowmq.client.producer.transaction_producer",
    "TransactionSendResult": "escrowmq.client.producer.transaction_producer",
    "Verdict": "escrowmq.message.transaction",
}

__all__ = [
    "Access",
    "Consumer",
    "ConsumerLimits",
    "DeliveryFailure",
    "EscrowError",
    "LiteConsumer",
    "LocalTransactionState",
    "Message",
    "MessageQueue",
    "Producer",
    "PullConsumer",
    "PullResult",
    "ReceivedMessage",
    "Rollback",
    "SendResult",
    "SendStatus",
    "SqlFilter",
    "Transaction",
    "TransactionListener",
    "TransactionOutcome",
    "TransactionProducer",
    "TransactionSendResult",
    "Verdict",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
