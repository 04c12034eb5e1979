"""Fair shares: who has to give something up, so that another connection can have it."""

from __future__ import annotations

import pytest

from escrowmq.fair_shares import FairShares
from escrowmq.peer import host_of
from tests.support.fake_peers import FakePeer


def peers(host: str, count: int) -> list[FakePeer]:
    return [FakePeer(f"{host}:{number}") for number in range(count)]


def shares(*holdings: tuple[FakePeer, int]) -> FairShares[FakePeer]:
    result: FairShares[FakePeer] = FairShares()
    for peer, amount in holdings:
        result.add(peer, amount)
    return result


ATTACKERS = peers("10.0.0.1", 1_000)
HONEST = FakePeer("10.0.0.2:1")
NEWCOMER = FakePeer("10.0.0.3:1")


def test_many_connections_of_one_host_cannot_starve_another_host() -> None:
    """Each attacker has less than the honest connection, and all of them have nearly everything."""
    table = shares((HONEST, 90), *((attacker, 100) for attacker in ATTACKERS))
    for attacker in ATTACKERS:
        table.add(attacker, -90)
    assert table.find_greedy(HONEST) in ATTACKERS
    assert table.find_greedy(NEWCOMER) in ATTACKERS
    assert table.by_greed()[-1] == (HONEST, 90)


def test_another_connection_of_a_greedy_host_gets_something_only_from_its_own_host() -> None:
    own = FakePeer("10.0.0.1:5000")
    table = shares((HONEST, 500), (NEWCOMER, 1), *((attacker, 10) for attacker in ATTACKERS))
    assert table.find_greedy(own) in ATTACKERS


def test_within_a_host_the_greediest_connection_gives_something_up() -> None:
    greedy, modest, own = peers("10.0.0.1", 3)
    table = shares((greedy, 10), (modest, 2))
    assert table.find_greedy(own) is greedy
    assert table.find_greedy(modest) is greedy
    assert table.find_greedy(greedy) is None


def test_a_large_proxy_gives_up_less_than_a_greedy_connection_elsewhere() -> None:
    """Both hosts have more than the average. A connection behind the proxy has little."""
    behind_proxy = [(peer, 20) for peer in peers("10.0.0.9", 300)]
    greedy = [(peer, 1_000) for peer in peers("10.0.0.8", 5)]
    table = shares(*behind_proxy, *greedy, (HONEST, 1))
    assert table.find_greedy(NEWCOMER) in dict(greedy)
    assert {peer for peer, _ in table.by_greed()[:5]} == set(dict(greedy))


def test_equal_connections_do_not_take_from_each_other() -> None:
    first, second = FakePeer("10.0.0.1:1"), FakePeer("10.0.0.2:1")
    table = shares((first, 5), (second, 5))
    assert table.find_greedy(first) is None
    assert table.find_greedy(second) is None
    table.add(second, -1)
    assert table.find_greedy(second) is None  # it would be the other way round afterwards


def test_the_newest_of_equally_greedy_connections_gives_something_up() -> None:
    table = shares(*((attacker, 1) for attacker in ATTACKERS))
    assert table.find_greedy(NEWCOMER) is ATTACKERS[-1]


def test_nothing_is_left_of_connections_that_have_nothing() -> None:
    table = shares((HONEST, 5), (ATTACKERS[0], 1))
    table.add(HONEST, -5)
    assert table.remove(ATTACKERS[0]) == 1
    assert table.remove(ATTACKERS[0]) == 0
    assert (len(table), table.origin_count, table.total) == (0, 0, 0)


class AccountPeer(FakePeer):
    """A peer that names its account later."""

    account = ""

    @property
    def origin(self) -> str:
        return self.account or super().origin


def test_a_connection_is_counted_for_its_account_once_it_is_known() -> None:
    owner, neighbour = AccountPeer("10.0.0.1:1"), AccountPeer("10.0.0.1:2")
    table: FairShares[AccountPeer] = FairShares()
    table.add(owner, 3)
    table.add(neighbour, 4)
    owner.account = "alice"
    table.add(owner, 1)  # still counted for the host
    assert table.origin_amount_of(owner) == 8
    table.update_origin(owner)
    assert (table.origin_amount_of(owner), table.origin_amount_of(neighbour)) == (4, 4)
    table.add(owner, -4)
    assert (table.total, table.origin_count) == (4, 1)


@pytest.mark.parametrize(
    ("address", "host"),
    [
        ("10.0.0.1:9876", "10.0.0.1"),
        ("a", "a"),
        ("2001:db8:1:2:3:4:5:6:9876", "2001:db8:1:2"),
        ("2001:db8:1:2::6:9876", "2001:db8:1:2"),
        ("2001:db8::6:9876", "2001:db8:0:0"),
        ("::1:9876", "0:0:0:0"),
        ("fe80::1%eth0:9876", "fe80:0:0:0"),
    ],
)
def test_the_origin_of_an_ipv6_address_is_its_network(address: str, host: str) -> None:
    assert host_of(address) == host
