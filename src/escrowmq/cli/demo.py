"""Write a log, kill the writer, tear the log's end, and see that nothing promised is lost.

    make demo        or        python -m escrowmq.cli.demo

A child process appends messages and says how many are flushed; that is its promise. It is killed
with SIGKILL at a moment nobody chose. Then the end of the log is torn on purpose, as a power cut
would tear it. The store is opened again, and every promised message must be there exactly once.
All numbers are those of this run.
"""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Final

import click
from rich.console import Console
from rich.table import Table

from escrowmq.cli.output import PlainConsole
from escrowmq.cli.record import utc
from escrowmq.cli.store import print_report
from escrowmq.clock import SystemClock
from escrowmq.errors import EscrowError, StoreDamaged
from escrowmq.message.ids import encode_host
from escrowmq.message.offsets import LogOffset
from escrowmq.message.properties import decode_properties, encode_properties
from escrowmq.message.record import NewRecord, decode_record
from escrowmq.store.check import check_store
from escrowmq.store.disk import RealDisk
from escrowmq.store.logfiles import BadPlace, LogFiles
from escrowmq.store.settings import StoreSettings
from escrowmq.store.store import MessageStore

TOPIC: Final = "orders"
QUEUES: Final = 4
BATCH: Final = 25
BATCHES_PER_CHECKPOINT: Final = 20
HOST: Final = encode_host("127.0.0.1", 10911)
SETTINGS: Final = StoreSettings(
    segment_bytes=1 << 20, queue_file_bytes=20_000, index_slots=1_000, index_entries=200_000
)


@click.command(help=__doc__.partition("\n")[0] if __doc__ else None)
@click.option("--write", "directory", hidden=True, help="Be the child that writes here.")
@click.option("--seed", type=int, help="Choose the moments as in an earlier run.")
def main(directory: str | None, seed: int | None) -> None:
    if directory is not None:
        write_until_killed(directory)
        return
    seed = random.randrange(1 << 32) if seed is None else seed
    console = PlainConsole()
    try:
        with tempfile.TemporaryDirectory(prefix="escrowmq-demo-") as temporary:
            run(console, Path(temporary) / "store", random.Random(seed))
    except EscrowError as error:
        click.echo(f"escrowmq: {error} (--seed {seed})", err=True)
        sys.exit(1)


# --- the child -------------------------------------------------------------------------------


def message(number: int) -> NewRecord:
    properties = {
        "TAGS": ("paid", "shipped", "refunded")[number % 3],
        "UNIQ_KEY": f"{number:032X}",
        "KEYS": f"order-{number}",
    }
    return NewRecord(
        topic=TOPIC,
        queue_id=number % QUEUES,
        body=b"order %d " % number * (1 + number % 20),
        properties=encode_properties(properties),
        born_host=HOST,
    )


def write_until_killed(directory: str) -> None:
    """Every line on standard output is a promise: so many messages, up to this log offset."""
    clock = SystemClock()
    store = MessageStore.open(RealDisk(directory), SETTINGS, store_host=HOST)
    number = 0
    while True:
        for _ in range(BATCHES_PER_CHECKPOINT):
            batch = [message(n) for n in range(number, number + BATCH)]
            store.append(batch, now_ms=clock.now_ms())
            number += BATCH
            click.echo(f"{number} {store.flush()}")
        store.checkpoint()


# --- the parent ------------------------------------------------------------------------------


def run(console: Console, directory: Path, rng: random.Random) -> None:
    console.rule("1. write, and be killed")
    promised, flushed = write_and_kill(directory, lives_s=rng.uniform(0.5, 1.5))
    console.print(f"killed with SIGKILL; {promised} messages were flushed, up to {flushed}")

    console.rule("2. tear the end of the log")
    console.print(tear(directory, flushed, rng))

    console.rule("3. check: what does it look like?")
    report = check_store(RealDisk(directory), SETTINGS)
    print_report(console, report)
    expect(report.is_clean, "a torn end is not damage")
    expect(not report.stopped_cleanly, "the stop was not a clean one")

    console.rule("4. open: recovery")
    store = MessageStore.open(RealDisk(directory), SETTINGS, store_host=HOST)
    try:
        show_recovery(console, store)
        verify(console, store, promised)
        console.rule("5. read")
        read_slice(console, store, promised, rng)
    finally:
        store.close()

    console.rule("6. check again")
    report = check_store(RealDisk(directory), SETTINGS)
    print_report(console, report)
    expect(report.is_clean and not report.findings, "nothing is left to say")
    console.print("[bold green]nothing promised was lost[/]")


