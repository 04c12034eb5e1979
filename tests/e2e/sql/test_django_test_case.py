"""Django's TestCase never commits; with EscrowTestMixin its messages are delivered all the same."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from sqlalchemy import make_url

from tests.e2e.sql.conftest import url_of
from tests.support.databases import DatabaseServer

pytestmark = pytest.mark.slow

SETTINGS = """
SECRET_KEY = "test"
INSTALLED_APPS = ["escrowmq.django", "shop"]
DATABASES = {{"default": {database}}}
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.AutoField"
ESCROWMQ = {{"servers": "127.0.0.1:1", "group": "shop"}}
"""

MODELS = """
from django.db import models

class Order(models.Model):
    item = models.CharField(max_length=20)
"""

TESTS = """
from django.test import TestCase, TransactionTestCase
from escrowmq import Message
from escrowmq.django import escrow
from escrowmq.testing.django import EscrowTestMixin
from shop.models import Order

def order(item, fails=False):
    with escrow.atomic() as tx:
        Order.objects.create(item=item)
        tx.send(Message(f"orders-{item}", item.encode()))
        if fails:
            raise ValueError
    return tx

class OrderTests(EscrowTestMixin, TestCase):
    def test_an_order_is_announced(self):
        with self.captureOnCommitCallbacks(execute=True):
            tx = order("lamp")
        self.assertEqual(tx.outcome.verdict.name, "COMMIT")
        self.assertTrue(tx.outcome.acknowledged)
        self.broker.assert_delivered("orders-lamp", [b"lamp"])

    def test_an_order_that_fails_is_not_announced(self):
        with self.captureOnCommitCallbacks(execute=True), self.assertRaises(ValueError):
            order("chair", fails=True)
        self.assertFalse(Order.objects.exists())
        self.broker.assert_nothing_delivered("orders-chair")

    def test_nothing_is_announced_without_a_commit(self):
        order("table")
        self.assertEqual(self.broker.messages("orders-table"), [])
        self.assertEqual(len(self.broker.transactions("orders-table")), 1)

class CommittedOrderTests(EscrowTestMixin, TransactionTestCase):
    def test_an_order_is_announced(self):
        order("lamp")
        self.broker.assert_delivered("orders-lamp", [b"lamp"])

class OtherSettingsTests(EscrowTestMixin, TestCase):
    broker_settings = {"brokerName": "other"}

    def test_the_broker_has_its_own_settings(self):
        with self.captureOnCommitCallbacks(execute=True):
            tx = order("lamp")
        self.assertEqual(tx.halves[0].queue.broker, "other")
"""


def run_tests(directory: Path, database: dict[str, object]) -> None:
    shop = directory / "shop"
    (shop / "migrations").mkdir(parents=True)
    for package in (shop, shop / "migrations"):
        (package / "__init__.py").touch()
    (directory / "site_settings.py").write_text(SETTINGS.format(database=database))
    (shop / "models.py").write_text(MODELS)
    (shop / "tests.py").write_text(TESTS)
    django = [sys.executable, "-m", "django"]
    options = ["--settings=site_settings", f"--pythonpath={directory}"]
    migrations = subprocess.run(
        [*django, "makemigrations", "shop", *options],
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
    )
    assert migrations.returncode == 0, migrations.stderr
    tests = subprocess.run(
        [*django, "test", "shop", *options],
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert tests.returncode == 0, tests.stderr
    assert "Ran 5 tests" in tests.stderr, tests.stderr


def test_test_cases_of_django_on_sqlite_in_memory(tmp_path: Path) -> None:
    run_tests(tmp_path, {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"})


def test_test_cases_of_django_on_postgresql(
    tmp_path: Path, database_servers: dict[str, DatabaseServer]
) -> None:
    url = make_url(url_of("postgresql", database_servers, tmp_path))
    run_tests(
        tmp_path,
        {
            "ENGINE": "django.db.backends.postgresql",
            "NAME": url.database,
            "HOST": url.host,
            "PORT": url.port,
            "USER": url.username,
        },
    )
