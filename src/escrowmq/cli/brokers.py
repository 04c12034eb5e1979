"""Ask all brokers of a cluster; one that fails does not hide what the others say."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, TypeVar

import click

from escrowmq.cli.call import BrokerAddress, SyncConnection, error_text, find_brokers
from escrowmq.errors import EscrowError, NotSent, OutcomeUnknown, RequestRefused

T = TypeVar("T")


class Cluster:
    def __init__(self, namesrv: str, broker: str | None) -> None:
        """One broker by its address, or all that the name server knows, or one of these by name."""
        if broker is not None and ":" not in broker:
            self.brokers = [place for place in find_brokers(namesrv) if place.name == broker]
            if not self.brokers:
                raise NotSent(
                    f"{namesrv} knows no broker {broker!r}: escrowmq broker list shows them"
                )
        elif broker is not None:
            self.brokers = [BrokerAddress(broker, broker)]
        else:
            self.brokers = find_brokers(namesrv)
        self.failures: list[str] = []  # brokers that could not say

    def ask_all(
        self, question: Callable[[SyncConnection], T], *, ignored_codes: Collection[int] = ()
    ) -> list[tuple[BrokerAddress, T]]:
        """What each says; who refuses with one of the codes of `unless` has nothing to say."""
        answers = []
        for broker in self.brokers:
            try:
                with SyncConnection(broker.address) as caller:
                    answers.append((broker, question(caller)))
            except EscrowError as error:
                if not isinstance(error, RequestRefused) or error.code not in ignored_codes:
                    self.report_failure(broker, error)
        return answers

    def report_failure(self, broker: BrokerAddress, error: EscrowError) -> None:
        why = error_text(error)
        text = why if broker.address in why else f"{broker.address}: {why}"
        if text not in self.failures:
            self.failures.append(text)

    def require_all_answered(self) -> None:
        """Before something is changed by what all of them said."""
        if self.failures:
            raise OutcomeUnknown(
                f"{'; '.join(self.failures)}: nothing was changed; --broker asks others alone"
            )


def exit_with_failures(context: click.Context, cluster: Any, exit_code: int = 0) -> None:
    """A broker that could not say is an error, whatever the others said."""
    for text in cluster.failed:
        click.echo(f"escrowmq: {text}", err=True)
    context.exit(2 if cluster.failed else exit_code)
