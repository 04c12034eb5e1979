"""The protocol of the exactly-once sink: register, park, decide once.

    task     registers its run at the home broker      gets a fence, and the last decided epoch
             parks its rows as half messages
    driver   decides the epoch at the home broker      the decision lists the winning attempts
             propagates the decision                   to the other brokers, the followers

The home broker holds the truth. Its decision contains what every follower has to decide, so the
next task, or a driver after a crash, can propagate it again. It does so before it registers at a
follower or decides anything new. Until then the winning halves at a follower stay open, so nothing
is lost.
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
from escrowmq.spark.options import WriteOptions
from escrowmq.spark.queues import WriteCluster
from escrowmq.spark.send_pipeline import SendPipeline


class ParkedHalves(msgspec.Struct, frozen=True):
    """The halves that one attempt of a task has parked at one broker."""

    fence: int
    attempt: str
    count: int


class Follower(msgspec.Struct, frozen=True):
    """What a broker has to decide: the winning attempts and their numbers of halves."""

    fence: int
    winners: list[tuple[str, int]]


class CommitPlan(msgspec.Struct, frozen=True):
    """What the followers have to decide; stored with the home broker's decision (fingerprint)."""

    query: str = ""
    followers: dict[str, Follower] = {}
    is_last: bool = False


@dataclass(frozen=True, slots=True)
class SinkEpoch:
    """One epoch of a sink, in one run of a job."""

    sink: str
    number: int
    run: str
    query: str = ""  # id of the streaming query; empty for a batch


class BrokerConnections:
    """Connections to the brokers of a cluster by name, opened when they are needed."""

    def __init__(self, options: WriteOptions) -> None:
        """Raises NotSent if no broker is found within the timeout."""
        self.cluster = WriteCluster(options.servers, options.access, wait_s=options.timeout_s)
        self.addresses = self.cluster.broker_addresses()
        self._options = options
        self._pipelines: dict[str, SendPipeline] = {}

    def pipeline(self, broker: str) -> SendPipeline:
        """Return the connection to a broker. Raises NotSent if the broker is not known."""
        pipeline = self._pipelines.get(broker)
        if pipeline is None:
            if broker not in self.addresses:
                self.addresses = self.cluster.broker_addresses(broker)
            pipeline = self._pipelines[broker] = SendPipeline(
                self.addresses[broker],
                self._options.access,
                timeout_s=self._options.timeout_s,
                response_timeout_s=self._options.response_timeout_s,
                in_flight_bytes=self._options.in_flight_bytes,
            )
        return pipeline

    def flush(self) -> None:
        for pipeline in self._pipelines.values():
            pipeline.flush()

    def close(self) -> None:
        for pipeline in self._pipelines.values():
            pipeline.close()
        self.cluster.close()


def supports_batch_decisions(connections: BrokerConnections, group: str) -> bool:
    """Return whether all brokers can decide a batch by its writer. RocketMQ's cannot.

    The writer in this query has the name of the producer group, so that no account needs a
    permission for this query alone.
    """
    try:
        for name in connections.addresses:
            _query_writer(connections, name, group)
    except UnknownRequest:
        return False
    return True


# --- in a task -----------------------------------------------------------------------------------


class SinkRegistration:
    """The registration of this run at the brokers where it parks halves.

    Registering fences earlier runs: their halves can no longer win.
    """

    def __init__(self, connections: BrokerConnections, epoch: SinkEpoch) -> None:
        self._connections = connections
        self._epoch = epoch
        self.home_broker = _find_home_broker(connections, epoch.sink)
        state = self._register(self.home_broker)
        self._fences = {self.home_broker: state.fence}
        self.is_decided = _is_decided(state, epoch)
        if not self.is_decided:
            # The next decision replaces this one at the home broker, and with it what the
            # followers have to decide. So they must have decided it before.
            propagate_decision(connections, epoch.sink, state)

    def fence(self, broker: str) -> int:
        """Return the fence of this run at a broker; register there first if needed."""
        fence = self._fences.get(broker)
        if fence is None:
            fence = self._fences[broker] = self._register(broker).fence
        return fence

    def _register(self, broker: str) -> WriterState:
        header = RegisterWriter(
            writer=self._epoch.sink, run=f"{self._epoch.run}@{self.home_broker}"
        )
        return _request_state(self._connections, broker, RequestCode.REGISTER_WRITER, header)


def _find_home_broker(connections: BrokerConnections, sink: str) -> str:
    """Return the broker that holds the sink's decisions; for a new sink, the first by name.

    The name of a run ends with the name of its home broker. Raises ConfigError.
    """
    names = sorted(connections.addresses)
    runs = [_query_writer(connections, name, sink).run for name in names]
    homes = {run.rpartition("@")[2] for run in runs if "@" in run}
    if len(homes) > 1:
        raise ConfigError(
            f"brokers disagree about the home broker of sink {sink} ({', '.join(sorted(homes))}), "
            "perhaps because two clusters were joined; use another transactional.id"
        )
    return homes.pop() if homes else names[0]


