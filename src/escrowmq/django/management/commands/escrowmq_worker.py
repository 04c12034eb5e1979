"""`manage.py escrowmq_worker bank.messages:app`: `escrowmq worker` with the settings of a site."""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand

from escrowmq.app.app import SHUTDOWN_TIMEOUT_S
from escrowmq.app.worker import WorkerOptions, start_workers


class Command(BaseCommand):
    """Run the handlers of an App."""

    help = "Run the handlers of an App, such as bank.messages:app."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("target", metavar="MODULE:APP")
        parser.add_argument("--processes", type=int, default=1, metavar="N")
        parser.add_argument("--reload", action="store_true")
        parser.add_argument("--health-port", type=int, metavar="PORT")
        parser.add_argument("--health-host", default="127.0.0.1", metavar="ADDR")
        parser.add_argument(
            "--shutdown-timeout-s", type=float, default=SHUTDOWN_TIMEOUT_S, metavar="S"
        )
        parser.add_argument("--child", metavar="INDEX:FD", help="Of a worker process; internal.")

    def handle(self, *args: Any, **options: Any) -> None:
        worker_options = WorkerOptions.with_child(
            options["child"],
            target=options["target"],
            health_port=options["health_port"],
            health_host=options["health_host"],
            shutdown_timeout_s=options["shutdown_timeout_s"],
        )
        sys.exit(
            start_workers(
                (sys.executable, *sys.argv),
                worker_options,
                processes=options["processes"],
                reload=options["reload"],
            )
        )
