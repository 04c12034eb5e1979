"""When the state of the transactions is saved, so that a start reads little."""

from __future__ import annotations

from escrowmq.errors import StoreFull
from escrowmq.store.snapshot_files import TRANSACTIONS_PATH
from tests.support.escrows import EscrowBench


def test_a_snapshot_is_written_with_the_first_tick_after_the_log_is_flushed() -> None:
    bench = EscrowBench()
    bench.park("a")
    bench.broker.transactions.save(force=True)
    bench.tick()
    assert not bench.disk.exists(TRANSACTIONS_PATH)  # a power cut could take what it reports
    bench.store.flush()
    bench.tick()
    assert bench.disk.exists(TRANSACTIONS_PATH)


def test_a_snapshot_that_could_not_be_written_is_tried_again() -> None:
    bench = EscrowBench()
    bench.park("a")
    bench.broker.transactions.save(force=True)
    bench.store.flush()
    bench.disk.error = StoreFull
    bench.disk.fail_from = bench.disk.calls + 1
    bench.broker.transactions.storage.tick(bench.now_ms)
    bench.disk.fail_from = None
    bench.tick()
    assert bench.disk.exists(TRANSACTIONS_PATH)
