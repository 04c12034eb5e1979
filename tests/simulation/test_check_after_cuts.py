"""After a kill or a power cut at any call of the disk, a check finds no damage: there is none."""

from __future__ import annotations

import contextlib
from random import Random

from escrowmq.store.check import is_store
from escrowmq.testing import FaultyDisk, PowerCut
from tests.support.store_damage import damage
from tests.support.stores import examine, fill, open_store

STRIDE = 5  # every call would take a quarter of a minute


def use_store(disk: FaultyDisk) -> None:
    """Append, flush, make checkpoints, remove a segment, close the store and open it again."""
    for begin in (0, 30, 60):
        store = open_store(disk)
        fill(store, range(begin, begin + 15))
        store.checkpoint()
        fill(store, range(begin + 15, begin + 30))
        if begin == 30:
            store.checkpoint()
            store.remove_oldest_file()
            store.checkpoint()
        store.flush()
        store.close()


def test_a_store_that_was_cut_at_any_call_is_clean_for_a_check() -> None:
    whole = FaultyDisk()
    use_store(whole)
    checks = 0
    for call in range(1, whole.calls + 1, STRIDE):
        disk = FaultyDisk(power_cut_at=call)
        with contextlib.suppress(PowerCut):
            use_store(disk)
        cuts = [disk.power_cut(Random(10 * call + seed)) for seed in range(3)]
        for survivor in (disk.after_kill(), *cuts):
            if is_store(survivor):
                assert damage(examine(survivor)) == [], f"cut at {disk.trace[-1]}"
                checks += 1
    assert checks > 300
