"""A Django site in one file: a view that saves an order and sends a message, or does neither.

python examples/django_view.py migrate
python examples/django_view.py runserver
curl -d item=lamp http://127.0.0.1:8000/orders

For a site of your own, look at the view, INSTALLED_APPS and ESCROWMQ.
"""

from __future__ import annotations

import os
import sys

import django
from django.conf import settings
from django.core.management import execute_from_command_line
from django.core.wsgi import get_wsgi_application
from django.db import connection
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.urls import path

from escrowmq import Message

settings.configure(
    ALLOWED_HOSTS=["127.0.0.1", "localhost"],
    DATABASES={
        "default": {
            "ENGINE": "django.db.backends.sqlite3",
            "NAME": os.environ.get("DATABASE", "django_view.db"),
        }
    },
    INSTALLED_APPS=["escrowmq.django"],  # its migration creates the two tables
    ESCROWMQ={"servers": os.environ.get("SERVERS", "127.0.0.1:9876"), "group": "site-orders"},
    ROOT_URLCONF=__name__,
    SECRET_KEY="only for this example",
    USE_TZ=True,
    WSGI_APPLICATION=f"{__name__}.application",
)
django.setup()

from escrowmq.django import escrow  # noqa: E402  # after settings.configure()


def take_order(request: HttpRequest) -> HttpResponse:
    if request.method != "POST":
        return JsonResponse({"orders": saved_items()})
    item = request.POST.get("item", "")
    with escrow.atomic() as tx:  # transaction.atomic() with messages
        with connection.cursor() as cursor:
            cursor.execute("INSERT INTO orders (item) VALUES (%s)", [item])
        tx.send(Message("site-orders", item.encode()))
        if not item:  # an exception rolls back the row and the message
            raise ValueError("an order needs an item")
    return JsonResponse({"item": item}, status=201)


def saved_items() -> list[str]:
    with connection.cursor() as cursor:
        cursor.execute("SELECT item FROM orders ORDER BY id")
        return [row[0] for row in cursor.fetchall()]


def create_table() -> None:
    """Create the table. A real site has a model and a migration instead."""
    with connection.cursor() as cursor:
        cursor.execute(
            "CREATE TABLE IF NOT EXISTS orders (id INTEGER PRIMARY KEY, item VARCHAR(100) NOT NULL)"
        )


urlpatterns = [path("orders", take_order)]
application = get_wsgi_application()

if __name__ == "__main__":
    create_table()
    execute_from_command_line(sys.argv)