def _is_decided(state: WriterState, epoch: SinkEpoch) -> bool:
    """Return whether the epoch is decided. Raises WriterFenced if a later one is.

    Also raises WriterFenced if another query has decided this epoch.
    """
    if epoch.number > state.batch:
        return False
    if epoch.number < state.batch:
        raise WriterFenced(
            f"epoch {epoch.number} of sink {epoch.sink} is past, {state.batch} is decided: the "
            "checkpoint is new or was reset, or another job uses the same transactional.id. "
            "With another transactional.id, everything is written again"
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
    """Commit the epoch: the halves of these attempts, and no others.

    `parked_halves` has the halves of each winning attempt by broker. If the epoch is decided
    already, that decision stands. Raises WriterFenced.
    """
    by_broker: dict[str, list[ParkedHalves]] = {}
    for halves_by_broker in parked_halves:
        for name, halves in halves_by_broker.items():
            by_broker.setdefault(name, []).append(halves)
    followers = {
        name: Follower(
            all_halves[0].fence, [(halves.attempt, halves.count) for halves in all_halves]
        )
        for name, all_halves in sorted(by_broker.items())
        if name != home_broker
    }
    fence = _fence_at(home_broker, parked_halves, connections, epoch)
    home_winners = [(halves.attempt, halves.count) for halves in by_broker.get(home_broker, ())]
    plan = CommitPlan(epoch.query, followers, is_last)
    try:
        state = _decide_at(
            connections,
            home_broker,
            epoch.sink,
            epoch.number,
            Follower(fence, home_winners),
            fingerprint=msgspec.json.encode(plan).decode(),
            is_last=is_last,
        )
    except RequestRefused as error:
        raise _translate_refusal(error, epoch) from error
    propagate_decision(connections, epoch.sink, state)


def propagate_decision(connections: BrokerConnections, sink: str, state: WriterState) -> None:
    """Make the followers decide what the home broker has decided; those that have, do nothing."""
    plan = _parse_plan(state)
    for name in sorted(plan.followers):
        _decide_at_follower(connections, name, sink, state.batch, plan)


def propagate_decision_again(
    connections: BrokerConnections, epoch: SinkEpoch, home_broker: str
) -> None:
    """Do the same for an epoch that an earlier run has decided."""
    propagate_decision(connections, epoch.sink, _query_writer(connections, home_broker, epoch.sink))


def abandon(
    connections: BrokerConnections,
    epoch: SinkEpoch,
    home_broker: str,
    parked_halves: Sequence[dict[str, ParkedHalves]],
) -> None:
    """Give up this run: its halves are rolled back when their check is due.

    Do nothing if the epoch is decided: a commit that failed in Spark may have succeeded.
    """
    if (
        not any(parked_halves)
        or _query_writer(connections, home_broker, epoch.sink).batch >= epoch.number
    ):
        return
    names = sorted(
        {name for halves_by_broker in parked_halves for name in halves_by_broker},
        key=lambda name: name != home_broker,  # the home broker first
    )
    for name in names:
        fence = _fence_at(name, parked_halves, connections, epoch)
        # A new run fences the old one, whose halves then cannot win any more.
        header = RegisterWriter(
            writer=epoch.sink, run=f"{epoch.run}-gave-up@{home_broker}", fence=fence
        )
        try:
            _request_state(connections, name, RequestCode.REGISTER_WRITER, header)
        except WriterFenced:
            return  # a newer run has fenced this one already


def _fence_at(
    broker: str,
    parked_halves: Sequence[dict[str, ParkedHalves]],
    connections: BrokerConnections,
    epoch: SinkEpoch,
) -> int:
    """Return the fence of an attempt at this broker; if none has parked there, register."""
    for halves_by_broker in parked_halves:
        if broker in halves_by_broker:
            return halves_by_broker[broker].fence
    header = RegisterWriter(writer=epoch.sink, run=f"{epoch.run}@{broker}")
    return _request_state(connections, broker, RequestCode.REGISTER_WRITER, header).fence


def _decide_at_follower(
    connections: BrokerConnections, broker: str, sink: str, batch: int, plan: CommitPlan
) -> None:
    if _query_writer(connections, broker, sink).batch >= batch:
        return
    try:
        _decide_at(connections, broker, sink, batch, plan.followers[broker], is_last=plan.is_last)
    except RequestRefused as error:
        # Another task or driver may have propagated the same decision meanwhile.
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
    header = DecideBatch(writer=sink, batch=batch, fence=follower.fence, last=is_last)
    body = encode_body(BatchWinners(winners=winners, fingerprint=fingerprint))
    return decode_body(
        WriterState, connections.pipeline(broker).call(RequestCode.DECIDE_BATCH, header, body)
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
        return decode_body(WriterState, connections.pipeline(broker).call(code, header))
    except RequestRefused as error:
        if error.code == ResponseCode.TRANSACTION_FENCED:
            raise WriterFenced(
                f"sink {header.writer} has a newer run, so this one is stopped; nothing of it "
                f"becomes visible. Does the same query (or transactional.id) run twice? "
                f"({error.remark})"
            ) from error
        raise


def _translate_refusal(error: RequestRefused, epoch: SinkEpoch) -> Exception:
    if error.code == ResponseCode.TRANSACTION_FENCED:
        return WriterFenced(
            f"epoch {epoch.number} of sink {epoch.sink} cannot be decided by this run: a newer run "
            "has taken over. Does the same query (or transactional.id) run twice? "
            f"({error.remark})"
        )
    if error.code == ResponseCode.TRANSACTION_CONFLICT:
        return WriterFenced(
            f"epoch {epoch.number} of sink {epoch.sink} was rolled back before it was decided; "
            f"start the query again, which writes the epoch again ({error.remark})"
        )
    return error


def _parse_plan(state: WriterState) -> CommitPlan:
    if not state.fingerprint:
        return CommitPlan()
    try:
        return msgspec.json.decode(state.fingerprint, type=CommitPlan)
    except msgspec.MsgspecError as error:
        raise ConfigError(
            f"the writer {state.writer} is used by another program than this sink: use another "
            "transactional.id"
        ) from error
