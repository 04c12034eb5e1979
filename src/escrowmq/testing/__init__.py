"""Help for tests: a real broker for those of applications, and fakes for those of EscrowMQ itself.

    test ── LocalBroker ──▶ BrokerHost, in a thread or a process ──▶ name server and broker
             │ assert_delivered(), assert_rolled_back()                │
             └ slow(), lose_responses(), kill() ──▶ ConnectionFaults ──┘
    test ── kill_at(point, function) ──▶ a process of the application

[docs/testing.md](../../../docs/testing.md) is the manual. Modules in reading order:

    local_broker.py       LocalBroker: start, stop, kill, and its faults
    assertions.py         what was delivered and decided, with the reason if it was not
    broker_host.py        the broker in a thread or in a process of its own
    connection_faults.py  late and lost responses, refused connections
    crash_points.py       kill or freeze the application at a point of a transaction
    django.py             a broker for Django's test cases
    pytest_plugin.py      the fixtures; pytest finds them by the entry point in pyproject.toml
    disks.py              MemoryDisk: a disk in memory. FaultyDisk: fails or loses power at any call
    network.py            Network: connections between simulated peers that lose and repeat frames

The fakes, with `escrowmq.clock.ManualClock`, keep the promises of the real things: the same tests
run against both. A whole cluster runs on them in one thread. All randomness comes from seeds that
are passed in, so that a failure can be repeated.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from escrowmq.clock import ManualClock
    from escrowmq.testing.assertions import BrokerAssertions
    from escrowmq.testing.crash_points import (
        CrashingProcess,
        CrashPoint,
        StopSignal,
        freeze_at,
        kill_at,
    )
    from escrowmq.testing.disks import FaultyDisk, MemoryDisk, PowerCut
    from escrowmq.testing.local_broker import LocalBroker
    from escrowmq.testing.network import Network, NetworkFaults

# The module of each public name. They are imported on first use: pytest imports this package for
# its plugin, also in projects that do not use it.
_MODULES = {
    "BrokerAssertions": "escrowmq.testing.assertions",
    "CrashPoint": "escrowmq.testing.crash_points",
    "CrashingProcess": "escrowmq.testing.crash_points",
    "FaultyDisk": "escrowmq.testing.disks",
    "LocalBroker": "escrowmq.testing.local_broker",
    "ManualClock": "escrowmq.clock",
    "MemoryDisk": "escrowmq.testing.disks",
    "Network": "escrowmq.testing.network",
    "NetworkFaults": "escrowmq.testing.network",
    "PowerCut": "escrowmq.testing.disks",
    "StopSignal": "escrowmq.testing.crash_points",
    "freeze_at": "escrowmq.testing.crash_points",
    "kill_at": "escrowmq.testing.crash_points",
}

__all__ = [
    "BrokerAssertions",
    "CrashPoint",
    "CrashingProcess",
    "FaultyDisk",
    "LocalBroker",
    "ManualClock",
    "MemoryDisk",
    "Network",
    "NetworkFaults",
    "PowerCut",
    "StopSignal",
    "freeze_at",
    "kill_at",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
