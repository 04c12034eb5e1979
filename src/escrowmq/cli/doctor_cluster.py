"""What may be wrong with a cluster: servers, disks, clocks, transactions, groups."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from escrowmq.broker.topics import DLQ_PREFIX
from escrowmq.cli.call import (
    BrokerPlace,
    Caller,
    addresses_of,
    find_cluster,
    masters_of,
    reason_of,
)
from escrowmq.cli.checkup import Checkup, ok, problem, warning
from escrowmq.cli.figures import (
    connections,
    is_own_group,
    lag_of,
    progress_of_all,
    runtime,
    settings,
    topic_configs,
    topic_offsets,
)
from escrowmq.cli.machines import disk_ratio, up_s
from escrowmq.cli.pending import duration_text
from escrowmq.cli.record import printable
from escrowmq.clock import Clock, SystemClock
from escrowmq.config.resolve import is_loopback
from escrowmq.errors import EscrowError, RequestRefused, UnknownRequest
from escrowmq.wire.bodies import decode_body
from escrowmq.wire.bodies_transaction import TransactionEntry, TransactionList
from escrowmq.wire.codes import RequestCode, ResponseCode
from escrowmq.wire.headers_transaction import ListTransactions

_TIMEOUT_S: Final = 5.0
SKEW_MS_MAX: Final = 5_000
OPEN_MS_MAX: Final = 3_600_000
LAG_MAX: Final = 10_000
_SHOWN_MAX: Final = 10  # groups of each kind


def examine_cluster(namesrv: str, clock: Clock | None = None) -> Iterator[Checkup]:
    reachable = []
    for address in addresses_of(namesrv):
        checkup = _name_server(address)
        yield checkup
        if not checkup.remedy:
            reachable.append(address)
    if not reachable:
        return
    try:
        brokers = masters_of(find_cluster(";".join(reachable), timeout_s=_TIMEOUT_S))
    except EscrowError as error:
        yield problem(
            "brokers",
            reason_of(error),
            "start one: escrowmq serve; one that runs elsewhere needs this address as namesrvAddr",
        )
        return
    for broker in brokers:
        yield from _broker(broker, clock or SystemClock())


def _name_server(address: str) -> Checkup:
    what = f"name server {address}"
    try:
        with Caller(address, timeout_s=_TIMEOUT_S) as caller:
            caller.call(RequestCode.GET_BROKER_CLUSTER_INFO)
    except EscrowError as error:
        return problem(what, reason_of(error), _how_to_reach(error))
    return ok(what, "answers")


def _how_to_reach(error: EscrowError) -> str:
    if isinstance(error, RequestRefused) and error.code == ResponseCode.NO_PERMISSION:
        return "show who you are: --credentials FILE, or $ESCROWMQ_ACCESS_KEY and its secret"
    return "start it (escrowmq serve), or say where it is: -n HOST:PORT; with TLS: --tls"


def _broker(broker: BrokerPlace, clock: Clock) -> Iterator[Checkup]:
    what = f"broker {printable(broker.name)}"
    try:
        with Caller(broker.address, timeout_s=_TIMEOUT_S) as caller:
            for examine in (_running, _doors, _transactions, _groups, _dead_letters):
                try:
                    yield from examine(caller, what, clock)
                except UnknownRequest:
                    continue  # Apache's: it has nothing of the kind
    except RequestRefused as error:
        yield problem(what, f"{broker.address}: {reason_of(error)}", _how_to_reach(error))
    except EscrowError as error:
        yield problem(
            what,
            reason_of(error),
            "look at its log; if it listens on another address than it tells, set brokerIP1",
        )


def _running(caller: Caller, what: str, clock: Clock) -> Iterator[Checkup]:
    table = runtime(caller)
    now_ms = clock.now_ms()
    version, up = table.get("brokerVersionDesc", "?"), up_s(table)
    if table.get("brokerActive", "true") != "true":
        yield problem(
            what,
            f"{caller.address} takes no messages: its disk is full, or has failed",
            "look at its log; make room; after a failed disk restart it",
        )
    else:
        yield ok(what, f"{caller.address} answers, {printable(version)}, up {_since(up)}")
    yield from _disk(table, what)
    yield _clock(table, up, now_ms, what)


def _since(seconds: int) -> str:
    return duration_text(seconds * 1000)


def _disk(table: dict[str, str], what: str) -> Iterator[Checkup]:
    used = disk_ratio(table)
    if used is not None and used >= 0.85:
        text = f"its disk is {used:.0%} full"
        yield warning(what, text, "make room, a larger disk, or a shorter fileReservedTime")


def _clock(table: dict[str, str], up: int, now_ms: int, what: str) -> Checkup:
    """It says when it started and how long ago, in whole seconds."""
    booted_ms = int(table.get("bootTimestamp") or 0)
    if not booted_ms:
        return ok(what, "does not say what time it is")
    skew_ms = now_ms - (booted_ms + up * 1000)
    if abs(skew_ms) <= SKEW_MS_MAX:
        return ok(what, "its clock agrees with ours")
    order = "behind" if skew_ms > 0 else "ahead of"
    return problem(
        what,
        f"its clock is {duration_text(abs(skew_ms))} {order} ours",
        "run NTP (chrony, systemd-timesyncd) on both: delays, expiry and --to TIME go by clocks",
    )


def _doors(caller: Caller, what: str, clock: Clock) -> Iterator[Checkup]:
    told = settings(caller)
    address = told.get("bindAddress", "")
    names = ("aclEnable", "authenticationEnabled", "authorizationEnabled")
    is_guarded = any(told.get(name) == "true" for name in names)
    if address and not is_loopback(address) and not is_guarded:
        yield warning(
            what,
            f"listens on {address} and asks nobody who he is",
            "set aclEnable=true and escrowAclFile (docs/security.md), or listen on 127.0.0.1",
        )


# --- what waits ----------------------------------------------------------------------------------


def _transactions(caller: Caller, what: str, clock: Clock) -> Iterator[Checkup]:
    stranded = _listed(caller, ListTransactions(state="stranded", count_max=1_000))
    if stranded:
        yield problem(
            what,
            f"{_many(stranded)} stranded: nobody is asked about them any more",
            "escrowmq transaction list --state stranded; then commit, rollback or resume",
        )
    wanted = ListTransactions(state="open", older_than_ms=OPEN_MS_MAX, count_max=1_000)
    old = _listed(caller, wanted)
    if old:
        age = duration_text(clock.now_ms() - min(entry.parked_at for entry in old))
        yield warning(
            what,
            f"{_many(old)} open for more than an hour, the oldest for {age}",
            "is the producer up, and does it answer checks? escrowmq transaction explain "
            f"{printable(old[0].transaction_id)}",
        )
    if not stranded and not old:
        yield ok(what, "no transaction is stranded, none is old")


def _listed(caller: Caller, wanted: ListTransactions) -> list[TransactionEntry]:
    body = caller.call(RequestCode.LIST_TRANSACTIONS, wanted).body
    return decode_body(TransactionList, body).transactions


def _many(entries: list[TransactionEntry]) -> str:
    if len(entries) == 1:
        return "1 transaction is"
    return f"{len(entries)}{' or more' if len(entries) >= 1_000 else ''} transactions are"


def _groups(caller: Caller, what: str, clock: Clock) -> Iterator[Checkup]:
    lags = {
        group: lag_of(progress.values())
        for group, progress in progress_of_all(caller).items()
        if not is_own_group(group)
    }
    behind = sorted((group for group in lags if lags[group]), key=lambda group: -lags[group])
    connected = connections(caller, behind)
    absent = [group for group in behind if group not in connected]
    slow = [group for group in behind if group in connected and lags[group] > LAG_MAX]
    for group in absent[:_SHOWN_MAX]:
        yield warning(
            what,
            f"group {printable(group)} has not read {lags[group]} messages, "
            "and nobody of it is connected",
            f"start its consumers; if it is given up: escrowmq group delete {printable(group)}",
        )
    for group in slow[:_SHOWN_MAX]:
        yield warning(
            what,
            f"group {printable(group)} is {lags[group]} messages behind",
            f"more consumers, up to one per queue: escrowmq group lag {printable(group)} --watch",
        )
    more = len(absent[_SHOWN_MAX:]) + len(slow[_SHOWN_MAX:])
    if more:
        yield warning(what, f"{more} more groups are behind", "escrowmq group lag")
    if not absent and not slow:
        yield ok(what, f"{len(lags)} groups, none far behind")


def _dead_letters(caller: Caller, what: str, clock: Clock) -> Iterator[Checkup]:
    topics = [name for name in topic_configs(caller) if name.startswith(DLQ_PREFIX)]
    for topic, count in _counts(caller, topics):
        group = printable(topic.removeprefix(DLQ_PREFIX))
        yield warning(
            what,
            f"group {group} has {count} dead letters: it failed on them again and again",
            f"escrowmq message tail '{printable(topic)}' --from earliest --no-follow",
        )


def _counts(caller: Caller, topics: list[str]) -> Iterable[tuple[str, int]]:
    for topic, offsets in topic_offsets(caller, topics).items():
        count = sum(one.max_offset - one.min_offset for one in offsets.values())
        if count:
            yield topic, count
