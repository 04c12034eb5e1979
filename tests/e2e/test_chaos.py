"""A short run of `make chaos` with faults from a seed, and tests of the ledger that judges it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.ledger import Fate, Ledger
from tests.chaos.run import run
from tests.interop.records import Record


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("seed", "seconds"),
    [(4, 12), *(pytest.param(seed, 20, marks=pytest.mark.nightly) for seed in (4, 5, 6, 7))],
)
async def test_every_message_is_accounted_for(tmp_path: Path, seed: int, seconds: float) -> None:
    report = await run(tmp_path, seconds=seconds, seed=seed)
    assert not report.violations, str(report)
    assert report.fault_counts.total() > 0
    assert report.ledger.count(Fate.ACKNOWLEDGED) > 0, str(report)
    assert report.ledger.count(Fate.COMMITTED) > 0, str(report)


QUEUE = ("t", 0)


def queue_records(*bodies: bytes, key: str = "k") -> list[Record]:
    """Return records with these bodies, at consecutive queue offsets."""
    properties = f"UNIQ_KEY\x01{key}\x02".encode()
    return [
        Record(0, 0, 0, 0, 0, queue_offset, 0, 0, 0, "", 0, "", 0, 0, body, "t", properties)
        for queue_offset, body in enumerate(bodies)
    ]


@pytest.mark.parametrize(
    ("fate", "bodies", "message"),
    [
        (Fate.ACKNOWLEDGED, [], "is missing"),
        (Fate.COMMITTED, [], "is missing"),
        (Fate.ROLLED_BACK, [b"plain/a/1"], "although it was rolled back"),
        (Fate.REFUSED, [b"plain/a/1"], "although it was refused"),
        (Fate.COMMITTED, [b"plain/a/1", b"plain/a/1"], "stored 2 times"),
        (Fate.SENT, [b"plain/a/1", b"plain/b/7"], "never sent"),
    ],
)
def test_the_ledger_reports_lost_unexpected_and_repeated_messages(
    fate: Fate, bodies: list[bytes], message: str
) -> None:
    ledger = Ledger()
    ledger.record(b"plain/a/1", fate)
    violations = ledger.check({QUEUE: queue_records(*bodies)})
    assert len(violations) == 1
    assert message in violations[0]


def test_the_ledger_reports_messages_out_of_order() -> None:
    ledger = Ledger()
    for number in (1, 2, 3):
        ledger.record(b"plain/a/%d" % number, Fate.ACKNOWLEDGED)
    records = queue_records(b"plain/a/1", b"plain/a/2", b"plain/a/3")
    assert ledger.check({QUEUE: records}) == []
    [violation] = ledger.check({QUEUE: [records[0], records[2], records[1]]})
    assert "is stored after 3" in violation
    ledger.consume_in_order("g", QUEUE, 0, b"plain/a/1")
    ledger.consume_in_order("g", QUEUE, 2, b"plain/a/3")
    assert ledger.violations == [f"g skipped from offset 0 to 2 of {QUEUE}"]
