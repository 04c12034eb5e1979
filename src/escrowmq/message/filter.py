"""A filter as users write it: which messages of a topic a consumer reads.

    "*"                          every message; an empty text means the same
    "created || paid"            messages with one of these tags
    SqlFilter("amount > 100")    messages whose properties satisfy an SQL92 expression

A subscription has one filter for each topic: `{"orders": "paid", "stock": "*"}`. A topic alone, or
a list of topics, reads all of their messages.

The client sends the filter to the broker, which compiles and applies it. A queue entry holds only
the hash of a message's tag, and two tags may have the same hash, so the client compares the text
of the tag once more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from escrowmq.errors import InvalidSubscription
from escrowmq.message.names import topic_name_error

ExpressionType = Literal["TAG", "SQL92"]

TAG: Final = "TAG"
SQL92: Final = "SQL92"
SUBSCRIBE_ALL: Final = "*"


@dataclass(frozen=True, slots=True)
class SqlFilter:
    """An SQL92 expression over message properties, evaluated by the broker.

    Example: `SqlFilter("price > 3 AND kind = 'x'")`.
    """

    expression: str


FilterLike = str | SqlFilter
Subscriptions = str | Sequence[str] | Mapping[str, FilterLike]  # topics, or filters by topic


@dataclass(frozen=True, slots=True)
class FilterExpression:
    """A parsed filter. The default reads every message."""

    expression: str = SUBSCRIBE_ALL
    expression_type: ExpressionType = TAG
    tags: frozenset[str] = frozenset()  # empty: messages with any tag, or without one

    def matches_tag(self, tag: str) -> bool:
        """Return whether a message with this tag passes. SQL92 filters pass every tag."""
        return not self.tags or tag in self.tags

    def __or__(self, other: FilterExpression) -> FilterExpression:
        """Return the filter that passes what either of them passes.

        Raises InvalidSubscription if one of them is an SQL92 filter, unless both are equal.
        """
        if self == other:
            return self
        if SQL92 in (self.expression_type, other.expression_type):
            raise InvalidSubscription(
                "an SQL filter cannot be combined with another filter of the same topic; "
                "write one expression for both"
            )
        if not self.tags or not other.tags:
            return FilterExpression()
        return _tag_filter(self.tags | other.tags)


def parse_filter(expression: FilterLike) -> FilterExpression:
    """Return the filter that a user has written. Raises InvalidSubscription.

    A list of tags that contains `*` passes every message. SQL92 expressions are not checked here;
    the broker refuses a subscription whose expression it cannot compile.
    """
    if isinstance(expression, SqlFilter):
        if not expression.expression.strip():
            raise InvalidSubscription("the SQL filter is empty; to read all messages, use '*'")
        return FilterExpression(expression.expression, SQL92)
    if not isinstance(expression, str):
        raise InvalidSubscription(
            f"a filter is '*', tags like 'a || b', or SqlFilter(…), not {expression!r}"
        )
    tags = frozenset(parse_tags(expression))
    return FilterExpression() if not tags or SUBSCRIBE_ALL in tags else _tag_filter(tags)


def parse_subscriptions(subscribe: Subscriptions | None) -> dict[str, FilterExpression]:
    """Return the filter of each topic that a user subscribes to. Raises InvalidSubscription."""
    if subscribe is None:
        return {}
    if isinstance(subscribe, str):
        subscribe = (subscribe,)
    if not isinstance(subscribe, Iterable):
        raise InvalidSubscription(
            f"subscribe= is a topic, a list of topics, or filters by topic, not {subscribe!r}"
        )
    filters = subscribe if isinstance(subscribe, Mapping) else dict.fromkeys(subscribe, "*")
    for topic in filters:
        check_topic(topic)
    return {topic: parse_filter(expression) for topic, expression in filters.items()}


def check_topic(topic: str) -> None:
    """Raise InvalidSubscription for a topic that cannot exist."""
    if not isinstance(topic, str):
        raise InvalidSubscription(f"a topic is a text, not {topic!r}")
    if error := topic_name_error(topic):
        raise InvalidSubscription(error)


def parse_tags(expression: str) -> tuple[str, ...]:
    """Return the tags of `a || b` in their order, each once; an empty tuple means every message.

    Raises InvalidSubscription if there are separators but no tag.
    """
    text = expression.strip()
    if not text or text == SUBSCRIBE_ALL:
        return ()
    tags = tuple(dict.fromkeys(tag for part in text.split("||") if (tag := part.strip())))
    if not tags:
        raise InvalidSubscription(
            f"there is no tag in {expression!r}; write 'a || b', or '*' for all messages"
        )
    return tags


def _tag_filter(tags: frozenset[str]) -> FilterExpression:
    return FilterExpression(" || ".join(sorted(tags)), TAG, tags)
