"""What a group wants of a topic: everything, some tags, or an SQL92 expression.

    *            everything; so is an empty expression
    a || b       messages with the tag a or b
    a>1 AND …    SQL92: an expression over the message's properties (sql92/)

A queue entry carries the hash of its message's tag, so the broker filters by hash and the client
compares the text. What passes here by a collision is dropped there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Final, Literal

from escrowmq.consume.sql92 import SqlFilter, sql_filter
from escrowmq.errors import BadSubscription
from escrowmq.message.keys import java_hash

Kind = Literal["TAG", "SQL92"]

TAG: Final = "TAG"
SQL92: Final = "SQL92"
EVERYTHING: Final = "*"
EXPRESSION_CHARS_MAX: Final = 8_192
_REMEMBERED_CHARS_MAX: Final = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Subscription:
    topic: str
    expression: str = EVERYTHING
    kind: Kind = TAG
    tags: tuple[str, ...] = ()  # none: everything, if the kind is TAG
    codes: frozenset[int] = frozenset()
    version: int = 0  # RocketMQ's subVersion: the client's clock when it subscribed
    sql: SqlFilter | None = field(default=None, compare=False)  # once it was needed


def parse_subscription(
    topic: str, expression: str | None, *, kind: str | None = TAG, version: int = 0
) -> Subscription:
    """Raises BadSubscription. Tags are read off the expression: some clients send nothing else."""
    text = (expression or "").strip()
    if len(text) <= _REMEMBERED_CHARS_MAX:
        return _remembered(topic, text, kind, version)
    if len(text) > EXPRESSION_CHARS_MAX:
        raise BadSubscription(f"an expression of {len(text)} characters for {topic}")
    return _parsed(topic, text, kind, version)


def tag_filter(subscription: Subscription) -> Callable[[int], bool] | None:
    """Asked with the tags code of a queue entry. None: everything is wanted."""
    return subscription.codes.__contains__ if subscription.tags else None


def heard_subscription(
    topic: str, expression: str | None, *, kind: str | None, version: int
) -> Subscription:
    """Of a heartbeat, which may bring a thousand: an SQL92 expression is not compiled before
    somebody pulls by it, and is told then what is wrong with it. Raises BadSubscription."""
    if kind != SQL92:
        return parse_subscription(topic, expression, kind=kind, version=version)
    text = (expression or "").strip()
    if len(text) > EXPRESSION_CHARS_MAX:
        raise BadSubscription(f"an expression of {len(text)} characters for {topic}")
    return Subscription(topic=topic, expression=text, kind=SQL92, version=version)


def with_filter(subscription: Subscription) -> Subscription:
    """With what a pull needs of it. Raises BadSubscription."""
    if subscription.kind != SQL92 or subscription.sql is not None:
        return subscription
    return replace(subscription, sql=sql_filter(subscription.expression))


def _parsed(topic: str, text: str, kind: str | None, version: int) -> Subscription:
    if kind == SQL92:
        made = sql_filter(text)
        return Subscription(topic=topic, expression=text, kind=SQL92, version=version, sql=made)
    if kind and kind != TAG:
        raise BadSubscription(f"{kind!r} is neither TAG nor SQL92")
    if not text or text == EVERYTHING:
        return Subscription(topic=topic, version=version)
    tags = tuple(dict.fromkeys(tag for part in text.split("||") if (tag := part.strip())))
    if not tags:
        raise BadSubscription(f"no tag in {text!r}")
    codes = frozenset(map(java_hash, tags))
    return Subscription(topic=topic, expression=text, tags=tags, codes=codes, version=version)


# Some clients send the expression with every pull, always the same.
_remembered = lru_cache(maxsize=1024)(_parsed)
