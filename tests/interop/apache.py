"""Apache RocketMQ on loopback, which a test starts, stops and kills.

    with ApacheRocketMQ("5.5.0", tmp_path) as rocketmq, Client(rocketmq.address) as client:
        client.send("orders", b"hello")

The store is `<directory>/store`, so a test can write one there before the start and read it after
the stop. No Java process outlives the test process, even if that is killed: see `ChildProcess`.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from tests.interop.jars import fetch, java_release
from tests.interop.remoting import Client, ResponseError, java_text
from tests.support.ports import free_port_block
from tests.support.waiting import wait_until

START_TIMEOUT_S = 90  # a cold JVM on a busy two-core machine takes a third of this
STOP_TIMEOUT_S = 60
# A broker also listens on its port - 2 (the fast port) and + 1 (replication).
PORT_OFFSETS = (0, 2, 4, 5)  # name server, fast port, broker, replication
PORT_ATTEMPTS = 3

_MODULE_OPTIONS = [
    "--add-exports=java.base/jdk.internal.ref=ALL-UNNAMED",
    "--add-opens=java.base/java.nio=ALL-UNNAMED",
    "--add-opens=java.base/sun.nio.ch=ALL-UNNAMED",
    "--add-opens=java.base/java.lang=ALL-UNNAMED",
]
FAST_START = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")  # most of a short run is start-up
LOGBACK = """<configuration>
  <appender name="out" class="ch.qos.logback.core.ConsoleAppender">
    <encoder><pattern>%d %p %logger - %m%n</pattern></encoder>
  </appender>
  <root level="WARN"><appender-ref ref="out"/></root>
