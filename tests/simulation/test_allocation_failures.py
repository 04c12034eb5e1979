"""Let every allocation of memory during an append, a flush or a checkpoint fail in turn.

CPython can make its n-th allocation fail (`_testcapi.set_nomemory`). After a MemoryError the store
either has nothing of the batch, or refuses everything until the next start, which finds a log that
agrees with queues and index.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from escrowmq.store.disk import RealDisk
from escrowmq.store.store import MessageStore
from tests.support.stores import HOST, TINY, assert_clean, sample

PROGRAM = """
import sys
from pathlib import Path

from _testcapi import remove_mem_hooks, set_nomemory

from escrowmq.store.disk import RealDisk
from escrowmq.store.store import MessageStore
from tests.support.stores import HOST, NOW_MS, TINY, assert_clean, sample

def bodies(store):
    return [bytes(record.body) for record in store.records()]

root, step = Path(sys.argv[1]), sys.argv[2]
failures = successes = 0
for position in range(int(sys.argv[3]), 1 << 30, int(sys.argv[4])):
    directory = root / str(position)
    store = MessageStore.open(RealDisk(directory), TINY, store_host=HOST)
    before = [sample(number) for number in range(3)]
    store.append(before, now_ms=NOW_MS)
    store.flush()
    batch = [sample(number) for number in range(3, 15)]  # crosses into the next segment
    run = {"append": lambda: store.append(batch, now_ms=NOW_MS), "flush": store.flush,
           "checkpoint": store.checkpoint}[step]
    if step != "append":
        store.append(batch, now_ms=NOW_MS)
    has_run_out = False
    set_nomemory(position, position + 1)
    try:
        run()
    except Exception:
        has_run_out = True
    finally:
        remove_mem_hooks()
    failures += has_run_out
    expected = [record.body for record in before]
    stored = bodies(store)
    if step != "append" or not has_run_out:
        assert stored == expected + [record.body for record in batch], position
    elif not store.has_failed:
        assert stored == expected, (position, len(stored))
    if not store.has_failed:
        store.append([sample(20)], now_ms=NOW_MS)
        stored.append(sample(20).body)
        store.close()
    else:
        store.abandon()
    reopened = MessageStore.open(RealDisk(directory), TINY, store_host=HOST)
    assert bodies(reopened)[: len(stored)] == stored, position
    reopened.close()
    assert_clean(directory)
    successes = 0 if has_run_out else successes + 1
    if successes == 20:  # a failed allocation that Python handles by itself looks like success
        break
print(failures)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("step", "stride"), [("append", 7), ("flush", 1), ("checkpoint", 97)])
def test_a_failed_allocation_leaves_a_store_that_agrees_with_its_log(
    tmp_path: Path, step: str, stride: int
) -> None:
    if find_spec("_testcapi") is None:  # a part of CPython's test suite
        pytest.skip("this Python cannot make allocations fail")
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), step, "1", str(stride)],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    if result.returncode == -signal.SIGSEGV:
        # A C extension did not check an allocation. To the store, that is a crash like any other.
        newest = max(tmp_path.iterdir(), key=lambda directory: int(directory.name))
        store = MessageStore.open(RealDisk(newest), TINY, store_host=HOST)
        bodies = [bytes(record.body) for record in store.records()]
        assert bodies[:3] == [sample(number).body for number in range(3)]
        store.close()
        assert_clean(newest)
        return
    assert result.returncode == 0, result.stderr[-3000:]
    assert int(result.stdout) > 5
