"""A Kafka of one node on loopback, and the source and sink that Spark has for it.

All jars come from Maven Central. Nothing is tuned: heap and collector are those of Kafka's start
script, everything else has its default.
"""

from __future__ import annotations

import base64
import os
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from tests.interop.apache import ChildProcess, ProcessFailed
from tests.interop.jars import Artifact, fetch_all
from tests.support.ports import free_ports

KAFKA: Final = "4.3.1"
CONNECTOR: Final = "4.2.0"  # of the Spark that it was built for; there is no newer one
SERVER_JARS: Final = (Artifact("org.apache.kafka", "kafka_2.13", KAFKA),)
SPARK_JARS: Final = (
    # Without dependencies: Spark contains them. The token provider of 4.2.0 is not in every mirror.
    Artifact("org.apache.spark", "spark-sql-kafka-0-10_2.13", CONNECTOR, alone=True),
    Artifact("org.apache.spark", "spark-token-provider-kafka-0-10_2.13", "4.0.0", alone=True),
    Artifact("org.apache.kafka", "kafka-clients", "3.9.2", alone=True),
    Artifact("org.apache.commons", "commons-pool2", "2.13.1", alone=True),
)
JVM: Final = (
    *("-Xms1g", "-Xmx1g", "-server", "-XX:+UseG1GC", "-XX:MaxGCPauseMillis=20"),
    *("-XX:InitiatingHeapOccupancyPercent=35", "-XX:+ExplicitGCInvokesConcurrent"),
)
FORMAT_S: Final = 120
TOPICS_S: Final = 5  # until the broker knows new topics, on a slow machine too


def connector_jars() -> list[Path]:
    """Fetch the jars. Raises Unavailable."""
    return sorted(fetch_all("Spark's Kafka source", SPARK_JARS, _cache() / "spark").glob("*.jar"))


class Kafka:
    """Broker and controller in one process."""

    name = f"Kafka {KAFKA}"

    def __init__(self, directory: Path, *, partitions: int) -> None:
        self.directory = directory
        self.port, self._controller_port = free_ports(2)
        self._partitions = partitions
        self._process: ChildProcess | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def pids(self) -> list[int]:
        return [self._process.pid] if self._process is not None else []

    def start(self) -> None:
        """Start Kafka. Raises Unavailable or ProcessFailed."""
        jars = fetch_all(self.name, SERVER_JARS, _cache() / KAFKA)
        self.directory.mkdir(parents=True, exist_ok=True)
        settings = self.directory / "server.properties"
        settings.write_text("".join(f"{name}={value}\n" for name, value in self._settings()))
        java = ["java", *JVM, "-cp", f"{jars}/*"]
        cluster = base64.urlsafe_b64encode(os.urandom(16)).decode().rstrip("=")
        make = [*java, "kafka.tools.StorageTool", "format", "-t", cluster, "-c", str(settings)]
        formatted = subprocess.run(
            make, capture_output=True, text=True, timeout=FORMAT_S, check=False
        )
        if formatted.returncode != 0:
            raise ProcessFailed(
                f"{self.name} cannot lay its store: {formatted.stdout}{formatted.stderr}"
            )
        command = [*java, "kafka.Kafka", str(settings)]
        output = self.directory / "kafka.out"
        self._process = ChildProcess(command, name=self.name, output=output)
        self._process.wait_until_ready(self._listens)

    def stop(self) -> None:
        if self._process is not None:
            process, self._process = self._process, None
            process.kill()  # its files are removed anyway

    def create_topics(self, jvm: Any, *topics: str) -> None:
        """Create topics with the client that Spark contains.

        A topic that is created by its first send can lose that batch: the sender learns of the
        topic before the broker does.
        """
        settings = jvm.java.util.Properties()
        settings.put("bootstrap.servers", self.address)
        admin = jvm.org.apache.kafka.clients.admin.AdminClient.create(settings)
        topics_to_create = jvm.java.util.ArrayList()
        for topic in topics:
            partitions = jvm.java.util.Optional.of(self._partitions)
            copies = jvm.java.util.Optional.empty()  # the broker's own id, 1
            topics_to_create.add(
                jvm.org.apache.kafka.clients.admin.NewTopic(topic, partitions, copies)
            )
        admin.createTopics(topics_to_create).all().get()
        admin.close()
        time.sleep(TOPICS_S)

    def _settings(self) -> list[tuple[str, object]]:
        controller = f"127.0.0.1:{self._controller_port}"
        return [
            ("process.roles", "broker,controller"),
            ("node.id", 1),
            ("controller.quorum.voters", f"1@{controller}"),
            ("controller.listener.names", "CONTROLLER"),
            ("listeners", f"PLAINTEXT://{self.address},CONTROLLER://{controller}"),
            ("advertised.listeners", f"PLAINTEXT://{self.address}"),
            ("listener.security.protocol.map", "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT"),
            ("log.dirs", self.directory / "log"),
            ("offsets.topic.replication.factor", 1),  # there is no second node
            ("transaction.state.log.replication.factor", 1),
            ("transaction.state.log.min.isr", 1),
        ]

    def _listens(self) -> bool:
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1):
            return True
        return False


def _cache() -> Path:
    return Path(os.environ.get("KAFKA_CACHE") or Path.home() / ".cache" / "apache-kafka")
