"""A Django site with handlers: `manage.py escrowmq_worker`, system checks, the admin."""

from __future__ import annotations

import json
import secrets
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, select

from escrowmq.sql.statements import inbox_table
from tests.support.apps import wait_all_acknowledged, wait_dead_letters
from tests.support.brokers import Server
from tests.support.clients import send
from tests.support.sql_bank import delivered_bodies, new_topic, saved_ids
from tests.support.worker_processes import ROOT, WAIT_S, WorkerCommand

pytestmark = pytest.mark.slow

SITE = str(ROOT / "tests" / "support" / "bank_site.py")
APP = "tests.support.bank_site:app"


def site_environment(engine: Engine, **settings: str) -> dict[str, str]:
    url = engine.url
    database = url.database if url.port is None else f"{url.port}:{url.database}"
    assert database is not None
    return {"DATABASE": database, "PYTHONPATH": str(ROOT), **settings}


def manage(environment: dict[str, str], *arguments: str) -> tuple[int, str]:
    """Run a command of the site; return its exit code and output."""
    result = subprocess.run(
        [sys.executable, SITE, *arguments],
        env={"PATH": "/usr/bin:/bin", **environment},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    return result.returncode, result.stdout + result.stderr


@pytest.fixture
def site(engine: Engine) -> dict[str, str]:
    """Return the environment of a site whose database is migrated."""
    if engine.dialect.name not in ("sqlite", "postgresql"):
        pytest.skip("the site has settings for SQLite and PostgreSQL")
    environment = site_environment(engine)
    code, output = manage(environment, "migrate", "--verbosity", "0")
    assert code == 0, output
    return environment


def worker(site: dict[str, str], *options: str) -> WorkerCommand:
    command = (sys.executable, SITE, "escrowmq_worker")
    return WorkerCommand(APP, *options, environment=site, command=command)


@pytest.mark.parametrize("options", [(), ("--processes", "2")], ids=["one process", "two"])
async def test_handlers_of_a_site_have_one_transaction_with_inbox_and_messages(
    server: Server, engine: Engine, site: dict[str, str], options: tuple[str, ...]
) -> None:
    topic = new_topic("site")
    environment = {**site, "TOPIC": topic, "SERVERS": server.namesrv_address}
    key = secrets.token_hex(16).upper()
    with server.client() as client:  # one message that is stored twice
        for queue_id in range(2):
            client.send(topic, b"a", {"UNIQ_KEY": key}, queue_id=queue_id)
    await send(server, topic, b"b", b"bad")
    await send(server, f"{topic}-plain", b"c", b"d")
    with worker(environment, *options) as command:
        command.wait_for(lambda: saved_ids(engine) == ["a", "b", "c", "d"], "all are saved")
        await wait_all_acknowledged(server, f"g-{topic}", topic)
        dead = await wait_dead_letters(server, f"g-{topic}")
        assert command.stop(signal.SIGINT) == 0, command.output
    assert dead[0].failure is not None
    assert dead[0].failure.cause == "ZeroDivisionError: bad"
    await server.assert_settled_async()
    receipts = delivered_bodies(server, f"{topic}-receipts")
    assert receipts == [b"a", b"b", b"by hand a", b"by hand b"]
    assert saved_ids(engine) == ["a", "b", "c", "d"]
    with engine.connect() as connection:
        assert len(connection.execute(select(inbox_table.c.message_id)).all()) == 4


def test_a_site_is_told_what_is_wrong_with_its_app(sqlite: Engine) -> None:
    code, output = manage(site_environment(sqlite), "escrowmq_worker", "nowhere:app")
    assert (code, output) == (
        2,
        "escrowmq: there is no module 'nowhere': run this in the folder that has it, or "
        "install it\n",
    )


# --- system checks -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "finding"),
    [
        ({"servers": "a:1"}, "E001) settings.ESCROWMQ: "),
        ({"servers": "a:1", "group": "g", "colour": 1}, "E001) settings.ESCROWMQ: "),
        ({"servers": "a:1", "group": "g", "retention_ms": 1}, "E001)"),
        ({"servers": "a:1", "group": ""}, "E002) settings.ESCROWMQ['group'] must be a text"),
        ({"servers": ["a:1"], "group": "g"}, "E002) settings.ESCROWMQ['servers'] must be a text"),
        (
            {"servers": "a:1", "group": "g", "databases": ["default", "other"]},
            "E003) settings.ESCROWMQ['databases'] names 'other'",
        ),
    ],
)
def test_a_wrong_setting_is_found_by_the_system_check(
    sqlite: Engine, setting: dict[str, Any], finding: str
) -> None:
    environment = site_environment(sqlite, ESCROWMQ=json.dumps(setting))
    code, output = manage(environment, "check")
    assert code == 1
    assert finding in output


def test_right_settings_pass_the_system_check(sqlite: Engine) -> None:
    assert manage(site_environment(sqlite), "check") == (
        0,
        "System check identified no issues (0 silenced).\n",
    )


# --- admin ---------------------------------------------------------------------------------------


async def test_the_admin_shows_both_tables_and_changes_nothing(
    server: Server, engine: Engine, site: dict[str, str]
) -> None:
    topic = new_topic("admin")
    environment = {**site, "TOPIC": topic, "SERVERS": server.namesrv_address}
    await send(server, topic, b"a")
    with worker(environment) as command:
        command.wait_for(lambda: saved_ids(engine) == ["a"], "it is saved")
        assert command.stop() == 0, command.output
    for name, shown in (("marker", f"site-{topic}"), ("inboxrow", f"g-{topic}")):
        code, page = manage(environment, "look", f"/admin/escrowmq/{name}/")
        assert code == 0, page
        assert page.startswith("200\n"), page[:500]
        assert shown in page
        assert 'name="action"' not in page  # nothing can be deleted
        _, refused = manage(environment, "look", f"/admin/escrowmq/{name}/add/")
        assert refused.startswith("403\n")


def test_the_tables_of_the_site_are_used_as_they_are(site: dict[str, str], tmp_path: Path) -> None:
    code, output = manage(site, "makemigrations", "escrowmq", "--check", "--dry-run")
    assert (code, output) == (0, "No changes detected in app 'escrowmq'\n")
