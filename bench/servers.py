"""The servers that are compared, each as processes on loopback, and the switch between them.

All of them run during a measurement, but only one is active: the others are stopped with SIGSTOP.
Switching is cheap that way, and a server that spins when idle does not disturb the others.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final, Protocol

from bench.generator import Load, Outcome, built, run
from escrowmq.server.supervisor import PORT_STEP
from tests.interop.apache import ApacheRocketMQ, ChildProcess
from tests.interop.jars import VERSIONS, unavailable_reason
from tests.interop.remoting import Client, ResponseError
from tests.support.ports import free_ports

OURS: Final = "EscrowMQ"
ECHO: Final = "echo"
APACHE: Final = {version: f"Apache {version}" for version in sorted(VERSIONS)}
HEAP: Final = "2g"
JVM: Final = ("-XX:+UseG1GC",)  # with the default compilers
FIRST_SEND_S: Final = 90
STOP_S: Final = 600  # a slow disk needs time to flush ten thousand queue files


class Server(Protocol):
    """A server on 127.0.0.1. Its list of pids begins with that of the main process.

    It has a port for each of its brokers; `port` is the first.
    """

    @property
    def name(self) -> str: ...
    @property
    def port(self) -> int: ...
    @property
    def ports(self) -> list[int]: ...
    @property
    def pids(self) -> list[int]: ...
    @property
    def data(self) -> Path: ...
    def start(self) -> None: ...
    def stop(self) -> None: ...
    def stop_broker(self) -> None: ...


class EscrowMQ:
    """`escrowmq serve` with its default settings.

    Name server and broker are one process; several brokers are one process each.
    """

    def __init__(
        self, directory: Path, settings: Mapping[str, object], *, brokers: int = 1
    ) -> None:
        self.name = OURS if brokers == 1 else f"{OURS} --brokers {brokers}"
        self.directory = directory
        self.data = directory / "store"
        self.ports = _ports_in_steps(brokers)
        (self._namesrv_port,) = free_ports(1)
        self._settings = dict(settings)
        self._process: ChildProcess | None = None

    @property
    def port(self) -> int:
        return self.ports[0]

    @property
    def pids(self) -> list[int]:
        return [self._process.pid] if self._process is not None else []

    @property
    def namesrv_address(self) -> str:
        return f"127.0.0.1:{self._namesrv_port}"

    def start(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        lines = [f"{name}={value}\n" for name, value in self._settings.items()]
        (self.directory / "broker.conf").write_text("".join(lines))
        set_outside = [name for name in os.environ if name.startswith("ESCROWMQ_")]
        command = [
            *("env", *(f"--unset={name}" for name in set_outside)),
            str(Path(sys.executable).with_name("escrowmq")),
            *("serve", "-c", "broker.conf", "--data", str(self.data)),
            *("--port", str(self.port), "--namesrv-port", str(self._namesrv_port)),
            *(("--brokers", str(len(self.ports))) if len(self.ports) > 1 else ()),
        ]
        self._process = ChildProcess(command, name=self.name, output=self.directory / "serve.out")
        self._process.wait_until_ready(lambda: all(map(_answers, self.ports)))

    def stop(self) -> None:
        if self._process is not None:
            process, self._process = self._process, None
            process.stop(STOP_S)

    def kill(self) -> None:
        """Kill it with SIGKILL."""
        if self._process is not None:
            process, self._process = self._process, None
            process.kill()

    stop_broker = stop


class Apache(ApacheRocketMQ):
    """Apache RocketMQ with a JVM as for production, but for the size of its heap."""

    def __init__(self, version: str, directory: Path, settings: Mapping[str, object]) -> None:
        super().__init__(version, directory, settings, heap=HEAP, jvm=JVM)
        self.name = APACHE[version]
        self.data = self.store

    @property
    def ports(self) -> list[int]:
        return [self.port]

    def stop(self) -> None:
        self.kill()  # a clean stop would take many seconds, and the files are removed anyway
        super().stop()


class Echo:
    """The server that only echoes what it receives."""

    name = ECHO

    def __init__(self, directory: Path) -> None:
        self.data = directory
        self.port = 0
        self._process: subprocess.Popen[str] | None = None

    @property
    def ports(self) -> list[int]:
        return [self.port]

    @property
    def pids(self) -> list[int]:
        return [self._process.pid] if self._process is not None else []

    def start(self) -> None:
        self._process = subprocess.Popen([built("echo")], stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())

    def stop(self) -> None:
        if self._process is not None:
            process, self._process = self._process, None
            process.kill()
            process.communicate()

    stop_broker = stop


class Arena:
    """Running servers, of which at most one is active."""

    def __init__(self, servers: Sequence[Server]) -> None:
        self.servers = list(servers)
        self.others_cores: list[float] = []  # what other processes did during the measurement

    def __enter__(self) -> Arena:
        try:
            for server in self.servers:
                server.start()
                _signal(server, signal.SIGSTOP)
        except BaseException:
            self._stop_all()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop_all()

    def _stop_all(self) -> None:
        with contextlib.ExitStack() as stack:  # stop each, even if another one does not stop
            for server in self.servers:
                stack.callback(server.stop)
                stack.callback(_signal, server, signal.SIGCONT)

    @contextlib.contextmanager
    def turn(self, server: Server) -> Iterator[Server]:
        _signal(server, signal.SIGCONT)
        try:
            yield server
        finally:
            _signal(server, signal.SIGSTOP)

    def put(self, load: Load, server: Server) -> Outcome:
        with self.turn(server):
            outcome = run(load, server.ports, family(server.pids))
        self.others_cores.append(outcome.others_cores)
        # Flush now: what this one wrote must not reach the disk during the next measurement.
        os.sync()
        return outcome


def kinds(*, alone: bool = False) -> list[Callable[[Path, Mapping[str, object]], Server]]:
    """Return our server, and both Apache releases unless they are left out or cannot run here.

    Each is created from its directory and its settings.
    """
    results: list[Callable[[Path, Mapping[str, object]], Server]] = [EscrowMQ]
    if not alone and unavailable_reason() is None:
        results += [partial(Apache, version) for version in APACHE]
    return results


def brokers(
    directory: Path, settings: Mapping[str, object] | None = None, *, alone: bool = False
) -> list[Server]:
    """Start one server of each kind."""
    makers = enumerate(kinds(alone=alone))
    return [make(directory / f"broker-{number}", settings or {}) for number, make in makers]


def client(server: Server, *, timeout_s: float = 30.0) -> Client:
    return Client(f"127.0.0.1:{server.port}", timeout_s=timeout_s)


@contextlib.contextmanager
def clients(server: Server) -> Iterator[list[Client]]:
    """Return one client per broker."""
    with contextlib.ExitStack() as stack:
        each = (Client(f"127.0.0.1:{port}", timeout_s=30.0) for port in server.ports)
        yield [stack.enter_context(one) for one in each]


def lay_topics(data: Path, names: Sequence[str], *, queues: int) -> None:
    """Create topics before the start, because thousands of requests would take Apache minutes."""
    table = {
        name: {
            "topicName": name,
            "order": False,
            "perm": 6,
            "readQueueNums": queues,
            "writeQueueNums": queues,
            "topicFilterType": "SINGLE_TAG",
            "topicSysFlag": 0,
        }
        for name in names
    }
    version = {"counter": 1, "timestamp": 1_700_000_000_000, "stateVersion": 0}
    file = data / "config" / "topics.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"dataVersion": version, "topicConfigTable": table}))


def first_send_s(server: Server) -> float:
    """Restart the broker, and return the time until it accepted a message.

    Apache's name server keeps running: only the start of the broker counts.
    """
    server.stop_broker()
    starting = threading.Thread(target=server.start)
    began = time.perf_counter()
    starting.start()
    try:
        while time.perf_counter() - began < FIRST_SEND_S:
            with contextlib.suppress(OSError, ResponseError), client(server, timeout_s=5) as sender:
                sender.send("bench-start", b"first")
                return time.perf_counter() - began
            time.sleep(0.005)
        raise TimeoutError(f"{server.name} took no message in {FIRST_SEND_S} s after its start")
    finally:
        starting.join()


def memory_bytes(pid: int, field: str = "VmRSS") -> int:
    """Return resident memory; `RssAnon` is the part without mapped files."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"this system does not tell {field}")


def cpu_s(pid: int) -> float:
    """Return the processor time that a process has used."""
    # Behind the name, which may contain anything, the fields 12 and 13 are user and system time.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def family(pids: Sequence[int]) -> list[int]:
    """Return these processes and their children."""
    results = list(pids)
    for pid in results:  # grows during the loop
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            results += [int(word) for word in children.read_text().split()]
    return results


def _ports_in_steps(count: int) -> list[int]:
    """Return free ports in the distances that `--brokers` uses."""
    while True:
        (first,) = free_ports(1)
        ports = [first + PORT_STEP * number for number in range(count)]
        with contextlib.suppress(OSError):
            for port in ports:
                with socket.create_server(("127.0.0.1", port)):
                    pass
            return ports


def _signal(server: Server, number: signal.Signals) -> None:
    for pid in family(server.pids):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _answers(port: int) -> bool:
    with contextlib.suppress(OSError), Client(f"127.0.0.1:{port}", timeout_s=5) as asker:
        asker.request(43)  # any response will do
        return True
    return False
