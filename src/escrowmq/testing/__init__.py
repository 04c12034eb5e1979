"""Fakes for tests: a clock, disks and a network that do what a test tells them to.

They keep the promises of the real things; the same contract tests run against both.

    disks.py     MemoryDisk: a disk in memory. FaultyDisk: fails, or loses power, at any call
    network.py   Network: connections between simulated peers that lose, delay and repeat frames
    ManualClock  (escrowmq.clock) a clock that moves only when it is told to

A whole cluster runs on these in one thread. All randomness comes from seeds that are passed in, so
that a failure can be repeated.
"""

from __future__ import annotations

from escrowmq.clock import ManualClock
from escrowmq.testing.disks import FaultyDisk, MemoryDisk, PowerCut
from escrowmq.testing.network import Network, NetworkFaults

__all__ = ["FaultyDisk", "ManualClock", "MemoryDisk", "Network", "NetworkFaults", "PowerCut"]
