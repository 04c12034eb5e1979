"""EscrowMQ: a message is held until your database commits, then delivered."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from escrowmq.client.access import Access
    from escrowmq.client.consumer.consumer import Consumer
    from escrowmq.client.consumer.fetcher import ConsumerLimits
    from escrowmq.client.consumer.pull_consumers import LiteConsumer, PullConsumer
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
    from escrowmq.errors import Rollback
    from escrowmq.message.filter import SqlFilter
    from escrowmq.message.transaction import Verdict

# Where each name lives. Loaded when it is first wanted: a broker does not need the client.
_HOMES = {
    "Access": "escrowmq.client.access",
    "Consumer": "escrowmq.client.consumer.consumer",
    "ConsumerLimits": "escrowmq.client.consumer.fetcher",
    "LiteConsumer": "escrowmq.client.consumer.pull_consumers",
    "Message": "escrowmq.client.messages",
    "TransactionOutcome": "escrowmq.client.producer.transaction",
    "Producer": "escrowmq.client.producer.producer",
    "PullConsumer": "escrowmq.client.consumer.pull_consumers",
    "MessageQueue": "escrowmq.client.messages",
    "ReceivedMessage": "escrowmq.client.messages",
    "Rollback": "escrowmq.errors",
    "SendResult": "escrowmq.client.messages",
    "SendStatus": "escrowmq.client.messages",
    "SqlFilter": "escrowmq.message.filter",
    "Transaction": "escrowmq.client.producer.transaction",
    "TransactionListener": "escrowmq.client.producer.transaction_producer",
    "TransactionProducer": "escrowmq.client.producer.transaction_producer",
    "TransactionSendResult": "escrowmq.client.producer.transaction_producer",
    "Verdict": "escrowmq.message.transaction",
}

__all__ = [
    "Access",
    "Consumer",
    "ConsumerLimits",
    "LiteConsumer",
    "Message",
    "MessageQueue",
    "Producer",
    "PullConsumer",
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
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
