"""Source and sink with a broker that requires signatures and TLS; SQL92 filters."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from escrowmq.errors import ConfigError, EscrowError, NotSent, RequestRefused
from escrowmq.spark.data_source import EscrowSource
from tests.support.brokers import Server
from tests.support.signing import Certificates, SignedClient
from tests.support.spark_session import IGNORED_WARNINGS
from tests.support.spark_session import spark as spark  # the fixture
from tests.support.spark_sinks import Query, numbers

pytestmark = [pytest.mark.filterwarnings(rule) for rule in IGNORED_WARNINGS]

ADMIN = "operator-key", "operator-secret-1"
WRITER = "writer-key", "writer-secret-22"
READER = "reader-key", "reader-secret-33"
RULES = f"""
accounts:
- {{accessKey: {ADMIN[0]}, secretKey: {ADMIN[1]}, admin: true}}
- accessKey: {WRITER[0]}
  secretKey: {WRITER[1]}
  defaultGroupPerm: PUB
  topicPerms: [orders=PUB, query=PUB]
- accessKey: {READER[0]}
  secretKey: {READER[1]}
  defaultGroupPerm: SUB
  topicPerms: [orders=SUB, query=SUB]
"""


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def served(
    tmp_path_factory: pytest.TempPathFactory, certificates: Certificates
) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("secured")
    (directory / "acl.yml").write_text(RULES)
    rules = {"aclEnable": "true", "escrowAclFile": directory / "acl.yml"}
    conf = {**rules, **certificates.conf(), "enablePropertyFilter": "true"}
    with Server(directory, conf=conf, wait_s=90) as server:
        with SignedClient(server.address, *ADMIN, tls=certificates.client()) as admin:
            for topic in ("orders", "others", "query"):
                admin.create_topic(topic, queues=2)
        yield server
    assert not [secret for _, secret in (ADMIN, WRITER, READER) if secret in server.errors]


def options(account: tuple[str, str], certificates: Certificates) -> dict[str, str]:
    key, secret = account
    tls = {"tls": "true", "tlsCa": str(certificates.ca)}
    return {"accessKey": key, "secretKey": secret, **tls}


def read(served: Server, **options: str) -> list[dict[str, Any]]:
    """Read in one batch as Spark does, without a JVM."""
    source = EscrowSource({"servers": served.namesrv_address, **options})
    reader: Any = source.reader(source.schema())
    tasks = reader.partitions()
    return [row for task in tasks for batch in reader.read(task) for row in batch.to_pylist()]


def test_a_table_is_written_and_read_back(
    spark: SparkSession, served: Server, certificates: Certificates
) -> None:
    spark.dataSource.register(EscrowSource)
    rows = spark.sql(
        "SELECT string(id) AS body, map('size', string(id)) AS properties FROM range(9)"
    )
    writer = rows.write.format("escrowmq").mode("append").option("servers", served.namesrv_address)
    writer = writer.option("topic", "orders").option("guarantee", "exactly-once")
    writer.options(**options(WRITER, certificates)).save()
    reader = spark.read.format("escrowmq").option("servers", served.namesrv_address)
    reader = reader.option("subscribe", "orders").options(**options(READER, certificates))
    messages = reader.load().selectExpr("string(body) AS body").collect()
    assert sorted(row.body for row in messages) == numbers(0, 9)
    filtered = reader.option("sql", "size BETWEEN 3 AND 5 AND size IS NOT NULL").load()
    assert sorted(row.body for row in filtered.collect()) == [b"3", b"4", b"5"]


def test_a_signed_stream_commits_its_epochs(served: Server, certificates: Certificates) -> None:
    query = Query(served.namesrv_address, "query", **options(WRITER, certificates))
    for epoch in range(2):
        rows = numbers(100 * epoch, 100 * epoch + 100)
        query.commit(epoch, query.task("run", epoch, rows))
    messages = read(served, subscribe="query", **options(READER, certificates))
    assert sorted(int(row["body"]) for row in messages) == list(range(200))


def test_a_refusal_names_the_missing_permission_or_the_signature(
    served: Server, certificates: Certificates
) -> None:
    reader = {**options(READER, certificates), "guarantee": "at-least-once"}
    with pytest.raises(RequestRefused, match="no permission: PUB on topic orders"):
        Query(served.namesrv_address, "orders", **reader).task("run", 0, ["1"])
    writer = options(WRITER, certificates)
    with pytest.raises(RequestRefused, match="no permission: PUB on topic others"):
        Query(served.namesrv_address, "others", **writer).task("run", 0, ["1"])
    with pytest.raises(RequestRefused, match="no permission: SUB or GET on topic orders"):
        read(served, subscribe="orders", **writer)
    wrong_secret = options((WRITER[0], "another-secret"), certificates)
    with pytest.raises(RequestRefused, match="signature"):
        read(served, subscribe="orders", **wrong_secret)
    with pytest.raises(RequestRefused, match="signature"):
        Query(served.namesrv_address, "query", **wrong_secret).task("run", 0, ["1"])


def test_errors_distinguish_missing_tls_from_an_untrusted_certificate(
    served: Server, certificates: Certificates, tmp_path: Path
) -> None:
    plain = {"accessKey": WRITER[0], "secretKey": WRITER[1], "timeout": "1"}
    with pytest.raises(EscrowError, match=r"closed the connection|reset"):
        Query(served.namesrv_address, "query", **plain).task("run", 0, ["1"])
    with pytest.raises(NotSent, match=r"cannot be reached: .*certificate verify failed"):
        Query(served.namesrv_address, "query", tls="true", **plain).task("run", 0, ["1"])
    with pytest.raises(NotSent, match=r"cannot be reached: .*certificate verify failed"):
        read(served, subscribe="query", tls="true")
    missing = str(tmp_path / "missing.pem")
    with pytest.raises(ConfigError, match=f"cannot use the TLS files {missing}"):
        read(served, subscribe="query", tls="true", tlsCa=missing)
