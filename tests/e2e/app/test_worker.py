"""`escrowmq worker` as real processes: stops, kills, restarts, reload, health."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
from sqlalchemy import Engine

from tests.support.apps import topic_messages, unacknowledged_count, wait_all_acknowledged
from tests.support.brokers import Server
from tests.support.clients import numbered_bodies, send
from tests.support.ports import free_ports
from tests.support.scraping import scrape
from tests.support.sql_bank import delivered_bodies, new_topic, saved_ids
from tests.support.waiting import wait_until
from tests.support.worker_processes import WorkerCommand

pytestmark = pytest.mark.slow

BANK = "tests.support.bank_app:app"


def environment(server: Server, engine: Engine, topic: str, pause: Path) -> dict[str, str]:
    return {
        "SERVERS": server.namesrv_address,
        "DATABASE": engine.url.render_as_string(hide_password=False),
        "TOPIC": topic,
        "PAUSE": str(pause),
    }


def has_ended(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"


def pids_of(worker: WorkerCommand) -> list[int]:
    return [int(pid) for pid in re.findall(r"worker process started .*pid=(\d+)", worker.output)]


# --- one process ---------------------------------------------------------------------------------


async def test_a_worker_that_is_killed_in_the_middle_leaves_each_effect_once(
    server: Server, engine: Engine, tmp_path: Path
) -> None:
    topic, pause = new_topic("killed"), tmp_path / "pause"
    settings = environment(server, engine, topic, pause)
    names = numbered_bodies(30)
    pause.write_text("010")
    await send(server, topic, *names)
    with WorkerCommand(BANK, environment=settings) as worker:
        worker.wait_output("started 010")
        worker.wait_output("credited", times=5)
        worker.stop(signal.SIGKILL)
    pause.unlink()
    with WorkerCommand(BANK, environment=settings) as worker:
        worker.wait_for(lambda: len(saved_ids(engine)) == 30, "all transfers are saved")
        await wait_all_acknowledged(server, f"g-{topic}", topic)
        assert worker.stop() == 0, worker.output
    await server.assert_settled_async()
    assert saved_ids(engine) == [name.decode() for name in names]
    assert delivered_bodies(server, f"{topic}-receipts") == names


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_worker_that_is_stopped_finishes_what_runs_and_nothing_comes_twice(
    server: Server, sqlite: Engine, tmp_path: Path, number: signal.Signals
) -> None:
    topic, pause = new_topic("stopped"), tmp_path / "pause"
    settings = environment(server, sqlite, topic, pause)
    await send(server, topic, *numbered_bodies(20))
    pause.write_text("*")
    outputs = []
    with WorkerCommand(BANK, environment=settings) as worker:
        worker.wait_output("started")
        worker.process.send_signal(number)
        worker.wait_output("stopping: running handlers are finished")
        pause.unlink()
        assert worker.process.wait() == 0, worker.output
        outputs.append(worker.output)
    with WorkerCommand(BANK, environment=settings) as worker:
        worker.wait_for(lambda: len(saved_ids(sqlite)) == 20, "all transfers are saved")
        assert worker.stop() == 0, worker.output
        outputs.append(worker.output)
    first, second = (re.findall(r"started (\d+)", output) for output in outputs)
    assert 1 <= len(first) < 20
    assert set(first).isdisjoint(second)
    assert await unacknowledged_count(server, f"g-{topic}", topic) == 0


async def test_ctrl_c_a_second_time_ends_a_worker_at_once(
    server: Server, sqlite: Engine, tmp_path: Path
) -> None:
    topic, pause = new_topic("twice"), tmp_path / "pause"
    await send(server, topic, b"a")
    pause.write_text("*")
    with WorkerCommand(BANK, environment=environment(server, sqlite, topic, pause)) as worker:
        worker.wait_output("started a")
        worker.process.send_signal(signal.SIGINT)
        worker.wait_output("stopping: running handlers are finished")
        assert worker.stop(signal.SIGINT) == -signal.SIGINT
    assert saved_ids(sqlite) == []


async def test_a_handler_that_does_not_end_in_time_is_cut_off(
    server: Server, sqlite: Engine, tmp_path: Path
) -> None:
    topic, pause = new_topic("cut"), tmp_path / "pause"
    await send(server, topic, b"a")
    pause.write_text("*")
    settings = environment(server, sqlite, topic, pause)
    with WorkerCommand(BANK, "--shutdown-timeout-s", "0.1", environment=settings) as worker:
        worker.wait_output("started a")
        assert worker.stop() == 1
        assert "cut off 1 handlers" in worker.output
    assert saved_ids(sqlite) == []
    assert await unacknowledged_count(server, f"g-{topic}", topic) == 1


async def test_health_and_metrics_of_a_worker(
    server: Server, sqlite: Engine, tmp_path: Path
) -> None:
    topic = new_topic("metrics")
    settings = environment(server, sqlite, topic, tmp_path / "pause")
    with WorkerCommand(BANK, environment=settings) as worker:
        worker.wait_ready()
        await send(server, topic, b"a", b"b")
        worker.wait_output("credited", times=2)
        labels = {"group": f"g-{topic}", "handler": "credit", "topic": topic, "process": "0"}

        def handled() -> float:
            page = scrape(f"127.0.0.1:{worker.port}")
            return page.value("escrowmq_app_messages_total", outcome="done", **labels)

        worker.wait_for(lambda: handled() == 2, "two messages are counted")
        page = scrape(f"127.0.0.1:{worker.port}")
        assert page.value("escrowmq_app_handler_seconds_count", **labels) == 2
        assert page.value("escrowmq_app_waiting", **labels) == 0


def test_a_worker_is_not_ready_until_a_server_responds(
    server: Server, sqlite: Engine, tmp_path: Path
) -> None:
    (port,) = free_ports(1)
    settings = environment(server, sqlite, new_topic("alone"), tmp_path / "pause")
    settings["SERVERS"] = f"127.0.0.1:{port}"
    with WorkerCommand(BANK, environment=settings) as worker:
        worker.wait_output("no server responds")
        assert not worker.is_ready
        assert worker.stop() == 0, worker.output


# --- bad targets ---------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [[], ["--processes", "2"]])
@pytest.mark.parametrize(
    ("target", "sentence"),
    [
        ("bank", "'bank' does not name an App: write module:app"),
        ("nowhere.bank:app", "there is no module 'nowhere'"),
        ("tests.nowhere:app", "there is no module 'tests.nowhere'"),
        ("tests.support.ports:app", "module 'tests.support.ports' has no 'app'"),
        ("tests.support.ports:free_ports", "is no escrowmq.app.App, but function"),
    ],
)
def test_a_target_that_is_no_app_is_answered_with_a_sentence(
    target: str, sentence: str, options: list[str]
) -> None:
    with WorkerCommand(target, *options, environment={}) as worker:
        assert worker.process.wait() == 2
        worker.wait_for(lambda: sentence in worker.output, sentence)
        assert "Traceback" not in worker.output


# --- several processes ---------------------------------------------------------------------------


async def test_a_worker_process_that_dies_is_started_again(
    server: Server, sqlite: Engine, tmp_path: Path
) -> None:
    topic = new_topic("several")
    settings = environment(server, sqlite, topic, tmp_path / "pause")
    with WorkerCommand(BANK, "--processes", "2", environment=settings) as worker:
        worker.wait_ready()
        pids = pids_of(worker)
        os.kill(pids[0], signal.SIGKILL)
        worker.wait_output("worker died, restarting")
        worker.wait_for(lambda: len(pids_of(worker)) == 3, "it is started again")
        worker.wait_ready()
        await send(server, topic, *numbered_bodies(20))
        worker.wait_for(lambda: len(saved_ids(sqlite)) == 20, "all transfers are saved")
        await wait_all_acknowledged(server, f"g-{topic}", topic)
        page = scrape(f"127.0.0.1:{worker.port}")
        assert page.value("escrowmq_app_process_restarts_total", process="0") == 1
        assert page.value("escrowmq_app_process_restarts_total", process="1") == 0
        labels = [sample["process"] for sample in page.labels("escrowmq_app_waiting")]
        assert sorted(labels) == ["0", "1"]
        assert worker.stop() == 0, worker.output
        assert all(map(has_ended, pids_of(worker)))


def test_workers_end_when_their_supervisor_is_killed(
    server: Server, sqlite: Engine, tmp_path: Path
) -> None:
    settings = environment(server, sqlite, new_topic("orphan"), tmp_path / "pause")
    with WorkerCommand(BANK, "--processes", "2", environment=settings) as worker:
        worker.wait_ready()
        pids = pids_of(worker)
        worker.stop(signal.SIGKILL)
        wait_until(lambda: all(map(has_ended, pids)), "the workers have ended")


async def test_ctrl_c_a_second_time_kills_all_workers(
    server: Server, sqlite: Engine, tmp_path: Path
) -> None:
    topic, pause = new_topic("killall"), tmp_path / "pause"
    await send(server, topic, b"a")
    pause.write_text("*")
    settings = environment(server, sqlite, topic, pause)
    with WorkerCommand(BANK, "--processes", "2", environment=settings) as worker:
        worker.wait_output("started a")
        worker.process.send_signal(signal.SIGINT)
        worker.wait_output("stopping: running handlers are finished")
        assert worker.stop(signal.SIGINT) == 130
        assert all(map(has_ended, pids_of(worker)))


# --- reload --------------------------------------------------------------------------------------

RELOADED = """
import os
from escrowmq.app import App
app = App(os.environ["SERVERS"], group=os.environ["TOPIC"])
@app.on(os.environ["TOPIC"])
async def handle(body: bytes) -> None:
    print(f"VERSION got {body!r}", flush=True)
"""


async def test_a_change_of_the_source_starts_the_worker_again(
    server: Server, tmp_path: Path
) -> None:
    topic, source = new_topic("reload"), tmp_path / "reloaded.py"
    source.write_text(RELOADED.replace("VERSION", "first"))
    settings = {"SERVERS": server.namesrv_address, "TOPIC": topic}
    target = "reloaded:app"
    with WorkerCommand(target, "--reload", environment=settings, directory=tmp_path) as worker:
        await send(server, topic, b"1")
        worker.wait_output("first got b'1'")
        source.write_text("this is no Python\n")
        worker.wait_output("SyntaxError")
        worker.wait_output("waiting for a change of the source")
        await send(server, topic, b"2")
        source.write_text(RELOADED.replace("VERSION", "second"))
        worker.wait_output("second got b'2'")
        assert "b'2'" not in worker.output.partition("waiting for a change")[0]
        assert worker.stop(signal.SIGINT) == 0, worker.output
    assert [message.body for message in await topic_messages(server, topic)].count(b"2") == 1
