"""Who has more than a fair share of something that is limited: bytes, members, pulls, connections.

Connections are counted by their *origin*: the account that a connection uses, or the host that it
comes from. Each origin has an equal share, and within an origin each connection. So a client cannot
get more by opening more connections, and one connection of another origin cannot be starved by a
thousand of them.

An origin may be a proxy with many clients behind it. Nothing is taken from it as long as there is
enough for all, and what it has too much of is taken from its greediest connection.
"""

from __future__ import annotations

from typing import Final, Generic, TypeVar

from escrowmq.peer import Peer

C = TypeVar("C", bound=Peer)


class _Origin(Generic[C]):
    """The connections of one account or host that have something."""

    __slots__ = ("amount", "amounts", "name")

    def __init__(self, name: str) -> None:
        self.name: Final = name
        self.amount = 0
        self.amounts: dict[C, int] = {}


class FairShares(Generic[C]):
    """How much each connection has, and each origin."""

    def __init__(self) -> None:
        self.total = 0
        self._origins: dict[str, _Origin[C]] = {}
        # The origin under which a connection is counted, also if it has another one by now.
        self._origin_of: dict[C, _Origin[C]] = {}
        self._greediest: C | None = None  # the one that was found last

    def __len__(self) -> int:
        """Return the number of connections that have something."""
        return len(self._origin_of)

    @property
    def origin_count(self) -> int:
        return len(self._origins)

    def amount_of(self, owner: C) -> int:
        origin = self._origin_of.get(owner)
        return 0 if origin is None else origin.amounts[owner]

    def origin_amount_of(self, owner: C) -> int:
        """Return how much all connections of the owner's origin have together."""
        origin = self._origin_of.get(owner) or self._origins.get(owner.origin)
        return 0 if origin is None else origin.amount

    def add(self, owner: C, amount: int) -> None:
        """Count so much more for a connection; less if it is negative."""
        origin = self._origin_of.get(owner)
        if origin is None:
            origin = self._origins.get(owner.origin)
            if origin is None:
                origin = self._origins[owner.origin] = _Origin(owner.origin)
            self._origin_of[owner] = origin
            origin.amounts[owner] = 0
        self.total += amount
        origin.amount += amount
        origin.amounts[owner] += amount
        if not origin.amounts[owner]:
            self.remove(owner)

    def remove(self, owner: C) -> int:
        """Stop counting a connection, and return how much it had."""
        origin = self._origin_of.pop(owner, None)
        if origin is None:
            return 0
        amount = origin.amounts.pop(owner)
        self.total -= amount
        origin.amount -= amount
        if not origin.amounts:
            del self._origins[origin.name]
        if owner is self._greediest:
            self._greediest = None
        return amount

    def update_origin(self, owner: C) -> None:
        """Count a connection under another origin, because its own has changed."""
        amount = self.remove(owner)
        if amount:
            self.add(owner, amount)

    def find_greedy(self, owner: C, amount: int = 1) -> C | None:
        """Return a connection to take something from, so that `owner` can have so much more.

        Return None if the owner and its origin have their share, which is the average. The result
        has clearly more than the owner, or its origin has: otherwise two connections could take the
        same thing from each other for ever. The newest of several is returned.
        """
        own, own_origin = self.amount_of(owner), self.origin_amount_of(owner)
        has_share = own * len(self._origin_of) >= self.total
        if has_share and own_origin * len(self._origins) >= self.total:
            return None
        # Not from an origin that has less than the average, or less than the owner's.
        floor = max(own_origin, self.total // max(1, len(self._origins)))
        greedy = self._greediest
        # To look at all connections each time would take long, so the one that was found is used
        # again for as long as it has enough.
        if greedy is None or not self._has_clearly_more(greedy, owner, amount, floor):
            greedy = self._greediest = self._search_greediest(floor)
        if greedy is None or not self._has_clearly_more(greedy, owner, amount, floor):
            return None
        return greedy

    def by_greed(self) -> list[tuple[C, int]]:
        """Return all connections with their amounts, those first that should have less.

        Connections of origins that have more than the average come before the others.
        """
        average = self.total // max(1, len(self._origins))
        items = [
            (origin.amount > average, amount, owner)
            for origin in self._origins.values()
            for owner, amount in origin.amounts.items()
        ]
        items.sort(key=lambda item: item[:2], reverse=True)
        return [(owner, amount) for _, amount, owner in items]

    def _has_clearly_more(self, greedy: C, owner: C, amount: int, floor: int) -> bool:
        origin = self._origin_of[greedy]
        if origin.amount < floor or greedy is owner:
            return False
        own_origin = self._origin_of.get(owner) or self._origins.get(owner.origin)
        if origin is own_origin:
            return origin.amounts[greedy] >= self.amount_of(owner) + 2 * amount
        return origin.amount >= self.origin_amount_of(owner) + 2 * amount

    def _search_greediest(self, floor: int) -> C | None:
        amounts = [
            (owner, amount)
            for origin in self._origins.values()
            if origin.amount >= floor
            for owner, amount in reversed(origin.amounts.items())
        ]
        return max(amounts, key=lambda item: item[1])[0] if amounts else None
