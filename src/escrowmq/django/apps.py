"""The Django application, which owns the two tables."""

from __future__ import annotations

from django.apps import AppConfig


class EscrowmqConfig(AppConfig):
    name = "escrowmq.django"
    label = "escrowmq"
    verbose_name = "EscrowMQ"
