"""The input of the pipeline benchmarks: a valid log, and databases with planted differences."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import numpy as np

from bench.measure import Plan
from bench.pipeline import STEPS, Step, rows
from bench.pipeline_input import FIRST_HALF, PLANTED, Log, expected, make_books, name_of
from escrowmq.escrow.records import decode_op
from escrowmq.message import names
from escrowmq.message.properties import decode_properties
from escrowmq.message.record import LogOffset, StoredRecord, decode_record

COUNT = 2_000


def records_of(path: Path, end: int) -> list[StoredRecord]:
    data, position = path.read_bytes()[:end], 0
    records = []
    while position < end:
        records.append(decode_record(data, position, LogOffset(position)))
        position += records[-1].size
    return records


def test_the_log_has_the_records_that_a_broker_would_write(tmp_path: Path) -> None:
    log = Log(tmp_path / "commitlog")
    log.append(np.arange(COUNT, dtype=np.int64), COUNT)
    log.close()
    records = records_of(tmp_path / "commitlog" / f"{0:020d}", log.end)
    by_topic = Counter(record.topic for record in records)
    assert by_topic[names.HALF_TOPIC] == COUNT
    assert by_topic[names.OP_TOPIC] == COUNT - 2  # two are open
    halves = {record.log_offset: record for record in records if record.topic == names.HALF_TOPIC}
    for number, half in enumerate(halves.values()):
        assert half.queue_offset == FIRST_HALF + number
        assert decode_properties(half.properties)["TX_ID"] == name_of(number)
    for final in (record for record in records if record.topic == "transfers"):
        half = halves[LogOffset(final.prepared_offset)]
        half_properties, final_properties = map(
            decode_properties, (half.properties, final.properties)
        )
        assert half_properties["TX_ID"] == final_properties["TX_ID"]
    ops = [decode_op(record) for record in records if record.topic == names.OP_TOPIC]
    assert len({op.half_offsets[0] for op in ops if op is not None}) == COUNT - 2


def test_the_databases_have_the_planted_differences(tmp_path: Path) -> None:
    make_books(tmp_path, COUNT)
    counts = {}
    for name in ("bob", "smith"):
        with sqlite3.connect(tmp_path / f"{name}.db") as bank:
            for table in ("escrowmq_marker", "escrowmq_inbox", "transfer"):
                [(counts[name, table],)] = bank.execute(f"SELECT count(*) FROM {table}")
        bank.close()
    booked = COUNT * 93 // 100 - 2  # neither rolled back nor open
    assert counts["bob", "escrowmq_marker"] == counts["bob", "transfer"] == booked - 2
    assert counts["bob", "escrowmq_inbox"] == 2
    assert counts["smith", "escrowmq_inbox"] == counts["smith", "transfer"] == booked - 3 * 2
    assert sum(expected(COUNT).values()) == 2 * len(PLANTED)


def test_the_results_of_finished_steps_are_reported_without_repeating_them(tmp_path: Path) -> None:
    for count, seconds in ((1_000, 60.0), (10_000, 300.0)):
        (tmp_path / f"{count}").mkdir()
        for name in STEPS:
            step = asdict(Step(seconds, 2 * seconds, 3 << 30, 5 << 20, 1.5))
            (tmp_path / f"{count}" / f"{name}.json").write_text(json.dumps(step))
    table = rows(Plan(transactions=(1_000, 10_000), work=str(tmp_path)))
    assert table.rows[0] == ["1,000", "ledger", "1.0", "120 s", "3.0 GiB", "5 MiB"]
    assert table.rows[-2] == ["1,000 to 10,000", "time", "5.0x", "goal 11.0x", "", ""]
