"""The Django binding: `escrow.atomic()` is `transaction.atomic()` with messages.

    INSTALLED_APPS = [..., "escrowmq.django"]                      # then: manage.py migrate
    ESCROWMQ = {"servers": "127.0.0.1:9876", "group": "bank"}

    with escrow.atomic() as tx:
        Account.objects.filter(owner="bob").update(balance=F("balance") - 10)
        tx.send(Message("transfers", b"bob pays smith 10"))

    escrow.join().send(Message(...))      # the atomic block that runs, whoever began it

    inbox = Inbox(group="bank-b")

    @inbox.effect
    def credit(message): ...      # runs once for each message, however often it arrives

SQLAlchemy is not needed. The tables are those of `escrowmq.sql`, so both can share a database.

    escrow.py       Escrow and `escrow`: a thin face of `escrowmq.database.transaction`
    inbox.py        Inbox
    connection.py   Django's connections, for the SQL of `escrowmq.database.statements`
    models.py       the two tables as models, for migrations/
    admin.py        the tables in Django's admin, read-only
    apps.py         the Django application, and `manage.py check` for settings.ESCROWMQ
    management/     `manage.py escrowmq_worker`: the handlers of an `escrowmq.app.App`
"""

from escrowmq.django.escrow import Escrow, escrow
from escrowmq.django.inbox import Inbox

__all__ = ["Escrow", "Inbox", "escrow"]
