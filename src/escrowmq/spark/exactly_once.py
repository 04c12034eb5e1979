"""The protocol of the exactly-once sink: register, park, decide once.

    task     registers the run at the home broker      fence, and what is decided already
             parks its rows as halves of its attempt
    driver   decides the epoch at the home broker      names the attempts that won, everywhere
             tells the other brokers the same

The home broker is the truth. Its decision says what every other broker has to decide, so whoever
comes later, the next task or a driver after a crash, can tell them again. It does so before it
registers there or decides anything new: until then what won at such a broker is open and safe.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from escrowmq.errors import ConfigError, RequestRefused, UnknownRequest, WriterFenced
from escrowmq.remoting.bodies import (
    BatchWinners,
    WinningAttempt,
    WriterState,
    decode_body,
    encode_body,
)
from escrowmq.remoting.codes import RequestCode, ResponseCode
from escrowmq.remoting.headers import DecideBatch, RegisterWriter, WriterName
from escrowmq.spark.options import IN_FLIGHT_BYTES
from escrowmq.spark.send_pipeline import Line
from escrowmq.spark.write_cluster import Cluster


class Parked(msgspec.Struct, frozen=True):
    """What one attempt has at one broker."""

    fence: int
    attempt: str
    count: int


class Follower(msgspec.Struct, frozen=True):
    """What a broker other than the home has to decide."""

    fence: int
    winners: list[tuple[str, int]]


class Plan(msgspec.Struct, frozen=True):
    """Kept with the home broker's decision, as its fingerprint."""

    query: str = ""
    followers: dict[str, Follower] = {}
    is_last: bool = False


@dataclass(frozen=True, slots=True)
class Epoch:
    """One epoch of a sink, as one run of it sees it."""

    sink: str
    number: int
    run: str
    query: str = ""  # whose epochs these are; nothing for a batch


class Brokers:
    """Lines to brokers by name, made when they are wanted."""

    def __init__(
        self, cluster: Cluster, timeout_s: float, in_flight_bytes: int = IN_FLIGHT_BYTES.default
    ) -> None:
        self.addresses = cluster.brokers()
        self._cluster = cluster
        self._timeout_s = timeout_s
        self._in_flight_bytes = in_flight_bytes
        self._lines: dict[str, Line] = {}

    def line(self, name: str) -> Line:
        line = self._lines.get(name)
        if line is None:
            if name not in self.addresses:
                self.addresses = self._cluster.brokers(name)
            line = self._lines[name] = Line(
                self.addresses[name],
                self._cluster.access,
                timeout_s=self._timeout_s,
                in_flight_bytes=self._in_flight_bytes,
            )
        return line

    def flush(self) -> None:
        for line in self._lines.values():
            line.flush()

    def close(self) -> None:
        for line in self._lines.values():
            line.close()


def can_decide(brokers: Brokers, group: str) -> bool:
    """Whether all of them are ours: RocketMQ has no decisions by name. The name that is asked about
    is the group's, so that no account needs a permission for this alone."""
    try:
        for name in brokers.addresses:
            _query(brokers, name, group)
    except UnknownRequest:
        return False
    return True


# --- in a task -----------------------------------------------------------------------------------


class Registration:
    """This run, at the brokers where it parks."""

    def __init__(self, brokers: Brokers, epoch: Epoch) -> None:
        self._brokers = brokers
        self._epoch = epoch
        self.home = _home(brokers, epoch.sink)
        state = self._register(self.home)
        self._fences = {self.home: state.fence}
        self.is_decided = _is_decided(state, epoch)
        if not self.is_decided:
            finish(brokers, epoch.sink, state)  # the next decision takes this one's place

    def fence(self, name: str) -> int:
        fence = self._fences.get(name)
        if fence is None:
            fence = self._fences[name] = self._register(name).fence
        return fence

    def _register(self, name: str) -> WriterState:
        fields = RegisterWriter(writer=self._epoch.sink, run=f"{self._epoch.run}@{self.home}")
        return _ask_state(self._brokers, name, RequestCode.REGISTER_WRITER, fields)


def _home(brokers: Brokers, sink: str) -> str:
    """Where the sink's decisions are: as it was, else the first broker by name."""
    names = sorted(brokers.addresses)
    runs = [_query(brokers, name, sink).run for name in names]
    homes = {run.rpartition("@")[2] for run in runs if "@" in run}
    if len(homes) > 1:
        raise ConfigError(
            f"brokers disagree where the decisions of sink {sink} are "
            f"({', '.join(sorted(homes))}): "
            "two clusters were joined; use another transactional.id"
        )
    return homes.pop() if homes else names[0]


def _is_decided(state: WriterState, epoch: Epoch) -> bool:
    """Raises WriterFenced if it is past, or somebody else's."""
    if epoch.number > state.batch:
        return False
    if epoch.number < state.batch:
        raise WriterFenced(
            f"epoch {epoch.number} of sink {epoch.sink} is past, {state.batch} is decided: the "
            "checkpoint is new or was set back, or another job has the same transactional.id. "
            "With another transactional.id everything is written again"
        )
    query = _plan(state).query
    if query != epoch.query:
        raise WriterFenced(
            f"epoch {epoch.number} of sink {epoch.sink} was decided by another query "
            f"({query or 'a batch write'}): use another transactional.id for each"
        )
    return True


# --- in the driver -------------------------------------------------------------------------------


