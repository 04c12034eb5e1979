"""Public fakes: what this package needs from the outside world, without the outside world.

They keep the promises of the real thing, held to them by the same tests (tests/contract).
"""

from __future__ import annotations

from escrowmq.clock import ManualClock
from escrowmq.testing.disks import FaultyDisk, MemoryDisk, PowerCut
from escrowmq.testing.network import Network, NetworkFaults

__all__ = ["FaultyDisk", "ManualClock", "MemoryDisk", "Network", "NetworkFaults", "PowerCut"]