</configuration>
"""
_ACCEPT_FULL_DISK = [  # the result of a test must not depend on how full the disk is
    "-Drocketmq.broker.diskSpaceWarningLevelRatio=0.99",
    "-Drocketmq.broker.diskSpaceCleanForciblyRatio=0.98",
]


class ProcessFailed(Exception):
    """A process did not start or stop as expected; the message has the end of its log."""


class ApacheRocketMQ:
    """A name server and a broker."""

    def __init__(
        self,
        version: str,
        directory: Path,
        settings: Mapping[str, object] | None = None,
        *,
        heap: str = "512m",
        jvm: Sequence[str] = FAST_START,
    ) -> None:
        self.version = version
        self.directory = directory.resolve()
        self.store = self.directory / "store"
        self.settings = dict(settings or {})
        self.broker_name = "broker-a"
        self.port = self.namesrv_port = 0  # chosen at the first start and used from then on
        self._heap = heap
        self._jvm_options = tuple(jvm)
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
        """Return the ids of the running processes: the broker first."""
        return [process.pid for process in (self._broker, self._namesrv) if process is not None]

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
        """Start what is not running: name server and broker, or only the broker."""
        self._jars = fetch(self.version)
        for attempt in range(PORT_ATTEMPTS):
            if self.port == 0 or attempt > 0:
                self.namesrv_port, self.port = free_server_ports()
            self._write_configuration()
            try:
                self._start_processes()
                return
            except ProcessFailed as error:
                self.stop()
                port_is_taken = "already in use" in str(error) or "BindException" in str(error)
                if not port_is_taken or attempt == PORT_ATTEMPTS - 1:
                    raise

    def _start_processes(self) -> None:
        if self._namesrv is None:
            self._namesrv = self._start_namesrv()
        if self._broker is None:
            self._broker = self._start_broker()

    def stop(self) -> None:
        """Stop both. The broker flushes its store and deletes `abort`."""
        try:
            self.stop_broker()
        finally:
            if self._namesrv is not None:
                self._namesrv.kill()  # it stores nothing, and a clean stop would take seconds
                self._namesrv = None

    def stop_broker(self) -> None:
        if self._broker is not None:
            broker, self._broker = self._broker, None
            broker.stop()

    def kill(self) -> None:
        """Kill the broker with SIGKILL. The name server keeps running."""
        if self._broker is not None:
            self._broker.kill()
            self._broker = None

    def restart(self) -> None:
        """Stop the broker cleanly if it runs, and start it on the same store and port."""
        self.stop_broker()
        self.start()

    def _write_configuration(self) -> None:
        (self.directory / "conf").mkdir(parents=True, exist_ok=True)
        for name in ("namesrv", "broker", "tools"):  # 4.9.7 does not start without these files
            (self.directory / "conf" / f"logback_{name}.xml").write_text(LOGBACK)
        (self.directory / "namesrv.conf").write_text(
            properties_text({"listenPort": self.namesrv_port, "bindAddress": "127.0.0.1"})
        )
        broker = {
            "brokerClusterName": "DefaultCluster",
            "brokerName": self.broker_name,
            "brokerId": 0,
            "brokerIP1": "127.0.0.1",
            "bindAddress": "127.0.0.1",  # 4.9.7 ignores it and listens on every address
            "listenPort": self.port,
            "namesrvAddr": self.namesrv_address,
            "storePathRootDir": self.store,
            "storePathCommitLog": self.store / "commitlog",
        }
        (self.directory / "broker.conf").write_text(properties_text({**broker, **self.settings}))

    def _start_namesrv(self) -> ChildProcess:
        process = self._java("namesrv", "256m", "org.apache.rocketmq.namesrv.NamesrvStartup")
        process.wait_until_ready(lambda: is_listening(self.namesrv_address))
        return process

    def _start_broker(self) -> ChildProcess:
        process = self._java("broker", self._heap, "org.apache.rocketmq.broker.BrokerStartup")
        process.wait_until_ready(
            lambda: (
                is_listening(self.address)
                and has_route(self.namesrv_address, "SELF_TEST_TOPIC", self.address)
            )
        )
        return process

    def _java(self, name: str, heap: str, main_class: str, *arguments: str) -> ChildProcess:
        command = [
            "java",
            *(_MODULE_OPTIONS if java_release("java") >= 9 else []),
            *self._jvm_options,
            *_ACCEPT_FULL_DISK,
            f"-Xms{heap}",
            f"-Xmx{heap}",
            f"-Duser.home={self.directory}",
            f"-Drocketmq.home.dir={self.directory}",
            "-cp",
            f"{self._jars}/*",
            main_class,
            *(arguments or ("-c", str(self.directory / f"{name}.conf"))),
        ]
        # 4.9.7 logs to its standard output, as configured above; 5.5.0 has log files.
        logs = [self.directory / "logs" / "rocketmqlogs" / f"{log}.log" for log in (name, "store")]
        output = self.directory / f"{name}.out"
        return ChildProcess(command, name=f"{name} {self.version}", output=output, logs=logs)


class ApacheNamesrv(ApacheRocketMQ):
    """A name server without a broker, to be used with ours."""

    def _start_processes(self) -> None:
        self._namesrv = self._start_namesrv()


class ApacheBroker(ApacheRocketMQ):
    """A broker that registers with a running name server, for example ours."""

    def __init__(
        self,
        version: str,
        directory: Path,
        settings: Mapping[str, object] | None = None,
        *,
        namesrv_address: str,
    ) -> None:
        super().__init__(version, directory, settings)
        self._external_namesrv_address = namesrv_address

    @property
    def namesrv_address(self) -> str:
        return self._external_namesrv_address

    def _start_processes(self) -> None:
        self._broker = self._start_broker()


class ChildProcess:
    """A process with its logs, and a watchdog that kills it when this process ends."""

    def __init__(
        self, command: list[str], *, name: str, output: Path, logs: Sequence[Path] = ()
    ) -> None:
        self._name = name
        # Sizes at the start: what is logged from here on belongs to this process.
        self._log_starts = {
            log: log.stat().st_size if log.exists() else 0 for log in (output, *logs)
        }
        with output.open("ab") as output_file:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output_file,
                stderr=subprocess.STDOUT,
                cwd=output.parent,
                start_new_session=True,
            )
        # The watchdog reads from a pipe whose other end only this process has. atexit is not
        # enough: a test runner may be killed or leave by os._exit. The pipe closes in any case.
        self._watchdog = subprocess.Popen(
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
        """Return when the condition is true. Raises ProcessFailed if the process exits first."""
        try:
            wait_until(
                lambda: self._process.poll() is not None or is_ready(),
                f"{self._name} is ready",
                timeout_s=START_TIMEOUT_S,
            )
            exit_code = self._process.poll()
            failure = "" if exit_code is None else f"{self._name} exited with {exit_code}"
        except AssertionError as error:
            failure = str(error)
        if failure:
            self.kill()
            raise ProcessFailed(f"{failure}; its log ends:\n{self._tail()}")

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Stop the process with SIGTERM. Raises ProcessFailed if it does not exit in time."""
        self._signal(signal.SIGTERM)
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise ProcessFailed(
                f"{self._name} did not stop in {timeout_s} s; its log ends:\n{self._tail()}"
            ) from None
        self.kill()

    def kill(self) -> None:
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._watchdog.kill()
        if self._watchdog.stdin is not None:
            self._watchdog.stdin.close()
        self._watchdog.wait()
        atexit.unregister(self.kill)

    def _signal(self, number: signal.Signals) -> None:
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def _tail(self, lines: int = 30) -> str:
        """Return the last lines that this process logged, without those of level INFO."""
        logged = []
        for path, start in self._log_starts.items():
            if path.exists():
                with path.open("rb") as log:
                    log.seek(start)
                    logged += log.read().decode(errors="replace").splitlines()
        return "\n".join([line for line in logged if " INFO " not in line][-lines:])


def free_server_ports() -> tuple[int, int]:
    """Return the port of a name server and of a broker. The broker's other two are free too."""
    namesrv, _, broker, _ = free_port_block(PORT_OFFSETS)
    return namesrv, broker


def has_route(namesrv_address: str, topic: str, broker_address: str) -> bool:
    """Return whether this name server has a route of the topic to this broker."""
    with contextlib.suppress(OSError, ResponseError), Client(namesrv_address) as client:
        route = client.route(topic)
        brokers = route["brokerDatas"] if route else []
        return any(broker_address in broker["brokerAddrs"].values() for broker in brokers)
    return False


def wait_for_route(namesrv_address: str, topic: str, broker_address: str) -> None:
    wait_until(
        lambda: has_route(namesrv_address, topic, broker_address),
        f"{namesrv_address} has a route of {topic} to {broker_address}",
    )


def is_listening(address: str) -> bool:
    host, port = address.rsplit(":", 1)
    try:
        socket.create_connection((host, int(port)), timeout=1).close()
    except OSError:
        return False
    return True


def properties_text(settings: Mapping[str, object]) -> str:
    """Return settings as the lines of a Java properties file."""
    return "".join(f"{name}={java_text(value)}\n" for name, value in settings.items())
