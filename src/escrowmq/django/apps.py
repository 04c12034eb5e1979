"""The Django application, which owns the two tables, and its system checks.

What is wrong with settings.ESCROWMQ is said by `manage.py check`, not at the first transaction.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.apps import AppConfig
from django.conf import settings
from django.core.checks import CheckMessage, Error, Tags, Warning, register
from django.db import connections

from escrowmq.django.escrow import EscrowSettings, check_isolation_level
from escrowmq.errors import ConfigError


class EscrowmqConfig(AppConfig):
    name = "escrowmq.django"
    label = "escrowmq"
    verbose_name = "EscrowMQ"


@register(Tags.compatibility)
def check_settings(
    app_configs: Sequence[AppConfig] | None = None, **options: Any
) -> list[CheckMessage]:
    """Return what is wrong with settings.ESCROWMQ and the databases that it names."""
    if not hasattr(settings, "ESCROWMQ"):
        return [
            Warning(
                "settings.ESCROWMQ is missing, so escrow.atomic() cannot be used.",
                hint='Set ESCROWMQ = {"servers": "127.0.0.1:9876", "group": "..."}.',
                id="escrowmq.W001",
            )
        ]
    try:
        loaded = EscrowSettings.load()
    except ConfigError as error:
        return [Error(str(error), id="escrowmq.E001")]
    findings: list[CheckMessage] = []
    for key in ("servers", "group"):
        value = getattr(loaded, key)
        if not isinstance(value, str) or not value:
            text = f"settings.ESCROWMQ[{key!r}] must be a text that is not empty, not {value!r}."
            findings.append(Error(text, id="escrowmq.E002"))
    unknown = [alias for alias in loaded.databases if alias not in connections.databases]
    for alias in unknown:
        text = f"settings.ESCROWMQ['databases'] names {alias!r}, which settings.DATABASES has not."
        findings.append(Error(text, id="escrowmq.E003"))
    if not unknown:
        try:
            check_isolation_level(loaded)
        except ConfigError as error:
            findings.append(Error(str(error), id="escrowmq.E004"))
    return findings
