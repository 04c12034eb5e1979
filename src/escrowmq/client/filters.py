"""What a consumer wants of a topic: everything ("*"), some tags ("a || b"), or what an SQL92
expression over the properties says (`Sql("price > 3")`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from escrowmq.errors import BadSubscription
from escrowmq.message.keys import java_hash
from escrowmq.remoting.bodies import SubscriptionEntry

TAG: Final = "TAG"
SQL92: Final = "SQL92"


@dataclass(frozen=True, slots=True)
class Sql:
    """Evaluated by the broker, over a message's properties: `Sql("price > 3 AND kind = 'x'")`."""

    expression: str


Wanted = str | Sql
Subscribed = Mapping[str, Wanted]


@dataclass(frozen=True, slots=True)
class Filter:
    text: str = "*"
    kind: str = TAG
    tags: frozenset[str] = frozenset()  # none: whatever the tag

    def accepts(self, tag: str) -> bool:
        """Brokers compare hashes of tags, and two tags may share one: so here by name."""
        return not self.tags or tag in self.tags

    def entry(self, topic: str, version: int) -> SubscriptionEntry:
        named = sorted(self.tags)
        return SubscriptionEntry(
            topic=topic,
            sub_string=self.text,
            tags_set=named,
            code_set=[java_hash(tag) for tag in named],
            sub_version=version,
            expression_type=self.kind,
        )

    def __or__(self, other: Filter) -> Filter:
        """What either of them wants. Raises BadSubscription: an expression stands alone."""
        if self == other:
            return self
        if SQL92 in (self.kind, other.kind):
            raise BadSubscription(
                "an Sql filter is the only one of its topic: write one expression that says it all"
            )
        if not self.tags or not other.tags:
            return Filter()
        return _tagged(self.tags | other.tags)


def parse_filter(wanted: Wanted) -> Filter:
    """Raises BadSubscription."""
    if isinstance(wanted, Sql):
        if not wanted.expression.strip():
            raise BadSubscription("an empty Sql filter: say what is wanted, or subscribe to '*'")
        return Filter(wanted.expression, SQL92)
    if not isinstance(wanted, str):
        raise BadSubscription(f"a filter is '*', tags like 'a || b' or Sql(…), not {wanted!r}")
    tags = frozenset(tag.strip() for tag in wanted.split("||")) - {""}
    if "*" in tags or not wanted.strip():
        return Filter()
    if not tags:
        raise BadSubscription(f"no tag in {wanted!r}: write 'a || b', or '*' for all")
    return _tagged(tags)


def _tagged(tags: frozenset[str]) -> Filter:
    return Filter(" || ".join(sorted(tags)), TAG, tags)
