"""Ask all brokers of a cluster; one that fails does not hide what the others say."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, TypeVar

import click

from escrowmq.cli.call import BrokerPlace, Caller, find_brokers, reason_of
from escrowmq.errors import EscrowError, NotSent, OutcomeUnknown, RequestRefused

T = TypeVar("T")


class Brokers:
    def __init__(self, namesrv: str, broker: str | None) -> None:
        """One broker by its address, or all that the name server knows, or one of these by name."""
        if broker is not None and ":" not in broker:
            self.brokers = [place for place in find_brokers(namesrv) if place.name == broker]
            if not self.brokers:
                raise NotSent(
                    f"{namesrv} knows no broker {broker!r}: escrowmq broker list shows them"
                )
        elif broker is not None:
            self.brokers = [BrokerPlace(broker, broker)]
        else:
            self.brokers = find_brokers(namesrv)
        self.failed: list[str] = []  # brokers that could not say

    def ask(
        self, question: Callable[[Caller], T], *, unless: Collection[int] = ()
    ) -> list[tuple[BrokerPlace, T]]:
        """What each says; who refuses with one of the codes of `unless` has nothing to say."""
        answers = []
        for broker in self.brokers:
            try:
                with Caller(broker.address) as caller:
                    answers.append((broker, question(caller)))
            except EscrowError as error:
                if not isinstance(error, RequestRefused) or error.code not in unless:
                    self.note(broker, error)
        return answers

    def note(self, broker: BrokerPlace, error: EscrowError) -> None:
        why = reason_of(error)
        text = why if broker.address in why else f"{broker.address}: {why}"
        if text not in self.failed:
            self.failed.append(text)

    def must_have_answered(self) -> None:
        """Before something is changed by what all of them said."""
        if self.failed:
            raise OutcomeUnknown(
                f"{'; '.join(self.failed)}: nothing was changed; --broker asks others alone"
            )


def end(context: click.Context, brokers: Any, code: int = 0) -> None:
    """A broker that could not say is an error, whatever the others said."""
    for text in brokers.failed:
        click.echo(f"escrowmq: {text}", err=True)
    context.exit(2 if brokers.failed else code)
