"""What a group wants of a topic: everything, some tags, or an SQL92 expression.

    *            everything; so is an empty expression
    a || b       messages with the tag a or b
    a>1 AND …    SQL92: has its place here, but nobody evaluates it yet

A queue entry carries the hash of its message's tag, so the broker filters by hash and the client
compares the text. What passes here by a collision is dropped there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Literal

from escrowmq.errors import BadSubscription
from escrowmq.message.javahash import java_hash

Kind = Literal["TAG", "SQL92"]

TAG: Final = "TAG"
SQL92: Final = "SQL92"
EVERYTHING: Final = "*"
EXPRESSION_CHARS_MAX: Final = 32_768


@dataclass(frozen=True, slots=True, kw_only=True)
class Subscription:
    topic: str
    expression: str = EVERYTHING
    kind: Kind = TAG
    tags: tuple[str, ...] = ()  # none: everything, if the kind is TAG
    codes: frozenset[int] = frozenset()
    version: int = 0  # RocketMQ's subVersion: the client's clock when it subscribed


def parse_subscription(
    topic: str, expression: str | None, *, kind: str | None = TAG, version: int = 0
) -> Subscription:
    """Raises BadSubscription. Tags are read off the expression: some clients send nothing else."""
    text = (expression or "").strip()
    if len(text) > EXPRESSION_CHARS_MAX:
        raise BadSubscription(f"an expression of {len(text)} characters for {topic}")
    if kind == SQL92:
        return Subscription(topic=topic, expression=text, kind=SQL92, version=version)
    if kind and kind != TAG:
        raise BadSubscription(f"{kind!r} is neither TAG nor SQL92")
    if not text or text == EVERYTHING:
        return Subscription(topic=topic, version=version)
    tags, codes = _parse_tags(text)
    return Subscription(topic=topic, expression=text, tags=tags, codes=codes, version=version)


def tag_filter(subscription: Subscription) -> Callable[[int], bool] | None:
    """Asked with the tags code of a queue entry. None: everything is wanted."""
    if subscription.kind != TAG:
        raise BadSubscription(f"{subscription.kind} is not enabled")
    return subscription.codes.__contains__ if subscription.tags else None


@lru_cache(maxsize=256)  # some clients send the expression with every pull
def _parse_tags(text: str) -> tuple[tuple[str, ...], frozenset[int]]:
    tags = dict.fromkeys(tag for part in text.split("||") if (tag := part.strip()))
    if not tags:
        raise BadSubscription(f"no tag in {text!r}")
    return tuple(tags), frozenset(map(java_hash, tags))
