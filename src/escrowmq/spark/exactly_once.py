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
from escrowmq.remoting.headers import DecideBatch, RegisterWriter, WriterHeader
from escrowmq.spark.options import IN_FLIGHT_BYTES
from escrowmq.spark.send_pipeline import SendConnection
from escrowmq.spark.write_cluster import WriteCluster


class ParkedHalves(msgspec.Struct, frozen=True):
    """What one attempt has at one broker."""

    fence: int
    attempt: str
    count: int


class Follower(msgspec.Struct, frozen=True):
    """What a broker other than the home has to decide."""

    fence: int
    winners: list[tuple[str, int]]


class CommitPlan(msgspec.Struct, frozen=True):
    """Kept with the home broker's decision, as its fingerprint."""

    query: str = ""
    followers: dict[str, Follower] = {}
    is_last: bool = False


@dataclass(frozen=True, slots=True)
class SinkEpoch:
    """One epoch of a sink, as one run of it sees it."""

    sink: str
    number: int
    run: str
    query: str = ""  # whose epochs these are; nothing for a batch


class BrokerConnections:
    """Lines to brokers by name, made when they are wanted."""

    def __init__(
        self,
        cluster: WriteCluster,
        timeout_s: float,
        in_flight_bytes: int = IN_FLIGHT_BYTES.default,
    ) -> None:
        self.addresses = cluster.brokers()
        self._cluster = cluster
        self._timeout_s = timeout_s
        self._in_flight_bytes = in_flight_bytes
        self._connections: dict[str, SendConnection] = {}

    def connection(self, broker: str) -> SendConnection:
        line = self._connections.get(broker)
        if line is None:
            if broker not in self.addresses:
                self.addresses = self._cluster.brokers(broker)
            line = self._connections[broker] = SendConnection(
                self.addresses[broker],
                self._cluster.access,
                timeout_s=self._timeout_s,
                in_flight_bytes=self._in_flight_bytes,
            )
        return line

    def flush(self) -> None:
        for line in self._connections.values():
            line.flush()

    def close(self) -> None:
        for line in self._connections.values():
            line.close()


def supports_batch_decisions(connections: BrokerConnections, group: str) -> bool:
    """Whether all of them are ours: RocketMQ has no decisions by name. The name that is asked about
    is the group's, so that no account needs a permission for this alone."""
    try:
        for name in connections.addresses:
            _query_writer(connections, name, group)
    except UnknownRequest:
        return False
    return True


# --- in a task -----------------------------------------------------------------------------------


class SinkRegistration:
    """This run, at the brokers where it parks."""

    def __init__(self, connections: BrokerConnections, epoch: SinkEpoch) -> None:
        self._brokers = connections
        self._epoch = epoch
        self.home_broker = _find_home_broker(connections, epoch.sink)
        state = self._register(self.home_broker)
        self._fences = {self.home_broker: state.fence}
        self.is_decided = _is_decided(state, epoch)
        if not self.is_decided:
            propagate_decision(
                connections, epoch.sink, state
            )  # the next decision takes this one's place

    def fence(self, broker: str) -> int:
        fence = self._fences.get(broker)
        if fence is None:
            fence = self._fences[broker] = self._register(broker).fence
        return fence

    def _register(self, broker: str) -> WriterState:
        fields = RegisterWriter(
            writer=self._epoch.sink, run=f"{self._epoch.run}@{self.home_broker}"
        )
        return _request_state(self._brokers, broker, RequestCode.REGISTER_WRITER, fields)


def _find_home_broker(connections: BrokerConnections, sink: str) -> str:
    """Where the sink's decisions are: as it was, else the first broker by name."""
    names = sorted(connections.addresses)
    runs = [_query_writer(connections, name, sink).run for name in names]
    homes = {run.rpartition("@")[2] for run in runs if "@" in run}
    if len(homes) > 1:
        raise ConfigError(
            f"brokers disagree where the decisions of sink {sink} are "
            f"({', '.join(sorted(homes))}): "
            "two clusters were joined; use another transactional.id"
        )
    return homes.pop() if homes else names[0]


def _is_decided(state: WriterState, epoch: SinkEpoch) -> bool:
    """Raises WriterFenced if it is past, or somebody else's."""
    if epoch.number > state.batch:
        return False
    if epoch.number < state.batch:
        raise WriterFenced(
            f"epoch {epoch.number} of sink {epoch.sink} is past, {state.batch} is decided: the "
            "checkpoint is new or was set back, or another job has the same transactional.id. "
            "With another transactional.id everything is written again"
        )
    query = _parse_plan(state).query
    if query != epoch.query:
        raise WriterFenced(
            f"epoch {epoch.number} of sink {epoch.sink} was decided by another query "
            f"({query or 'a batch write'}): use another transactional.id for each"
        )
    return True


# --- in the driver -------------------------------------------------------------------------------