def decide(
    brokers: Brokers,
    epoch: Epoch,
    home: str,
    parked: Sequence[dict[str, Parked]],
    *,
    is_last: bool = False,
) -> None:
    """The epoch is these attempts' halves, each given by broker. The first decision stands."""
    by_broker: dict[str, list[Parked]] = {}
    for attempt in parked:
        for name, at_broker in attempt.items():
            by_broker.setdefault(name, []).append(at_broker)
    followers = {
        name: Follower(all_at[0].fence, [(one.attempt, one.count) for one in all_at])
        for name, all_at in sorted(by_broker.items())
        if name != home
    }
    fence = _fence_of(home, parked, brokers, epoch)
    at_home = [(one.attempt, one.count) for one in by_broker.get(home, ())]
    plan = Plan(epoch.query, followers, is_last)
    try:
        state = _decide_at(
            brokers,
            home,
            epoch.sink,
            epoch.number,
            Follower(fence, at_home),
            fingerprint=msgspec.json.encode(plan).decode(),
            is_last=is_last,
        )
    except RequestRefused as error:
        raise _explained(error, epoch) from error
    finish(brokers, epoch.sink, state)


def finish(brokers: Brokers, sink: str, state: WriterState) -> None:
    """Tell the other brokers what the home has decided; those that know it do nothing."""
    plan = _plan(state)
    for name in sorted(plan.followers):
        _follow(brokers, name, sink, state.batch, plan)


def finish_again(brokers: Brokers, epoch: Epoch, home: str) -> None:
    """The same for an epoch that was decided in another life."""
    finish(brokers, epoch.sink, _query(brokers, home, epoch.sink))


def give_up(brokers: Brokers, epoch: Epoch, home: str, parked: Sequence[dict[str, Parked]]) -> None:
    """Nothing of this run will be decided any more: its halves are rolled back when they are due.

    Unless the epoch is decided: a failed commit may have succeeded.
    """
    if not any(parked) or _query(brokers, home, epoch.sink).batch >= epoch.number:
        return
    names = sorted({name for attempt in parked for name in attempt}, key=lambda name: name != home)
    for name in names:
        fence = _fence_of(name, parked, brokers, epoch)
        fields = RegisterWriter(writer=epoch.sink, run=f"{epoch.run}-gave-up@{home}", fence=fence)
        try:
            _ask_state(brokers, name, RequestCode.REGISTER_WRITER, fields)
        except WriterFenced:
            return  # a newer run has taken over, and sees to it


def _fence_of(
    name: str, parked: Sequence[dict[str, Parked]], brokers: Brokers, epoch: Epoch
) -> int:
    """As the attempts know it; where none of them has anything, as the run gets it."""
    for attempt in parked:
        if name in attempt:
            return attempt[name].fence
    fields = RegisterWriter(writer=epoch.sink, run=f"{epoch.run}@{name}")
    return _ask_state(brokers, name, RequestCode.REGISTER_WRITER, fields).fence


def _follow(brokers: Brokers, name: str, sink: str, batch: int, plan: Plan) -> None:
    if _query(brokers, name, sink).batch >= batch:
        return
    try:
        _decide_at(brokers, name, sink, batch, plan.followers[name], is_last=plan.is_last)
    except RequestRefused as error:
        # Somebody was faster: he decided the same, and went on from there.
        if error.code != ResponseCode.TRANSACTION_FENCED:
            raise
        if _query(brokers, name, sink).batch < batch:
            raise _explained(error, Epoch(sink, batch, "")) from error


def _decide_at(
    brokers: Brokers,
    name: str,
    sink: str,
    batch: int,
    follower: Follower,
    *,
    fingerprint: str = "",
    is_last: bool = False,
) -> WriterState:
    winners = [WinningAttempt(attempt=attempt, count=count) for attempt, count in follower.winners]
    fields = DecideBatch(writer=sink, batch=batch, fence=follower.fence, last=is_last)
    body = encode_body(BatchWinners(winners=winners, fingerprint=fingerprint))
    return decode_body(WriterState, brokers.line(name).ask(RequestCode.DECIDE_BATCH, fields, body))


def _query(brokers: Brokers, name: str, sink: str) -> WriterState:
    return _ask_state(brokers, name, RequestCode.QUERY_WRITER, WriterName(writer=sink))


def _ask_state(
    brokers: Brokers, name: str, code: RequestCode, fields: WriterName | RegisterWriter
) -> WriterState:
    try:
        return decode_body(WriterState, brokers.line(name).ask(code, fields))
    except RequestRefused as error:
        if error.code == ResponseCode.TRANSACTION_FENCED:
            raise WriterFenced(
                f"sink {fields.writer} has a newer run: this one is stopped, and has written "
                f"nothing that counts. Is the same query (or transactional.id) running twice? "
                f"({error.remark})"
            ) from error
        raise


def _explained(error: RequestRefused, epoch: Epoch) -> Exception:
    if error.code == ResponseCode.TRANSACTION_FENCED:
        return WriterFenced(
            f"epoch {epoch.number} of sink {epoch.sink} is not this run's to decide: a newer run "
            "has taken over. Is the same query (or transactional.id) running twice? "
            f"({error.remark})"
        )
    if error.code == ResponseCode.TRANSACTION_CONTRADICTED:
        return WriterFenced(
            f"epoch {epoch.number} of sink {epoch.sink} was rolled back before it was decided; "
            f"start the query again, it writes the epoch again ({error.remark})"
        )
    return error


def _plan(state: WriterState) -> Plan:
    if not state.fingerprint:
        return Plan()
    try:
        return msgspec.json.decode(state.fingerprint, type=Plan)
    except msgspec.MsgspecError as error:
        raise ConfigError(
            f"the writer {state.writer} belongs to another program than this sink: use another "
            "transactional.id"
        ) from error
