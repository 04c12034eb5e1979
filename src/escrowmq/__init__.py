"""EscrowMQ: a message is held until your database commits, then delivered."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from escrowmq.client.access import Access
    from escrowmq.client.consumer import Consumer
    from escrowmq.client.ending import Outcome
    from escrowmq.client.filters import Sql
    from escrowmq.client.limits import Limits
    from escrowmq.client.listener import (
        TransactionListener,
        TransactionProducer,
        TransactionSendResult,
    )
    from escrowmq.client.lite import LiteConsumer
    from escrowmq.client.messages import Message, Queue, ReceivedMessage, SendResult, SendStatus
    from escrowmq.client.producer import Producer
    from escrowmq.client.puller import PullConsumer
    from escrowmq.client.transaction import Transaction
    from escrowmq.errors import Rollback
    from escrowmq.message.verdict import Verdict

# Where each name lives. Loaded when it is first wanted: a broker does not need the client.
_HOMES = {
    "Access": "escrowmq.client.access",
    "Consumer": "escrowmq.client.consumer",
    "Limits": "escrowmq.client.limits",
    "LiteConsumer": "escrowmq.client.lite",
    "Message": "escrowmq.client.messages",
    "Outcome": "escrowmq.client.ending",
    "Producer": "escrowmq.client.producer",
    "PullConsumer": "escrowmq.client.puller",
    "Queue": "escrowmq.client.messages",
    "ReceivedMessage": "escrowmq.client.messages",
    "Rollback": "escrowmq.errors",
    "SendResult": "escrowmq.client.messages",
    "SendStatus": "escrowmq.client.messages",
    "Sql": "escrowmq.client.filters",
    "Transaction": "escrowmq.client.transaction",
    "TransactionListener": "escrowmq.client.listener",
    "TransactionProducer": "escrowmq.client.listener",
    "TransactionSendResult": "escrowmq.client.listener",
    "Verdict": "escrowmq.message.verdict",
}

__all__ = [
    "Access",
    "Consumer",
    "Limits",
    "LiteConsumer",
    "Message",
    "Outcome",
    "Producer",
    "PullConsumer",
    "Queue",
    "ReceivedMessage",
    "Rollback",
    "SendResult",
    "SendStatus",
    "Sql",
    "Transaction",
    "TransactionListener",
    "TransactionProducer",
    "TransactionSendResult",
    "Verdict",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
