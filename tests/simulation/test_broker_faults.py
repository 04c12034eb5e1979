"""Let the disk calls of a whole broker fail in turn, start it again, and account for everything.

The scenario is that of test_escrow_cuts.py. A call fails once: with an I/O error, a full disk, no
open file, or no memory. Where the server would stop, the broker starts again after a power cut:
after a failed flush, the kernel may have dropped what it could not write.
"""

from __future__ import annotations

import itertools
import logging
import os

import pytest

from escrowmq.errors import StoreError, StoreFailed, StoreFull, StoreUnavailable
from tests.simulation.escrow_simulation import Simulation
from tests.simulation.test_escrow_cuts import SEED, scenario

BLOCKS = 2
# A short run lets every 60th call fail, other ones for each error; a long run (ESCROWMQ_SEEDS) all.
STRIDE = 1 if "ESCROWMQ_SEEDS" in os.environ else 60
DISK_ERRORS = (StoreError, MemoryError)
ERRORS: list[type[Exception]] = [StoreFailed, StoreFull, StoreUnavailable, MemoryError]


class FaultySimulation(Simulation):
    def start(self) -> None:
        try:
            super().start()
        except (AssertionError, MemoryError) as error:
            # The fault met the start itself: the server ends with exit code 1 and starts again.
            if self.power_cut_count or not isinstance(error.__cause__ or error, DISK_ERRORS):
                raise
            self.power_cut()

    def _serve(self) -> None:
        calls = self.disk.calls
        try:
            super()._serve()
        finally:
            # A check is sent before it is recorded, and the fault may have met the record.
            if calls < (self.disk.fail_at or 0) <= self.disk.calls:
                self.model.unjournaled |= self.model.checked_in_turn

    def kill(self) -> None:
        self.power_cut()


def is_unexpected(record: logging.LogRecord) -> bool:
    """Return whether a traceback in the log is a bug.

    The broker refuses an append that has no memory, and logs it with a traceback, as any error that
    is no StoreError. Here it is the fault itself.
    """
    error = record.exc_info[1] if record.exc_info else None
    return not (isinstance(error, MemoryError) and str(error).endswith("made to fail"))


def run_with_fault(error: type[Exception], call: int) -> bool:
    """Run the scenario until all is decided. Return whether it has so many calls before a cut."""
    with FaultySimulation(SEED) as simulation:
        simulation.survivals = ("none", "mixed")
        simulation.checks_disk = False
        simulation.traceback_collector.addFilter(is_unexpected)
        disk = simulation.disk
        disk.error, disk.fail_at = error, call
        for _ in scenario(simulation):
            pass
        disk.fail_at = None
        simulation.run_until_idle()
    return disk.calls >= call


@pytest.mark.slow
@pytest.mark.both_paths
@pytest.mark.parametrize("block", range(BLOCKS))
@pytest.mark.parametrize("error", ERRORS)
def test_a_broker_survives_the_failure_of_any_disk_call(error: type[Exception], block: int) -> None:
    first = 1 + ERRORS.index(error) * STRIDE // len(ERRORS) + block * STRIDE
    for call in itertools.count(first, STRIDE * BLOCKS):
        try:
            if not run_with_fault(error, call):
                break
        except AssertionError as failure:
            raise AssertionError(f"{error.__name__} at call {call}: {failure}") from failure
    assert call > 100
