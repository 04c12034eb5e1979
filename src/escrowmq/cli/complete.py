"""Names that the shell completes: topics, groups and brokers, as the cluster knows them.

Who presses Tab waits for this, so it is quick, and silent if nobody answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

import click
from click.shell_completion import CompletionItem

from escrowmq.cli.call import Caller, addresses_of, find_cluster, masters_of
from escrowmq.errors import EscrowError
from escrowmq.message.fastjson import lenient_json
from escrowmq.wire.bodies import TopicList, decode_body
from escrowmq.wire.codes import RequestCode

_TIMEOUT_S: Final = 1.0
_NAMESRV: Final = "127.0.0.1:9876"

Complete = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


def _completing(ask: Callable[[str], Iterable[str]]) -> Complete:
    def complete(
        context: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        namesrv = context.params.get("namesrv") or _NAMESRV
        try:
            with context.scope(cleanup=False):  # so that its credentials are found
                names = ask(namesrv)
        except EscrowError:
            return []
        return [CompletionItem(name) for name in sorted(names) if name.startswith(incomplete)]

    return complete


def _topics(namesrv: str) -> list[str]:
    for address in addresses_of(namesrv)[:1]:
        with Caller(address, timeout_s=_TIMEOUT_S) as caller:
            body = caller.call(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER).body
        return [name for name in decode_body(TopicList, body).topic_list if "%" not in name]
    return []


def _groups(namesrv: str) -> set[str]:
    names: set[str] = set()
    for broker in masters_of(find_cluster(namesrv, timeout_s=_TIMEOUT_S)):
        with Caller(broker.address, timeout_s=_TIMEOUT_S) as caller:
            body = caller.call(RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG).body
        table: dict[str, Any] = lenient_json(body)
        names.update(table.get("subscriptionGroupTable", {}))
    return names


def _brokers(namesrv: str) -> list[str]:
    return list(find_cluster(namesrv, timeout_s=_TIMEOUT_S).broker_addr_table)


topic_names = _completing(_topics)
group_names = _completing(_groups)
broker_names = _completing(_brokers)
