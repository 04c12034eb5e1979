"""Ledger and reconcile as commands, with one size and with ten times as much.

Each step is the command itself in its own process, on two cores and with Spark's default settings:
`escrowmq pipeline ledger` over a broker's files, `escrowmq pipeline reconcile` with the books of
two banks. The differences that it reports must be those that were planted.

Finished steps are kept in the directory given by --work, so a long run can be split into several.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import msgspec

from bench.broker import ResultTable
from bench.cpu_time import Meter, family_of
from bench.measure import Plan
from bench.pipeline_input import BOOKS, expected, make_input
from bench.samples import directory

COLUMNS = ("transactions", "step", "minutes", "processor time", "peak memory", "on disk")
LOOK_S = 2.0
LOOK_MAX_S = 10.0  # longer gaps were pauses
STEPS = ("input", "ledger", "reconcile")
GOAL = 11.0


@dataclass(frozen=True, slots=True)
class Step:
    """The cost of one step. `load` is the load average of the machine at its end."""

    seconds: float
    cpu_s: float
    peak_bytes: int
    disk_bytes: int
    load: float


def rows(plan: Plan) -> ResultTable:
    with ExitStack() as stack:
        work = Path(plan.work) if plan.work else stack.enter_context(directory())
        done = {
            count: {name: step(work / f"{count}", name, count) for name in STEPS}
            for count in plan.transactions
        }
    cells = [
        [f"{count:,}", name, *_words(step)]
        for count, steps in done.items()
        for name, step in steps.items()
        if name != "input"
    ]
    small, large = min(done), max(done)
    totals = {count: _total(steps) for count, steps in done.items()}
    cells += [
        [f"{count:,}", "both", f"{total / 60:.1f}", "", "", ""] for count, total in totals.items()
    ]
    for name in ("seconds", "cpu_s"):
        ratio = _total(done[large], name) / _total(done[small], name)
        what = "time" if name == "seconds" else "processor time"
        goal = f"goal {large / small * GOAL / 10:.1f}x" if name == "seconds" else ""
        words = [f"{small:,} to {large:,}", what, f"{ratio:.1f}x", goal, "", ""]
        cells.append(words)
    return ResultTable(list(cells), _notes(done), COLUMNS)


def step(work: Path, name: str, count: int) -> Step:
    """Run a step once; later return its stored cost."""
    stored = work / f"{name}.json"
    if not stored.exists():
        work.mkdir(parents=True, exist_ok=True)
        cost = {"input": _input, "ledger": _ledger, "reconcile": _reconcile}[name](work, count)
        stored.write_text(json.dumps(asdict(cost)))
    return msgspec.json.decode(stored.read_bytes(), type=Step)


def _input(work: Path, count: int) -> Step:
    for left in ("data", "bob.db", "smith.db"):
        path = work / left
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    began, spent = time.monotonic(), time.process_time()
    end = make_input(work, count)
    return Step(time.monotonic() - began, time.process_time() - spent, 0, end, os.getloadavg()[0])


def _ledger(work: Path, count: int) -> Step:
    out = work / "ledger"
    shutil.rmtree(out, ignore_errors=True)
    words = ["ledger", "--path", str(work / "data"), "--out", str(out), "--json"]
    cost, code, output = _run([*words, "--master", "local[2]"], work)
    assert code == 0, output
    summary = json.loads(output.splitlines()[-1])
    assert summary["rows"] == count, summary
    return replace(cost, disk_bytes=_bytes_below(out))


def _reconcile(work: Path, count: int) -> Step:
    words = ["reconcile", "--ledger", str(work / "ledger"), "--since", "all", "--amount"]
    words += ["--database", f"sqlite:///{work / 'bob.db'}", "--sql", BOOKS]
    words += ["--receiver", f"sqlite:///{work / 'smith.db'}", "--receiver-sql", BOOKS]
    out = work / "differences"
    cost, code, output = _run([*words, "--json", "--out", str(out), "--master", "local[2]"], work)
    assert code == 1, output
    summary = json.loads(output.splitlines()[-1])
    assert summary["transactions"] == count, summary
    differences = {kind: number for kind, number in summary["differences"].items() if number}
    assert differences == expected(count), (differences, expected(count))
    return replace(cost, disk_bytes=_bytes_below(out))


def _run(words: list[str], work: Path) -> tuple[Step, int, str]:
    """Run a command; return its cost, exit code and output.

    Time in which this process and the command were stopped together is not counted.
    """
    command = [sys.executable, "-m", "escrowmq.cli.main", "pipeline", *words]
    # Otherwise Spark would take a pause for the death of its worker.
    command += ["--conf", "spark.network.timeout=36000s"]
    environment = {**os.environ, "SPARK_LOCAL_DIRS": str(work / "spark")}
    with (work / "said").open("w") as output, (work / "errors").open("w") as errors:
        process = subprocess.Popen(command, stdout=output, stderr=errors, env=environment)
        meter = Meter(process.pid)
        before, seconds, spent, peak = time.monotonic(), 0.0, 0.0, 0
        try:
            while process.poll() is None:
                spent = max(spent, meter.spent_s())
                peak = max(peak, sum(map(_memory_bytes, family_of(process.pid))))
                time.sleep(LOOK_S)
                now = time.monotonic()
                seconds += min(now - before, LOOK_MAX_S)
                before = now
        finally:
            process.kill()
    cost = Step(seconds, spent, peak, 0, os.getloadavg()[0])
    text = (work / "said").read_text()
    if process.returncode not in (0, 1):
        text += (work / "errors").read_text()
    return cost, process.returncode, text


def _memory_bytes(pid: int) -> int:
    """Return the proportional set size: shared pages count once in total."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0  # the process has ended
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:")), 0)


def _bytes_below(path: Path) -> int:
    return sum(step.stat().st_size for step in path.rglob("*") if step.is_file())


def _total(steps: dict[str, Step], name: str = "seconds") -> float:
    return float(getattr(steps["ledger"], name) + getattr(steps["reconcile"], name))


def _words(step: Step) -> list[str]:
    return [
        f"{step.seconds / 60:.1f}",
        f"{step.cpu_s:,.0f} s",
        f"{step.peak_bytes / (1 << 30):.1f} GiB",
        f"{step.disk_bytes / (1 << 20):,.0f} MiB",
    ]


def _notes(done: dict[int, dict[str, Step]]) -> list[str]:
    input_step = done[max(done)]["input"]
    loads = [
        step.load for steps in done.values() for name, step in steps.items() if name != "input"
    ]
    return [
        "Each step is the command in its own process, `--master local[2]`, with the start of "
        "Spark and Spark's own heap (1 GiB). Ledger: `--path`, from a broker's log files. "
        "Reconcile: markers, inbox and amounts of two SQLite files over SQLAlchemy.",
        f"The log of {max(done):,} transactions has {input_step.disk_bytes / (1 << 30):.1f} GiB. "
        "Of a thousand, 74 were rolled back, 30 were checked and 7 differ; exactly the planted "
        "differences were reported.",
        "Peak memory: driver, JVM and Python workers together (Pss, sampled every two seconds).",
        f"Load of the machine at the end of steps: {min(loads):.1f} to {max(loads):.1f}. Above 2 "
        "the minutes are others' too; processor time is the steadier figure.",
    ]
