"""Apache RocketMQ on loopback, started and stopped at will.

    with ApacheRocketMQ("5.5.0", tmp_path) as rocketmq, Client(rocketmq.address) as client:
        client.send("orders", b"hello")

The store lies at `<directory>/store`, so a test can lay one there before the start and look
at it after the stop. Nothing outlives the test: every Java process is on a leash that kills it
when we go, however we go.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from tests.interop.jars import fetch, java_release
from tests.interop.remoting import Client, ResponseError, java_text
from tests.support.ports import free_port_block

START_S = 90  # a cold JVM on a busy two-core machine takes a third of this
STOP_S = 60
# A broker also listens on its port - 2 (its second port) and + 1 (replication).
PORT_OFFSETS = (0, 2, 4, 5)  # name server, second port, broker, replication
PORT_ATTEMPTS = 3

_OPENED = [
    "--add-exports=java.base/jdk.internal.ref=ALL-UNNAMED",
    "--add-opens=java.base/java.nio=ALL-UNNAMED",
    "--add-opens=java.base/sun.nio.ch=ALL-UNNAMED",
    "--add-opens=java.base/java.lang=ALL-UNNAMED",
]
QUICK = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")  # short runs: start-up is what counts
_LOGBACK = """<configuration>
  <appender name="out" class="ch.qos.logback.core.ConsoleAppender">
    <encoder><pattern>%d %p %logger - %m%n</pattern></encoder>
  </appender>
  <root level="WARN"><appender-ref ref="out"/></root>
