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

from escrowmq.consume.sql92 import CompiledFilter, compile_filter
from escrowmq.errors import InvalidSubscription
from escrowmq.message.keys import java_hash

ExpressionType = Literal["TAG", "SQL92"]

TAG: Final = "TAG"
SQL92: Final = "SQL92"
SUBSCRIBE_ALL: Final = "*"
EXPRESSION_CHARS_MAX: Final = 8_192
_CACHED_CHARS_MAX: Final = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Subscription:
    topic: str
    expression: str = SUBSCRIBE_ALL
    expression_type: ExpressionType = TAG
    tags: tuple[str, ...] = ()  # none: everything, if the kind is TAG
    tags_codes: frozenset[int] = frozenset()
    version: int = 0  # RocketMQ's subVersion: the client's clock when it subscribed
    compiled_filter: CompiledFilter | None = field(
        default=None, compare=False
    )  # once it was needed


def parse_subscription(
    topic: str, expression: str | None, *, expression_type: str | None = TAG, version: int = 0
) -> Subscription:
    """Raises BadSubscription. Tags are read off the expression: some clients send nothing else."""
    text = (expression or "").strip()
    if len(text) <= _CACHED_CHARS_MAX:
        return _parse_cached(topic, text, expression_type, version)
    if len(text) > EXPRESSION_CHARS_MAX:
        raise InvalidSubscription(f"an expression of {len(text)} characters for {topic}")
    return _parse(topic, text, expression_type, version)


def tag_filter(subscription: Subscription) -> Callable[[int], bool] | None:
    """Asked with the tags code of a queue entry. None: everything is wanted."""
    return subscription.tags_codes.__contains__ if subscription.tags else None


def parse_heartbeat_subscription(
    topic: str, expression: str | None, *, expression_type: str | None, version: int
) -> Subscription:
    """Of a heartbeat, which may bring a thousand: an SQL92 expression is not compiled before
    somebody pulls by it, and is told then what is wrong with it. Raises BadSubscription."""
    if expression_type != SQL92:
        return parse_subscription(
            topic, expression, expression_type=expression_type, version=version
        )
    text = (expression or "").strip()
    if len(text) > EXPRESSION_CHARS_MAX:
        raise InvalidSubscription(f"an expression of {len(text)} characters for {topic}")
    return Subscription(topic=topic, expression=text, expression_type=SQL92, version=version)


def compile_subscription(subscription: Subscription) -> Subscription:
    """With what a pull needs of it. Raises BadSubscription."""
    if subscription.expression_type != SQL92 or subscription.compiled_filter is not None:
        return subscription
    return replace(subscription, compiled_filter=compile_filter(subscription.expression))


def _parse(topic: str, text: str, expression_type: str | None, version: int) -> Subscription:
    if expression_type == SQL92:
        made = compile_filter(text)
        return Subscription(
            topic=topic,
            expression=text,
            expression_type=SQL92,
            version=version,
            compiled_filter=made,
        )
    if expression_type and expression_type != TAG:
        raise InvalidSubscription(f"{expression_type!r} is neither TAG nor SQL92")
    if not text or text == SUBSCRIBE_ALL:
        return Subscription(topic=topic, version=version)
    tags = tuple(dict.fromkeys(tag for part in text.split("||") if (tag := part.strip())))
    if not tags:
        raise InvalidSubscription(f"no tag in {text!r}")
    codes = frozenset(map(java_hash, tags))
    return Subscription(topic=topic, expression=text, tags=tags, tags_codes=codes, version=version)


# Some clients send the expression with every pull, always the same.
_parse_cached = lru_cache(maxsize=1024)(_parse)
