"""Every queue is assigned to exactly one member, the same member as in RocketMQ."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from escrowmq.client.consumer.rebalance import (
    AssignmentStrategy,
    average,
    average_by_circle,
    by_config,
    consistent_hash,
    machine_room,
    machine_room_nearby,
)
from escrowmq.client.messages import MessageQueue

members = st.lists(st.text("abc123@#", min_size=1, max_size=6), min_size=1, max_size=9, unique=True)
brokers = st.sampled_from(["r1@a", "r1@b", "r2@a", "r3@a"])
queues = st.lists(
    st.builds(MessageQueue, st.just("t"), brokers, st.integers(0, 12)),
    max_size=30,
    unique=True,
)
ROOMS = {"r1", "r2", "r3"}

nearby = machine_room_nearby(
    lambda broker: broker[:2], lambda member: "r1" if member < "a" else "r9"
)
STRATEGIES: list[AssignmentStrategy] = [
    average,
    average_by_circle,
    machine_room(ROOMS),
    consistent_hash(),
    consistent_hash(3),
    nearby,
]


@given(queues, members, st.sampled_from(STRATEGIES), st.randoms())
def test_every_queue_belongs_to_one_member_whatever_the_order_of_the_lists(
    queues: list[MessageQueue], members: list[str], assign: AssignmentStrategy, random: object
) -> None:
    shares = [assign(queues, members, member) for member in members]
    assert sorted(queue for own_queues in shares for queue in own_queues) == sorted(queues)
    shuffled_queues, shuffled_members = queues[:], members[:]
    random.shuffle(shuffled_queues)  # type: ignore[attr-defined]
    random.shuffle(shuffled_members)  # type: ignore[attr-defined]
    shuffled_shares = [assign(shuffled_queues, shuffled_members, member) for member in members]
    assert list(map(sorted, shuffled_shares)) == list(map(sorted, shares))
    assert assign(queues, members, "not a member") == []


@given(queues, members)
def test_average_and_circle_equal_rocketmq(queues: list[MessageQueue], members: list[str]) -> None:
    # The expected shares are computed as in RocketMQ: index, remainder, start and range.
    sorted_queues, sorted_members = sorted(queues), sorted(members)
    count, total = len(sorted_members), len(sorted_queues)
    for index, client_id in enumerate(sorted_members):
        remainder = total % count
        size = 1 if total <= count else total // count + (remainder > 0 and index < remainder)
        gets_remainder = remainder > 0 and index < remainder
        begin = index * size if gets_remainder else index * size + remainder
        share_size = min(size, total - begin)
        expected = [sorted_queues[(begin + step) % total] for step in range(share_size)]
        assert average(queues, members, client_id) == expected
        circle_share = [
            sorted_queues[position] for position in range(index, total) if position % count == index
        ]
        assert average_by_circle(queues, members, client_id) == circle_share


@given(queues, members)
def test_the_sizes_of_shares_differ_by_at_most_one(
    queues: list[MessageQueue], members: list[str]
) -> None:
    for assign in (average, average_by_circle, machine_room(ROOMS)):
        sizes = [len(assign(queues, members, member)) for member in members]
        assert max(sizes) - min(sizes) <= 1


@given(queues, members)
def test_consistent_hash_moves_only_the_queues_of_the_member_that_leaves(
    queues: list[MessageQueue], members: list[str]
) -> None:
    assign = consistent_hash()
    for member in members[1:]:
        before = set(assign(queues, members, member))
        assert before <= set(
            assign(queues, [other for other in members if other != members[0]], member)
        )


def test_queues_of_other_rooms_are_not_assigned() -> None:
    own_room, other_room, without_room = (
        MessageQueue("t", "r1@a", 0),
        MessageQueue("t", "r2@a", 0),
        MessageQueue("t", "plain", 0),
    )
    assert machine_room(["r1"])([own_room, other_room, without_room], ["m"], "m") == [own_room]


def test_by_config_assigns_the_fixed_queues_and_divides_the_others() -> None:
    fixed = by_config([("t", "b", 1)])
    queues = [
        MessageQueue("t", "b", 0),
        MessageQueue("t", "b", 1),
        MessageQueue("%RETRY%g", "b", 0),
    ]
    assert fixed(queues, ["m", "n"], "m") == [queues[1], queues[2]]
    assert fixed(queues, ["m", "n"], "n") == [queues[1]]


def test_consistent_hash_equals_rocketmq() -> None:
    queues = [MessageQueue("t", "broker-a", number) for number in range(12)]
    members = ["c0", "c1", "c2"]
    shares = [consistent_hash()(queues, members, member) for member in members]
    # The result of AllocateMessageQueueConsistentHash in RocketMQ 5.5.0 for the same lists.
    assert [[queue.queue_id for queue in own_queues] for own_queues in shares] == [
        [2, 6, 9],
        [3, 5, 8, 10, 11],
        [0, 1, 4, 7],
    ]
