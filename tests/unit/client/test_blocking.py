"""The blocking classes have the methods, parameters and defaults of the asyncio classes."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import pytest

import escrowmq
from escrowmq import blocking

# Methods whose names differ: asyncio to blocking.
RENAMED = {"__aenter__": "__enter__", "__aexit__": "__exit__", "__aiter__": "__iter__"}
# Methods that only say which class has the other kind of block or loop.
EXPLANATIONS = ("AsyncioClient.", "BlockingClient.")
CLASSES = sorted(blocking.__all__)
# Values that are attributes of asyncio objects and properties of the blocking classes.
ATTRIBUTES = {
    "Producer": ["group", "namespace"],
    "TransactionProducer": ["group", "namespace", "listener"],
    "Transaction": ["id", "name", "halves", "outcome"],
    "Consumer": ["group"],
    "LiteConsumer": ["group"],
    "PullConsumer": ["group"],
}
ALIASES = {"LocalTransactionState": "Verdict"}  # RocketMQ's name


def public_members(cls: type) -> Iterator[tuple[str, object]]:
    for name, member in inspect.getmembers(cls):
        if getattr(member, "__qualname__", "").startswith(EXPLANATIONS):
            continue
        if name in RENAMED or name in RENAMED.values() or not name.startswith("_"):
            yield RENAMED.get(name, name), member


def parameters(function: object) -> list[tuple[str, object, object]]:
    assert callable(function)
    signature = inspect.signature(function)
    return [(p.name, p.kind, p.default) for p in signature.parameters.values()]


@pytest.mark.parametrize("name", CLASSES)
def test_the_members_are_the_same(name: str) -> None:
    asyncio_members = {member for member, _ in public_members(getattr(escrowmq, name))}
    blocking_members = {member for member, _ in public_members(getattr(blocking, name))}
    assert blocking_members - set(ATTRIBUTES[name]) == asyncio_members


@pytest.mark.parametrize("name", CLASSES)
def test_the_parameters_and_defaults_are_the_same(name: str) -> None:
    members = dict(public_members(getattr(blocking, name)))
    for member, expected in public_members(getattr(escrowmq, name)):
        if isinstance(expected, property):
            assert isinstance(members[member], property), member
        else:
            assert parameters(members[member]) == parameters(expected), member


@pytest.mark.parametrize("name", [name for name in CLASSES if name != "Transaction"])
def test_the_constructors_are_the_same(name: str) -> None:
    """Transaction is left out, because only producers create it."""
    expected = parameters(getattr(escrowmq, name).__init__)
    assert parameters(getattr(blocking, name).__init__) == expected


@pytest.mark.parametrize("name", CLASSES)
def test_every_public_method_is_documented(name: str) -> None:
    for module in (escrowmq, blocking):
        cls = getattr(module, name)
        assert inspect.getdoc(cls)
        undocumented = [
            member
            for member, value in public_members(cls)
            if not member.startswith("_")
            and inspect.isfunction(value)
            and not inspect.getdoc(value)
        ]
        assert undocumented == []


def test_the_package_lists_its_public_names() -> None:
    assert set(escrowmq.__all__) <= set(dir(escrowmq))
    for name in escrowmq.__all__:
        assert getattr(escrowmq, name).__name__ == ALIASES.get(name, name)
