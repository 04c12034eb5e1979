"""EscrowMQ: a message is held until your database commits, then delivered."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from escrowmq.client.consumer import Consumer
    from escrowmq.client.ending import Outcome
    from escrowmq.client.listener import (
        TransactionListener,
        TransactionProducer,
        TransactionSendResult,
    )
    from escrowmq.client.messages import Message, Queue, ReceivedMessage, SendResult, SendStatus
    from escrowmq.client.producer import Producer
    from escrowmq.client.transaction import Transaction
    from escrowmq.errors import Rollback
    from escrowmq.message.verdict import Verdict

# Where each name lives. Loaded when it is first wanted: a broker does not need the client.
_HOMES = {
    "Consumer": "escrowmq.client.consumer",
    "Message": "escrowmq.client.messages",
    "Outcome": "escrowmq.client.ending",
    "Producer": "escrowmq.client.producer",
    "Queue": "escrowmq.client.messages",
    "ReceivedMessage": "escrowmq.client.messages",
    "Rollback": "escrowmq.errors",
    "SendResult": "escrowmq.client.messages",
    "SendStatus": "escrowmq.client.messages",
    "Transaction": "escrowmq.client.transaction",
    "TransactionListener": "escrowmq.client.listener",
    "TransactionProducer": "escrowmq.client.listener",
    "TransactionSendResult": "escrowmq.client.listener",
    "Verdict": "escrowmq.message.verdict",
}

__all__ = [
    "Consumer",
    "Message",
    "Outcome",
    "Producer",
    "Queue",
    "ReceivedMessage",
    "Rollback",
    "SendResult",
    "SendStatus",
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
