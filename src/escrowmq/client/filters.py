"""What a consumer wants of a topic: everything ("*"), some tags ("a || b"), or what an SQL92
expression over the properties says (`SqlFilter("price > 3")`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from escrowmq.errors import InvalidSubscription
from escrowmq.message.keys import java_hash
from escrowmq.remoting.bodies import SubscriptionEntry

TAG: Final = "TAG"
SQL92: Final = "SQL92"


@dataclass(frozen=True, slots=True)
class SqlFilter:
    """Evaluated by the broker, over a message's properties: `SqlFilter("price > 3 AND kind =
    'x'")`."""

    expression: str


FilterLike = str | SqlFilter
Subscriptions = Mapping[str, FilterLike]


@dataclass(frozen=True, slots=True)
class FilterExpression:
    expression: str = "*"
    expression_type: str = TAG
    tags: frozenset[str] = frozenset()  # none: whatever the tag

    def matches_tag(self, tag: str) -> bool:
        """Brokers compare hashes of tags, and two tags may share one: so here by name."""
        return not self.tags or tag in self.tags

    def subscription_entry(self, topic: str, version: int) -> SubscriptionEntry:
        named = sorted(self.tags)
        return SubscriptionEntry(
            topic=topic,
            sub_string=self.expression,
            tags_set=named,
            code_set=[java_hash(tag) for tag in named],
            sub_version=version,
            expression_type=self.expression_type,
        )

    def __or__(self, other: FilterExpression) -> FilterExpression:
        """What either of them wants. Raises BadSubscription: an expression stands alone."""
        if self == other:
            return self
        if SQL92 in (self.expression_type, other.expression_type):
            raise InvalidSubscription(
                "an Sql filter is the only one of its topic: write one expression that says it all"
            )
        if not self.tags or not other.tags:
            return FilterExpression()
        return _tag_filter(self.tags | other.tags)


def parse_filter(expression: FilterLike) -> FilterExpression:
    """Raises BadSubscription."""
    if isinstance(expression, SqlFilter):
        if not expression.expression.strip():
            raise InvalidSubscription(
                "an empty Sql filter: say what is wanted, or subscribe to '*'"
            )
        return FilterExpression(expression.expression, SQL92)
    if not isinstance(expression, str):
        raise InvalidSubscription(
            f"a filter is '*', tags like 'a || b' or Sql(…), not {expression!r}"
        )
    tags = frozenset(tag.strip() for tag in expression.split("||")) - {""}
    if "*" in tags or not expression.strip():
        return FilterExpression()
    if not tags:
        raise InvalidSubscription(f"no tag in {expression!r}: write 'a || b', or '*' for all")
    return _tag_filter(tags)


def _tag_filter(tags: frozenset[str]) -> FilterExpression:
    return FilterExpression(" || ".join(sorted(tags)), TAG, tags)
