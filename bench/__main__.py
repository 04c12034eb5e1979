"""Run benchmarks: `python -m bench [--quick] [part ...]`; without parts, those of the store."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace

from bench import (
    access,
    broker,
    broker_growth,
    broker_tx,
    brokers,
    checks,
    clients,
    escrow,
    greedy,
    handlers,
    neighbours,
    outbox,
    scale,
    spark_write,
    stalls,
    store_open,
    store_read,
    store_write,
    visible,
)
from bench.broker import ResultTable
from bench.generator import NoCompiler, built
from bench.measure import QUICK, Plan, keep, keep_table, machine
from bench.servers import HEAP, JVM
from tests.interop.jars import java_release, unavailable_reason


def _spark_read(plan: Plan) -> ResultTable:
    from bench import spark_read  # Spark is an extra

    return spark_read.rows(plan)


def _pipeline(plan: Plan) -> ResultTable:
    from bench import pipeline  # Spark is an extra

    return pipeline.rows(plan)


def _spark_kafka(plan: Plan) -> ResultTable:
    from bench import spark_kafka

    return spark_kafka.rows(plan)


STORE = {"write": store_write.rows, "read": store_read.rows, "open": store_open.rows}
BROKER: dict[str, tuple[str, Callable[[Plan], ResultTable]]] = {
    "broker": ("The broker", broker.rows),
    "broker-sync": ("The broker: answered when flushed", broker.sync_rows),
    "broker-growth": ("The broker: many topics, a long log", broker_growth.rows),
    "broker-tx": ("The broker: transactions", broker_tx.rows),
    "brokers": ("Several brokers on one machine", brokers.rows),
    "access": ("The broker: signatures and TLS", access.rows),
    "spark-write": ("Spark: the sink", spark_write.rows),
    "visible": ("The escrow: from commit to consumer", visible.rows),
    "checks": ("The escrow: lateness of checks", checks.rows),
    "escrow": ("The escrow: very many open transactions", escrow.rows),
    "spark-read": ("Reading into Spark", _spark_read),
}
BINDING: dict[str, tuple[str, Callable[[Plan], ResultTable]]] = {
    "outbox": ("The database binding beside an outbox table", outbox.rows),
    "clients": ("The client beside those from PyPI", clients.rows),
    "handlers": ("Handlers of an App beside FastStream", handlers.rows),
}
ALONE: dict[str, tuple[str, Callable[[Plan], ResultTable]]] = {
    "scale": ("The broker: many topics, connections, groups", scale.rows),
    "pipeline": ("Pipelines: ledger and reconcile", _pipeline),
    "spark-kafka": ("Spark: our source and sink beside Kafka's", _spark_kafka),
    "stalls": ("The broker: the longest stall that one request causes", stalls.rows),
    "neighbours": ("The broker: latency of others while one client misbehaves", neighbours.rows),
    "greedy": ("The broker: an honest client beside greedy ones", greedy.rows),
}
NEEDS_NO_LOAD = ("spark-read",)
GIB_A_SECOND = 2.0  # per round: what three brokers write in one second of every load
QUICK_NOTE = "One short round, a JVM that is not warm: these figures show that it runs, no more."
STORE_NOTES = [
    "Variants take turns; a figure is the median of its rounds. Compare ratios: absolute rates "
    "change with whatever else the machine does.",
    "Raw pwrite writes the same number of bytes to a fresh sparse file and does nothing else.",
]


def main() -> int:
    given = arguments().parse_args()
    plan = plan_from(given)
    parts: list[str] = given.parts or list(STORE)
    if any(part in BROKER and part not in NEEDS_NO_LOAD for part in parts):
        try:
            built("load")
        except NoCompiler as error:
            print(error, file=sys.stderr)
            return 2
        if why := lack_of_space(plan):
            print(why, file=sys.stderr)
            return 2
    if {"outbox", "handlers"} & set(parts) and (why := outbox.lack()):
        print(why, file=sys.stderr)
        return 2
    for part in parts:
        run = run_store if part in STORE else run_broker if part in BROKER else run_alone
        run(part, plan)
    return 0


def run_store(part: str, plan: Plan) -> None:
    conditions = f"{machine()}, {plan.rounds} rounds"
    rows = STORE[part](quick=plan.quick, rounds=plan.rounds)
    keep(kept_as(f"store-{part}", plan), f"The store: {part}", rows, STORE_NOTES, conditions)


def run_broker(part: str, plan: Plan) -> None:
    title, measure = BROKER[part]
    rounds = "1 round" if plan.rounds == 1 else f"{plan.rounds} rounds"
    conditions = f"{machine()}, {beside(plan)}, {rounds} of {plan.seconds:g} s"
    table = measure(plan)
    notes = [*([QUICK_NOTE] if plan.quick else []), *table.notes]
    keep_table(kept_as(part, plan), title, table.columns, table.rows, notes, conditions)


def run_alone(part: str, plan: Plan) -> None:
    """Return whether Apache RocketMQ is left out."""
    title, measure = (BINDING | ALONE)[part]
    rounds = "1 round" if plan.rounds == 1 else f"{plan.rounds} rounds"
    conditions = f"{machine()}, {rounds} of {plan.seconds:g} s"
    table = measure(plan)
    notes = [*([QUICK_NOTE] if plan.quick else []), *table.notes]
    keep_table(kept_as(part, plan), title, table.columns, table.rows, notes, conditions)


def lack_of_space(plan: Plan) -> str:
    """Return why the measurements would not fit on the disk, or an empty text."""
    needed_gib = plan.rounds * plan.seconds * GIB_A_SECOND
    place = os.environ.get("ESCROWMQ_BENCH_DIR") or tempfile.gettempdir()
    free_gib = shutil.disk_usage(place).free / (1 << 30)
    if free_gib >= needed_gib:
        return ""
    return f"{place} has {free_gib:.0f} GiB free, the load may write {needed_gib:.0f} GiB"


def kept_as(name: str, plan: Plan) -> str:
    return name + ("-alone" if plan.alone else "") + ("-quick" if plan.quick else "")


def beside(plan: Plan) -> str:
    reason = "as was wished" if plan.alone else unavailable_reason()
    if reason:
        return f"without Apache RocketMQ: {reason}"
    return f"Apache RocketMQ on Java {java_release('java')} with {' '.join(JVM)}, heap {HEAP}"


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description="Take the figures.")
    parts = [*STORE, *BROKER, *BINDING, *ALONE]
    parser.add_argument(
        "parts", nargs="*", metavar="part", type=_one_of(parts), help=", ".join(parts)
    )
    parser.add_argument("--quick", action="store_true", help="one short round, to see that it runs")
    parser.add_argument("--alone", action="store_true", help="no Apache RocketMQ beside the broker")
    parser.add_argument("--rounds", type=int, help=f"of each figure [{Plan.rounds}]")
    parser.add_argument("--seconds", type=float, help=f"of each measurement [{Plan.seconds:g}]")
    parser.add_argument("--topics", type=int, help=f"broker-growth: how many [{Plan.topics}]")
    parser.add_argument("--log-gib", type=float, help=f"broker-growth: the log [{Plan.log_gib:g}]")
    parser.add_argument("--halves", type=int, help=f"escrow: how many [{Plan.halves}]")
    parser.add_argument(
        "--transactions", type=int, nargs="+", help=f"pipeline: how many [{Plan.transactions}]"
    )
    parser.add_argument("--work", help="pipeline: keep input and finished steps there, and go on")
    return parser


def plan_from(given: argparse.Namespace) -> Plan:
    wished = {
        name: getattr(given, name)
        for name in ("rounds", "seconds", "topics", "log_gib", "halves", "transactions", "work")
        if getattr(given, name) is not None
    }
    return replace(QUICK if given.quick else Plan(), alone=given.alone, **wished)


def _one_of(parts: list[str]) -> Callable[[str], str]:
    def part(word: str) -> str:
        if word not in parts:
            raise argparse.ArgumentTypeError(f"no such figures: {word}")
        return word

    return part


if __name__ == "__main__":
    sys.exit(main())