def write_and_kill(directory: Path, *, lives_s: float) -> tuple[int, int]:
    """How many messages the child promised, and up to where, before it died."""
    clock = SystemClock()
    command = [sys.executable, "-m", "escrowmq.cli.demo", "--write", str(directory)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    lines = []
    try:
        lines.append(child.stdout.readline())
        dies_s = clock.elapsed_s() + lives_s  # counted from its first promise
        while lines[-1] and clock.elapsed_s() < dies_s:
            lines.append(child.stdout.readline())
        expect(child.poll() is None, "the child lives until it is killed")
    finally:
        child.kill()
        lines += child.stdout  # what it said before it died counts too
        child.stdout.close()
        child.wait()
    promises = [line for line in lines if line.endswith("\n")]  # the last may be cut off
    expect(bool(promises), "the child made a promise")
    count, flushed = promises[-1].split()
    return int(count), int(flushed)


def tear(directory: Path, flushed: int, rng: random.Random) -> str:
    """Damage only what was not promised: a record behind the flushed ones, or the free space."""
    log = LogFiles(RealDisk(directory))
    behind = [
        met.log_offset
        for met in log.walk()
        if not isinstance(met, BadPlace) and met.log_offset >= flushed
    ]
    torn = message(0).body * 3
    if behind:
        at = rng.choice(behind) + 100
        what = f"one of {len(behind)} records that were written but not flushed gets a wrong byte"
    else:
        at = log.end
        what = f"{len(torn)} bytes of a record that was never finished"
    path, position = log.place(at)
    log.close()
    with (directory / path).open("r+b") as file:
        file.seek(position)
        before = file.read(1)
        room = log.segment_bytes - position
        file.seek(position)
        file.write(bytes([before[0] ^ 0x40]) if behind else torn[:room])
    return f"log offset {at}: {what}"


def show_recovery(console: Console, store: MessageStore) -> None:
    found = store.recovery
    cut = f"cut at {found.end} ({found.torn})" if found.torn else f"ends in order at {found.end}"
    console.print(
        f"walked from {found.walked_from}: {found.records} records; the log {cut}; "
        f"{len(found.damaged)} damaged places"
    )
    expect(not found.damaged, "nothing durable is damaged")


def verify(console: Console, store: MessageStore, promised: int) -> None:
    counts: Counter[bytes] = Counter()
    for record in store.records(store.begin):
        counts[record.properties] += 1
        number = int(bytes(record.body).split()[1])
        expect(bytes(record.body) == message(number).body, f"message {number} is as it was sent")
    for number in range(promised):
        seen = counts[message(number).properties]
        expect(seen == 1, f"message {number} was promised, and is there {seen} times")
    console.print(
        f"{promised} of {promised} promised messages are there, each once; "
        f"{counts.total() - promised} more had been written and survived"
    )


def read_slice(console: Console, store: MessageStore, promised: int, rng: random.Random) -> None:
    number = rng.randrange(promised)
    begin = number // QUEUES
    read = store.read(TOPIC, number % QUEUES, begin, count_max=5)
    table = Table(title=f"{TOPIC}, queue {number % QUEUES}, from {begin}")
    for column in ("queue offset", "log offset", "stored", "tags", "key", "bytes"):
        table.add_column(column)
    for piece in read.slices:
        at = 0
        while at < len(piece):
            log_offset = LogOffset(int.from_bytes(piece[at + 28 : at + 36], "big"))
            record = decode_record(piece, at, log_offset)
            at += record.size
            properties = decode_properties(record.properties)
            stored = utc(record.stored_ms)[11:]
            places = str(record.queue_offset), str(record.log_offset)
            table.add_row(*places, stored, properties["TAGS"], properties["KEYS"], str(record.size))
    console.print(table)
    found = store.find_by_key(TOPIC, f"order-{number}")
    expect(len(found) == 1, f"the key order-{number} leads to one message")
    expect(found[0].queue_offset == begin, "it is the one that the queue shows")
    console.print(f"key order-{number}: found at log offset {found[0].log_offset}")


def expect(holds: bool, what: str) -> None:
    if not holds:
        raise StoreDamaged(f"this does not hold: {what}")


if __name__ == "__main__":
    main()
