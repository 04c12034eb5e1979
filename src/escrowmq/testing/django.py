"""A broker for Django's test cases.

    class OrderTests(EscrowTestMixin, TestCase):
        def test_an_order_is_announced(self):
            with self.captureOnCommitCallbacks(execute=True):
                self.client.post("/orders", {"item": "lamp"})
            self.broker.assert_delivered("site-orders", [b"lamp"])

Django's TestCase never commits: it runs each test in a transaction that is rolled back. So the
messages of `escrow.atomic()` are delivered when the hooks of `on_commit` run, at the end of
`captureOnCommitCallbacks(execute=True)`. A TransactionTestCase commits, and needs nothing of that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Final

from django.conf import settings
from django.test import override_settings

from escrowmq.django import escrow
from escrowmq.testing.local_broker import LocalBroker

if TYPE_CHECKING:
    from unittest import TestCase as _Base
else:
    _Base = object

# A check asks the database in another thread, which SQLite's databases in memory do not allow while
# a test is writing. So a transaction is checked only when the test says so.
SETTINGS: Final[Mapping[str, object]] = {"transactionTimeOut": 3_600_000}


class EscrowTestMixin(_Base):
    """Gives each test class a broker, to which `escrowmq.django.escrow` connects.

    Put it before `TestCase` or `TransactionTestCase`. The other keys of `settings.ESCROWMQ` stay;
    without any, the group is "tests".
    """

    broker: ClassVar[LocalBroker]
    broker_settings: ClassVar[Mapping[str, object]] = {}

    @classmethod
    def setUpClass(cls) -> None:
        cls.broker = LocalBroker({**SETTINGS, **cls.broker_settings})
        cls.enterClassContext(cls.broker)
        escrow_settings: dict[str, Any] = {"group": "tests", **getattr(settings, "ESCROWMQ", {})}
        escrow_settings["servers"] = cls.broker.servers
        cls.enterClassContext(override_settings(ESCROWMQ=escrow_settings))
        escrow.close()  # it may be connected to another broker
        cls.addClassCleanup(escrow.close)
        super().setUpClass()
