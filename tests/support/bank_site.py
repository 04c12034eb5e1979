"""A Django site in one file, for tests of its commands, checks and admin pages.

    python tests/support/bank_site.py escrowmq_worker tests.support.bank_site:app
    python tests/support/bank_site.py check --database default
    python tests/support/bank_site.py look ADDRESS        print the status and text of an admin page

The environment says where: SERVERS, DATABASE (a SQLite file, or PORT and name of PostgreSQL) and
TOPIC. ESCROWMQ replaces the setting of that name, as JSON.
"""

from __future__ import annotations

import json
import os
import sys

import django
from django.conf import settings
from django.core.management import execute_from_command_line
from django.db import connection

TOPIC = os.environ.get("TOPIC", "site")
SERVERS = os.environ.get("SERVERS", "127.0.0.1:1")


def database_settings() -> dict[str, object]:
    port, _, name = os.environ["DATABASE"].partition(":")
    if not name:
        return {"ENGINE": "django.db.backends.sqlite3", "NAME": os.environ["DATABASE"]}
    return {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": name,
        "HOST": "127.0.0.1",
        "PORT": port,
        "USER": "escrow",
    }


if not settings.configured:
    default = {"servers": SERVERS, "group": f"site-{TOPIC}"}
    settings.configure(
        ALLOWED_HOSTS=["testserver"],
        DATABASES={"default": database_settings()},
        DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
        INSTALLED_APPS=[
            "django.contrib.admin",
            "django.contrib.auth",
            "django.contrib.contenttypes",
            "django.contrib.messages",
            "django.contrib.sessions",
            "escrowmq.django",
        ],
        MIDDLEWARE=[
            "django.contrib.sessions.middleware.SessionMiddleware",
            "django.contrib.auth.middleware.AuthenticationMiddleware",
            "django.contrib.messages.middleware.MessageMiddleware",
        ],
        ESCROWMQ=json.loads(os.environ.get("ESCROWMQ", json.dumps(default))),
        ROOT_URLCONF=__name__,
        SECRET_KEY="only for tests",
        TEMPLATES=[
            {
                "BACKEND": "django.template.backends.django.DjangoTemplates",
                "APP_DIRS": True,
                "OPTIONS": {
                    "context_processors": [
                        "django.template.context_processors.request",
                        "django.contrib.auth.context_processors.auth",
                        "django.contrib.messages.context_processors.messages",
                    ]
                },
            }
        ],
        USE_TZ=True,
    )
    django.setup()

# Both need the settings.
from django.contrib import admin  # noqa: E402
from django.urls import path  # noqa: E402

from escrowmq import Message  # noqa: E402
from escrowmq.app import App, DjangoDatabase, Retry  # noqa: E402
from escrowmq.sql import TransactionMessages  # noqa: E402

urlpatterns = [path("admin/", admin.site.urls)]
app = App(SERVERS, group=f"g-{TOPIC}", database=DjangoDatabase())


def save(name: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute("INSERT INTO transfer VALUES (%s, 1)", [name])


@app.on(TOPIC, retry=Retry(times=2, first_s=0, factor=1))
def credit(name: str, tx: TransactionMessages) -> Message:
    save(name)
    tx.send(Message(f"{TOPIC}-receipts", f"by hand {name}".encode()))
    if name.startswith("bad"):
        raise ZeroDivisionError(name)
    return Message(f"{TOPIC}-receipts", name.encode())


@app.on(f"{TOPIC}-plain")
def credit_several(names: list[str]) -> None:
    for name in names:
        save(name)


def look(address: str) -> None:
    """Print an admin page as a superuser sees it."""
    from django.contrib.auth.models import User
    from django.test import Client

    user, _ = User.objects.get_or_create(username="a", is_staff=True, is_superuser=True)
    client = Client()
    client.force_login(user)
    response = client.get(address)
    sys.stdout.write(f"{response.status_code}\n{response.content.decode()}\n")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["look", address]:
            look(address)
        case _:
            execute_from_command_line(sys.argv)
