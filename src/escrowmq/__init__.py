"""EscrowMQ: a message is held until your database commits, then delivered."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from escrowmq.client.access import Access
    from escrowmq.client.consumer import Consumer
    from escrowmq.client.messages import Message, ReceivedMessage, SendResult, SendStatus
    from escrowmq.client.producer import Producer
    from escrowmq.client.transaction import Outcome, Transaction
    from escrowmq.errors import Rollback
    from escrowmq.message.verdict import Verdict

# Where each name lives. Loaded when it is first wanted: a broker does not need the client.
_HOMES = {
    "Access": "escrowmq.client.access",
    "Consumer": "escrowmq.client.consumer",
    "Message": "escrowmq.client.messages",
    "Outcome": "escrowmq.client.transaction",
    "Producer": "escrowmq.client.producer",
    "ReceivedMessage": "escrowmq.client.messages",
    "Rollback": "escrowmq.errors",
    "SendResult": "escrowmq.client.messages",
    "SendStatus": "escrowmq.client.messages",
    "Transaction": "escrowmq.client.transaction",
    "Verdict": "escrowmq.message.verdict",
}

__all__ = [
    "Access",
    "Consumer",
    "Message",
    "Outcome",
    "Producer",
    "ReceivedMessage",
    "Rollback",
    "SendResult",
    "SendStatus",
    "Transaction",
    "Verdict",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