def decide(
    connections: BrokerConnections,
    epoch: SinkEpoch,
    home_broker: str,
    parked_halves: Sequence[dict[str, ParkedHalves]],
    *,
    is_last: bool = False,
) -> None:
    """The epoch is these attempts' halves, each given by broker. The first decision stands."""
    by_broker: dict[str, list[ParkedHalves]] = {}
    for attempt in parked_halves:
        for name, at_broker in attempt.items():
            by_broker.setdefault(name, []).append(at_broker)
    followers = {
        name: Follower(all_at[0].fence, [(one.attempt, one.count) for one in all_at])
        for name, all_at in sorted(by_broker.items())
        if name != home_broker
    }
    fence = _fence_at(home_broker, parked_halves, connections, epoch)
    at_home = [(one.attempt, one.count) for one in by_broker.get(home_broker, ())]
    plan = CommitPlan(epoch.query, followers, is_last)
    try:
        state = _decide_at(
            connections,
            home_broker,
            epoch.sink,
            epoch.number,
            Follower(fence, at_home),
            fingerprint=msgspec.json.encode(plan).decode(),
            is_last=is_last,
        )
    except RequestRefused as error:
        raise _translate_refusal(error, epoch) from error
    propagate_decision(connections, epoch.sink, state)


def propagate_decision(connections: BrokerConnections, sink: str, state: WriterState) -> None:
    """Tell the other brokers what the home has decided; those that know it do nothing."""
    plan = _parse_plan(state)
    for name in sorted(plan.followers):
        _decide_at_follower(connections, name, sink, state.batch, plan)


def propagate_decision_again(
    connections: BrokerConnections, epoch: SinkEpoch, home_broker: str
) -> None:
    """The same for an epoch that was decided in another life."""
    propagate_decision(connections, epoch.sink, _query_writer(connections, home_broker, epoch.sink))


def abandon(
    connections: BrokerConnections,
    epoch: SinkEpoch,
    home_broker: str,
    parked_halves: Sequence[dict[str, ParkedHalves]],
) -> None:
    """Nothing of this run will be decided any more: its halves are rolled back when they are due.

    Unless the epoch is decided: a failed commit may have succeeded.
    """
    if (
        not any(parked_halves)
        or _query_writer(connections, home_broker, epoch.sink).batch >= epoch.number
    ):
        return
    names = sorted(
        {name for attempt in parked_halves for name in attempt},
        key=lambda name: name != home_broker,
    )
    for name in names:
        fence = _fence_at(name, parked_halves, connections, epoch)
        fields = RegisterWriter(
            writer=epoch.sink, run=f"{epoch.run}-gave-up@{home_broker}", fence=fence
        )
        try:
            _request_state(connections, name, RequestCode.REGISTER_WRITER, fields)
        except WriterFenced:
            return  # a newer run has taken over, and sees to it


def _fence_at(
    broker: str,
    parked_halves: Sequence[dict[str, ParkedHalves]],
    connections: BrokerConnections,
    epoch: SinkEpoch,
) -> int:
    """As the attempts know it; where none of them has anything, as the run gets it."""
    for attempt in parked_halves:
        if broker in attempt:
            return attempt[broker].fence
    fields = RegisterWriter(writer=epoch.sink, run=f"{epoch.run}@{broker}")
    return _request_state(connections, broker, RequestCode.REGISTER_WRITER, fields).fence


def _decide_at_follower(
    connections: BrokerConnections, broker: str, sink: str, batch: int, plan: CommitPlan
) -> None:
    if _query_writer(connections, broker, sink).batch >= batch:
        return
    try:
        _decide_at(connections, broker, sink, batch, plan.followers[broker], is_last=plan.is_last)
    except RequestRefused as error:
        # Somebody was faster: he decided the same, and went on from there.
        if error.code != ResponseCode.TRANSACTION_FENCED:
            raise
        if _query_writer(connections, broker, sink).batch < batch:
            raise _translate_refusal(error, SinkEpoch(sink, batch, "")) from error


def _decide_at(
    connections: BrokerConnections,
    broker: str,
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
    return decode_body(
        WriterState, connections.connection(broker).call(RequestCode.DECIDE_BATCH, fields, body)
    )


def _query_writer(connections: BrokerConnections, broker: str, sink: str) -> WriterState:
    return _request_state(connections, broker, RequestCode.QUERY_WRITER, WriterHeader(writer=sink))


def _request_state(
    connections: BrokerConnections,
    broker: str,
    code: RequestCode,
    header: WriterHeader | RegisterWriter,
) -> WriterState:
    try:
        return decode_body(WriterState, connections.connection(broker).call(code, header))
    except RequestRefused as error:
        if error.code == ResponseCode.TRANSACTION_FENCED:
            raise WriterFenced(
                f"sink {header.writer} has a newer run: this one is stopped, and has written "
                f"nothing that counts. Is the same query (or transactional.id) running twice? "
                f"({error.remark})"
            ) from error
        raise


def _translate_refusal(error: RequestRefused, epoch: SinkEpoch) -> Exception:
    if error.code == ResponseCode.TRANSACTION_FENCED:
        return WriterFenced(
            f"epoch {epoch.number} of sink {epoch.sink} is not this run's to decide: a newer run "
            "has taken over. Is the same query (or transactional.id) running twice? "
            f"({error.remark})"
        )
    if error.code == ResponseCode.TRANSACTION_CONFLICT:
        return WriterFenced(
            f"epoch {epoch.number} of sink {epoch.sink} was rolled back before it was decided; "
            f"start the query again, it writes the epoch again ({error.remark})"
        )
    return error


def _parse_plan(state: WriterState) -> CommitPlan:
    if not state.fingerprint:
        return CommitPlan()
    try:
        return msgspec.json.decode(state.fingerprint, type=CommitPlan)
    except msgspec.MsgspecError as error:
        raise ConfigError(
            f"the writer {state.writer} belongs to another program than this sink: use another "
            "transactional.id"
        ) from error
