"""Django: `escrow.atomic()` is `transaction.atomic()` with messages. SQLAlchemy is not needed.

INSTALLED_APPS = [..., "escrowmq.django"]                      # then: manage.py migrate
ESCROWMQ = {"servers": "127.0.0.1:9876", "group": "bank"}

with escrow.atomic() as tx:
    Account.objects.filter(owner="bob").update(balance=F("balance") - 10)
    tx.send(Message("transfers", b"bob pays smith 10"))

inbox = Inbox(group="bank-b")

@inbox.effect
def credit(message): ...      # a message that comes again has no second effect
"""

from escrowmq.django.escrow import Escrow, escrow
from escrowmq.django.inbox import Inbox

__all__ = ["Escrow", "Inbox", "escrow"]