</configuration>
"""
_DISK_MAY_BE_FULL = [  # a test machine with a full disk should not change what is tested
    "-Drocketmq.broker.diskSpaceWarningLevelRatio=0.99",
    "-Drocketmq.broker.diskSpaceCleanForciblyRatio=0.98",
]


class ProcessFailed(Exception):
    """A process did not start or stop as it should; the text holds the end of its log."""


class ApacheRocketMQ:
    """A name server and one broker."""

    def __init__(
        self,
        version: str,
        directory: Path,
        settings: Mapping[str, object] | None = None,
        *,
        heap: str = "512m",
        jvm: Sequence[str] = QUICK,
    ) -> None:
        self.version = version
        self.directory = directory.resolve()
        self.store = self.directory / "store"
        self.settings = dict(settings or {})
        self.broker_name = "broker-a"
        self.port = self.namesrv_port = 0  # chosen at the first start, kept from then on
        self._heap = heap
        self._jvm = tuple(jvm)
        self._jars: Path | None = None
        self._namesrv: ChildProcess | None = None
        self._broker: ChildProcess | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def namesrv_address(self) -> str:
        return f"127.0.0.1:{self.namesrv_port}"

    @property
    def pids(self) -> list[int]:
        """The processes that run: the broker's first."""
        return [part.pid for part in (self._broker, self._namesrv) if part is not None]

    def __enter__(self) -> ApacheRocketMQ:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Name server and broker, or the broker alone if only that is down."""
        self._jars = fetch(self.version)
        for attempt in range(PORT_ATTEMPTS):
            try:
                if self._namesrv is None:
                    if self.port == 0 or attempt > 0:
                        self.namesrv_port, self.port = free_server_ports()
                    self._write_configuration()
                    self._namesrv = self._start_namesrv()
                if self._broker is None:
                    self._broker = self._start_broker()
                return
            except ProcessFailed as error:
                self.stop()
                taken = "already in use" in str(error) or "BindException" in str(error)
                if not taken or attempt == PORT_ATTEMPTS - 1:
                    raise

    def stop(self) -> None:
        """Both. The broker flushes its store and takes `abort` away."""
        try:
            self.stop_broker()
        finally:
            if self._namesrv is not None:
                self._namesrv.kill()  # it keeps nothing, and would take seconds to say goodbye
                self._namesrv = None

    def stop_broker(self) -> None:
        if self._broker is not None:
            broker, self._broker = self._broker, None
            broker.stop()

    def kill(self) -> None:
        """The broker alone, as kill -9 does it."""
        if self._broker is not None:
            self._broker.kill()
            self._broker = None

    def restart(self) -> None:
        """The broker again, on the same store and port; cleanly stopped first if it runs."""
        self.stop_broker()
        self.start()

    def _write_configuration(self) -> None:
        (self.directory / "conf").mkdir(parents=True, exist_ok=True)
        for log in ("namesrv", "broker", "tools"):  # 4.x does not start without them
            (self.directory / "conf" / f"logback_{log}.xml").write_text(_LOGBACK)
        (self.directory / "namesrv.conf").write_text(
            properties_text({"listenPort": self.namesrv_port, "bindAddress": "127.0.0.1"})
        )
        broker = {
            "brokerClusterName": "DefaultCluster",
            "brokerName": self.broker_name,
            "brokerId": 0,
            "brokerIP1": "127.0.0.1",
            "bindAddress": "127.0.0.1",  # 4.x does not know it and listens everywhere
            "listenPort": self.port,
            "namesrvAddr": self.namesrv_address,
            "storePathRootDir": self.store,
            "storePathCommitLog": self.store / "commitlog",
        }
        (self.directory / "broker.conf").write_text(properties_text({**broker, **self.settings}))

    def _start_namesrv(self) -> ChildProcess:
        java = self._java("namesrv", "256m", "org.apache.rocketmq.namesrv.NamesrvStartup")
        java.wait_until_ready(lambda: is_listening(self.namesrv_address))
        return java

    def _start_broker(self) -> ChildProcess:
        java = self._java("broker", self._heap, "org.apache.rocketmq.broker.BrokerStartup")
        java.wait_until_ready(lambda: is_listening(self.address) and self._is_routed())
        return java

    def _is_routed(self) -> bool:
        with contextlib.suppress(OSError, ResponseError), Client(self.namesrv_address) as client:
            route = client.route("SELF_TEST_TOPIC")
            brokers = route["brokerDatas"] if route else []
            return any(self.address in broker["brokerAddrs"].values() for broker in brokers)
        return False

    def _java(self, name: str, heap: str, main: str, *arguments: str) -> ChildProcess:
        command = [
            "java",
            *(_OPENED if java_release("java") >= 9 else []),
            *self._jvm,
            *_DISK_MAY_BE_FULL,
            f"-Xms{heap}",
            f"-Xmx{heap}",
            f"-Duser.home={self.directory}",
            f"-Drocketmq.home.dir={self.directory}",
            "-cp",
            f"{self._jars}/*",
            main,
            *(arguments or ("-c", str(self.directory / f"{name}.conf"))),
        ]
        # 4.x speaks to its standard output, as we told it; 5.x has log files of its own.
        logs = [
            self.directory / "logs" / "rocketmqlogs" / f"{part}.log" for part in (name, "store")
        ]
        output = self.directory / f"{name}.out"
        return ChildProcess(command, name=f"{name} {self.version}", output=output, logs=logs)


class ChildProcess:
    """One process, its logs, and the leash that ends it when this process ends."""

    def __init__(
        self, command: list[str], *, name: str, output: Path, logs: Sequence[Path] = ()
    ) -> None:
        self._name = name
        self._logs = {log: log.stat().st_size if log.exists() else 0 for log in (output, *logs)}
        with output.open("ab") as out:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=output.parent,
                start_new_session=True,
            )
        # The leash reads from a pipe that only we hold. atexit is not enough: a test runner
        # may be killed, or leave by os._exit, and then the pipe closes all the same.
        self._leash = subprocess.Popen(
            ["/bin/sh", "-c", 'read -r _; kill -s KILL -- "-$0"', str(self._process.pid)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        atexit.register(self.kill)

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_until_ready(self, is_ready: Callable[[], bool]) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                break
            if is_ready():
                return
            time.sleep(0.05)
        code = self._process.poll()
        self.kill()
        state = f"not ready after {START_S} s" if code is None else f"exited with {code}"
        raise ProcessFailed(f"{self._name} {state}; its log ends:\n{self._tail()}")

    def stop(self, wait_s: float = STOP_S) -> None:
        self._signal(signal.SIGTERM)
        try:
            self._process.wait(wait_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise ProcessFailed(
                f"{self._name} did not stop in {wait_s} s; its log ends:\n{self._tail()}"
            ) from None
        self.kill()

    def kill(self) -> None:
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._leash.kill()
        if self._leash.stdin is not None:
            self._leash.stdin.close()
        self._leash.wait()
        atexit.unregister(self.kill)

    def _signal(self, number: signal.Signals) -> None:
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def _tail(self, lines: int = 30) -> str:
        """What was logged since this start, without the chatter."""
        kept = []
        for path, began in self._logs.items():
            if path.exists():
                with path.open("rb") as log:
                    log.seek(began)
                    kept += log.read().decode(errors="replace").splitlines()
        return "\n".join([line for line in kept if " INFO " not in line][-lines:])


def free_server_ports() -> tuple[int, int]:
    """Return a port for a name server and one for a broker; its other two are reserved too."""
    namesrv, _, broker, _ = free_port_block(PORT_OFFSETS)
    return namesrv, broker


def is_listening(address: str) -> bool:
    host, port = address.rsplit(":", 1)
    try:
        socket.create_connection((host, int(port)), timeout=1).close()
    except OSError:
        return False
    return True


def properties_text(settings: Mapping[str, object]) -> str:
    return "".join(f"{name}={java_text(value)}\n" for name, value in settings.items())
