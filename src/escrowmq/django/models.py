"""The two tables as Django models. They equal those of `escrowmq.sql`, column by column."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.db import models
from django.db.backends.base.base import BaseDatabaseWrapper

from escrowmq.database.marker import ID_CHARS_MAX, INBOX_TABLE, MARKER_TABLE

if TYPE_CHECKING:
    _Text = models.CharField[str, str]
else:
    _Text = models.CharField


class ExactField(_Text):
    """Text that distinguishes case. MySQL's default collation does not."""

    def db_parameters(self, connection: BaseDatabaseWrapper) -> Any:
        parameters: Any = super().db_parameters(connection)
        if connection.vendor == "mysql":
            parameters = {**parameters, "collation": "utf8mb4_bin"}
        return parameters


class Marker(models.Model):
    """There if and only if its transaction committed, or never will (a tombstone)."""

    id = ExactField(max_length=ID_CHARS_MAX, primary_key=True)
    outcome: Any = models.CharField(max_length=16)
    at_ms: Any = models.BigIntegerField(db_index=True)
    producer_group = ExactField(max_length=255)
    messages: Any = models.IntegerField()

    class Meta:
        db_table = MARKER_TABLE


class Received(models.Model):
    """A message that had its effect."""

    pk = models.CompositePrimaryKey("consumer_group", "message_id")
    consumer_group = ExactField(max_length=255)
    message_id = ExactField(max_length=128)
    at_ms: Any = models.BigIntegerField(db_index=True)

    class Meta:
        db_table = INBOX_TABLE


class InboxRow(models.Model):
    """The table of Received as the admin sees it, which cannot show a composite key."""

    message_id = ExactField(max_length=128, primary_key=True)
    consumer_group = ExactField(max_length=255)
    at_ms: Any = models.BigIntegerField()

    class Meta:
        db_table = INBOX_TABLE
        managed = False
        verbose_name = "received message"
