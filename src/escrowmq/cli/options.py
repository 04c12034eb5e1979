"""Options that many commands have, and what their values mean.

Names that the shell completes: topics, groups and brokers, as the cluster knows them.

Who presses Tab waits for this, so it is quick, and silent if nobody answers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import reduce
from typing import Any, Final, TypeVar

import click
from click.shell_completion import CompletionItem

from escrowmq.cli.access import access_options
from escrowmq.cli.call import SyncConnection, find_cluster, master_brokers, parse_name_servers
from escrowmq.clock import epoch_ms
from escrowmq.errors import EscrowError
from escrowmq.parsing import parse_duration_ms, parse_lenient_json, parse_timestamp
from escrowmq.remoting.bodies import TopicList, decode_body
from escrowmq.remoting.codes import RequestCode

_COMPLETION_TIMEOUT_S: Final = 1.0
_DEFAULT_NAMESRV: Final = "127.0.0.1:9876"

ShellComplete = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


def _make_completion(fetch_names: Callable[[str], Iterable[str]]) -> ShellComplete:
    def complete(
        context: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        namesrv = context.params.get("namesrv") or _DEFAULT_NAMESRV
        try:
            with context.scope(cleanup=False):  # so that its credentials are found
                names = fetch_names(namesrv)
        except EscrowError:
            return []
        return [CompletionItem(name) for name in sorted(names) if name.startswith(incomplete)]

    return complete


def _fetch_topic_names(namesrv: str) -> list[str]:
    for address in parse_name_servers(namesrv)[:1]:
        with SyncConnection(address, timeout_s=_COMPLETION_TIMEOUT_S) as caller:
            body = caller.call(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER).body
        return [name for name in decode_body(TopicList, body).topic_list if "%" not in name]
    return []


def _fetch_group_names(namesrv: str) -> set[str]:
    names: set[str] = set()
    for broker in master_brokers(find_cluster(namesrv, timeout_s=_COMPLETION_TIMEOUT_S)):
        with SyncConnection(broker.address, timeout_s=_COMPLETION_TIMEOUT_S) as caller:
            body = caller.call(RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG).body
        table: dict[str, Any] = parse_lenient_json(body)
        names.update(table.get("subscriptionGroupTable", {}))
    return names


def _fetch_broker_names(namesrv: str) -> list[str]:
    return list(find_cluster(namesrv, timeout_s=_COMPLETION_TIMEOUT_S).broker_addr_table)


complete_topic = _make_completion(_fetch_topic_names)
complete_group = _make_completion(_fetch_group_names)
complete_broker = _make_completion(_fetch_broker_names)


F = TypeVar("F", bound=Callable[..., Any])

EARLIEST, LATEST = "earliest", "latest"


def combine_options(*options: Callable[[F], F]) -> Callable[[F], F]:
    return lambda command: reduce(lambda made, option: option(made), reversed(options), command)


def parse_duration_option(
    context: click.Context, param: click.Parameter, value: str | None
) -> int | None:
    if value is None:
        return None
    try:
        return parse_duration_ms(value, default_unit="s")
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def parse_time_option(
    context: click.Context, param: click.Parameter, value: str | None
) -> int | None:
    return None if value is None else _parse_time_ms(value)


def parse_start_option(
    context: click.Context, param: click.Parameter, value: str | None
) -> str | int | None:
    """The first message, behind the last one, or the first that was stored then or later."""
    if value in (None, EARLIEST, LATEST):
        return value
    assert value is not None
    return _parse_time_ms(value, f"; {EARLIEST} and {LATEST} are also allowed")


def _parse_time_ms(value: str, hint: str = "") -> int:
    try:
        return epoch_ms(parse_timestamp(value))
    except ValueError as error:
        raise click.BadParameter(f"{error}{hint}") from None


namesrv_option: Final = click.option(
    *("-n", "--namesrv"),
    default="127.0.0.1:9876",
    envvar="NAMESRV_ADDR",
    show_default=True,
    metavar="ADDR",
    help="The name server; its brokers are asked.",
)
json_option: Final = click.option("--json", "in_json", is_flag=True, help="JSON instead of text.")

cluster_options = combine_options(
    namesrv_option,
    click.option(
        "--broker",
        metavar="ADDR|NAME",
        help="This broker alone; by its address, no name server is asked.",
        shell_complete=complete_broker,
    ),
    json_option,
    access_options,
)
watch_option = click.option(
    "--watch",
    "every_s",
    type=click.FloatRange(min=0.1),
    is_flag=False,
    flag_value=2.0,
    metavar="[SECONDS]",
    help="Again and again, until Ctrl-C.  [every 2]",
)
confirm_options = combine_options(
    click.option("--dry-run", is_flag=True, help="Say what would be done, and do nothing."),
    click.option("--yes", is_flag=True, help="Do not ask."),
)


def confirm(question: str, *, yes: bool) -> None:
    """Somebody says yes, or nothing is done."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise click.UsageError(
            "nobody is there to confirm: --yes to do it without asking, --dry-run to see what"
        )
    if not click.confirm(question, err=True):
        click.echo("Nothing was changed.", err=True)
        raise click.Abort
