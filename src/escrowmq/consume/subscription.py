"""Subscriptions: what a group wants of a topic, and the filter that a pull applies for it.

    *            every message; an empty expression means the same
    a || b       messages with the tag a or b
    a > 1 AND …  SQL92: an expression over the message's properties (sql92/)

A subscription is parsed once and compiled once, to a `MessageFilter`. The same filter decides which
messages a pull reads from the store and which arriving messages wake a held pull.

A queue entry holds the hash of its message's tag, so the broker compares hashes and never opens a
record for a tag. Two tags can have the same hash: the client compares the text again and drops the
messages that passed by a collision.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

from escrowmq.client_memory import name_error, text_bytes
from escrowmq.consume.sql92 import CompiledFilter
from escrowmq.errors import InvalidSubscription
from escrowmq.message.filter import SQL92, SUBSCRIBE_ALL, TAG, ExpressionType, parse_tags
from escrowmq.message.keys import java_hash
from escrowmq.sliced_work import SlicedResult, SlicedWork, run_to_end

# RocketMQ has no limit here. The properties of a message have at most 32,767 bytes, so every tag
# that a message can carry fits.
EXPRESSION_CHARS_MAX: Final = 65_536

# Queue entries that one read tests before it returns without a match, so that other requests are
# served in between. A tag costs one look into a set.
TAG_SCAN_MAX: Final = 800
# The same for SQL92, in comparisons: about a millisecond. An expression of ten comparisons tests a
# tenth of this number of messages.
SQL_COMPARISONS_MAX: Final = 4_000

# Short expressions are cached generously. Long ones could fill the memory, so few are kept.
SHORT_CHARS_MAX: Final = 512
_SHOWN_LENGTH_MAX: Final = 100  # of a client's text that an error repeats
_SHORT_CACHE_SIZE: Final = 1_024
_LONG_CACHE_SIZE: Final = 8
_TAGS_PER_SLICE: Final = 64

# Estimates of what is kept, rounded up: of a subscription, of a tag with its hash, and of compiled
# SQL92, with each character of its text. Measured on CPython 3.11 by
# tests/unit/test_memory_estimates.py: up to 230 bytes for a tag, because a set has up to eight
# places for each element, and up to 140 for a character in short comparisons such as `1=1or `.
_SUBSCRIPTION_BYTES: Final = 500
_TAG_BYTES: Final = 280
_SQL_FILTER_BYTES: Final = 2_500
_SQL_CHARACTER_BYTES: Final = 160


@dataclass(frozen=True, slots=True)
class MessageFilter:
    """Decides which messages a subscription delivers.

    The two conditions are attributes because a read of the store tests them in its inner loop: the
    tags code first, which is part of the queue entry, and the properties only if there is such a
    condition, because they have to be read from the log.
    """

    tags_codes: frozenset[int] | None = None  # None: every tag
    matches_properties: Callable[[bytes], bool] | None = None  # None: any properties
    scan_max: int = TAG_SCAN_MAX
    retained_bytes: int = 0  # what it takes, apart from the cache that it may be in

    @property
    def matches_all(self) -> bool:
        return self.tags_codes is None and self.matches_properties is None

    def matches(self, tags_code: int, properties: bytes) -> bool:
        """Return whether a message passes. `properties` are encoded, as in its record."""
        if self.tags_codes is not None and tags_code not in self.tags_codes:
            return False
        return self.matches_properties is None or self.matches_properties(properties)


MATCH_ALL: Final = MessageFilter()


@dataclass(frozen=True, slots=True, kw_only=True)
class Subscription:
    topic: str
    expression: str = SUBSCRIBE_ALL
    expression_type: ExpressionType = TAG
    tags: tuple[str, ...] = ()  # empty for SQL92, and for TAG if every tag is wanted
    version: int = 0  # RocketMQ's subVersion: the client's clock when it subscribed
    tag_filter: MessageFilter = field(default=MATCH_ALL, compare=False)  # follows from `tags`

    @property
    def retained_bytes(self) -> int:
        texts = text_bytes(self.topic) + 2 * text_bytes(self.expression)  # tags are copies
        return _SUBSCRIPTION_BYTES + texts + self.tag_filter.retained_bytes


def parse_subscription(
    topic: str, expression: str | None, *, expression_type: str | None = TAG, version: int = 0
) -> Subscription:
    """Parse the subscription of a pull request. Raises InvalidSubscription.

    Tags come from the expression itself, because some clients send no list of tags.
    """
    text = _checked_expression(topic, expression)
    if len(text) <= SHORT_CHARS_MAX:
        return _parse_short(topic, text, expression_type, version)
    return run_to_end(_parse_long(topic, text, expression_type, version))


def prepare_subscription(
    topic: str, expression: str | None, *, expression_type: str | None, version: int
) -> SlicedWork:
    """Parse a long expression in slices, so that `parse_subscription` finds it in a cache.

    It may have ten thousand tags. Errors are left to `parse_subscription`.
    """
    text = (expression or "").strip()
    if SHORT_CHARS_MAX < len(text) <= EXPRESSION_CHARS_MAX and expression_type != SQL92:
        with contextlib.suppress(InvalidSubscription):
            yield from _parse_long(topic, text, expression_type, version)


def parse_heartbeat_subscription(
    topic: str, expression: str | None, *, expression_type: str | None, version: int
) -> Subscription:
    """Parse one subscription of a heartbeat. Raises InvalidSubscription.

    A heartbeat may carry a thousand SQL92 expressions. They are not compiled here: an invalid one
    is reported to the first pull that needs it.
    """
    if expression_type != SQL92:
        return parse_subscription(
            topic, expression, expression_type=expression_type, version=version
        )
    text = _checked_expression(topic, expression)
    return Subscription(topic=topic, expression=text, expression_type=SQL92, version=version)


def compile_subscription(subscription: Subscription) -> MessageFilter:
    """Return the filter of a subscription, from a cache if it is SQL92.

    Raises InvalidSubscription if the SQL92 expression is invalid.
    """
    if subscription.expression_type != SQL92:
        return subscription.tag_filter
    return _sql_filter(subscription.expression)


def _checked_expression(topic: str, expression: str | None) -> str:
    if error := name_error("topic", topic):
        raise InvalidSubscription(error)
    text = (expression or "").strip()
    if len(text) > EXPRESSION_CHARS_MAX:
        raise InvalidSubscription(
            f"the filter expression for topic {topic} has {len(text)} characters, "
            f"the limit is {EXPRESSION_CHARS_MAX}"
        )
    return text


def _parse(
    topic: str, text: str, expression_type: str | None, version: int
) -> SlicedResult[Subscription]:
    if expression_type == SQL92:
        _sql_filter(text)  # raises if it is invalid
        return Subscription(topic=topic, expression=text, expression_type=SQL92, version=version)
    if expression_type and expression_type != TAG:
        shown = expression_type[:_SHOWN_LENGTH_MAX]
        raise InvalidSubscription(f"expression type {shown!r} is neither TAG nor SQL92")
    tags = parse_tags(text)
    if not tags:
        return Subscription(topic=topic, version=version)
    tags_codes: set[int] = set()
    for begin in range(0, len(tags), _TAGS_PER_SLICE):
        tags_codes.update(map(java_hash, tags[begin : begin + _TAGS_PER_SLICE]))
        yield
    tag_filter = MessageFilter(frozenset(tags_codes), retained_bytes=_TAG_BYTES * len(tags))
    return Subscription(
        topic=topic, expression=text, tags=tags, version=version, tag_filter=tag_filter
    )


# Some clients send their expression with every pull, and it is always the same.
@lru_cache(maxsize=_SHORT_CACHE_SIZE)
def _parse_short(topic: str, text: str, expression_type: str | None, version: int) -> Subscription:
    return run_to_end(_parse(topic, text, expression_type, version))


_long_subscriptions: dict[tuple[str, str, str | None, int], Subscription] = {}  # a cache


def _parse_long(
    topic: str, text: str, expression_type: str | None, version: int
) -> SlicedResult[Subscription]:
    key = topic, text, expression_type, version
    subscription = _long_subscriptions.pop(key, None)
    if subscription is None:
        subscription = yield from _parse(topic, text, expression_type, version)
    while len(_long_subscriptions) >= _LONG_CACHE_SIZE:
        del _long_subscriptions[next(iter(_long_subscriptions))]
    _long_subscriptions[key] = subscription  # the one that was used last is the last to go
    return subscription


def _sql_filter(text: str) -> MessageFilter:
    return (_short_sql_filter if len(text) <= SHORT_CHARS_MAX else _long_sql_filter)(text)


def _compile_sql(text: str) -> MessageFilter:
    compiled = CompiledFilter(text)
    scan_max = max(1, SQL_COMPARISONS_MAX // compiled.cost)
    return MessageFilter(
        matches_properties=compiled.matches_encoded,
        scan_max=scan_max,
        retained_bytes=_SQL_FILTER_BYTES + _SQL_CHARACTER_BYTES * len(text),
    )


_short_sql_filter = lru_cache(maxsize=_SHORT_CACHE_SIZE)(_compile_sql)
_long_sql_filter = lru_cache(maxsize=_LONG_CACHE_SIZE)(_compile_sql)
