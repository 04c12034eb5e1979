"""The clients of the simulation: producers, drivers of writers, a consumer and an operator.

Each client is a process with a connection to the broker. It repeats requests that get no response
and loses its memory when it dies. The process that replaces it knows only the database.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from escrowmq.message.transaction import Verdict
from escrowmq.remoting.bodies import (
    BatchWinners,
    ConsumerEntry,
    HalfPositions,
    Heartbeat,
    ProducerEntry,
    WinningAttempt,
    WriterState,
    decode_body,
    encode_body,
)
from escrowmq.remoting.codes import RequestCode, ResponseCode
from escrowmq.remoting.connection import Response
from escrowmq.remoting.headers import (
    DecideBatch,
    EndTransaction,
    EndTransactions,
    Header,
    PullMessage,
    RegisterWriter,
    ResumeTransaction,
    SendMessageV2,
    SettleTransaction,
    WriterHeader,
)
from escrowmq.remoting.requests import Request
from escrowmq.testing.network import Endpoint
from tests.simulation.escrow_model import QUEUES, HalfPosition, Message, Queue

if TYPE_CHECKING:
    from tests.simulation.escrow_simulation import Simulation

GROUP = "p"
TIMEOUT_MS = 300
HEARTBEAT_INTERVAL_S = 1
NEVER_S = -1e9

# How a producer ends a transaction. "contradicted" sends the opposite verdict after a success.
EndMode = Literal["acknowledged", "one way", "never", "contradicted"]


@dataclass
class PendingRequest:
    """A request that is repeated until it gets a final response or no attempt is left."""

    code: int
    fields: Header
    body: bytes
    on_response: Callable[[Response], bool]  # returns whether the response is final
    on_failure: Callable[[], None] = lambda: None
    attempts_left: int = 40
    next_attempt_s: float = 0.0
    is_in_flight: bool = False


class Client:
    """A process with at most one connection to the broker."""

    def __init__(self, simulation: Simulation, name: str) -> None:
        self.simulation = simulation
        self.name = name
        self.endpoint: Endpoint | None = None
        self.is_alive = True
        self.pending_requests: list[PendingRequest] = []
        self._in_flight: dict[int, PendingRequest] = {}  # by opaque
        self._timers: list[tuple[float, Callable[[], None]]] = []
        self._heartbeat_s = NEVER_S

    # --- connection ------------------------------------------------------------------------------

    def act(self) -> None:
        """Do what is due. The simulation calls this once per step while the process is alive."""
        now_s = self.simulation.clock.elapsed_s()
        if self.endpoint is None:
            self.endpoint = self.simulation.connect(self)
            self._heartbeat_s = NEVER_S
        if self.endpoint is None:
            return
        if now_s - self._heartbeat_s > HEARTBEAT_INTERVAL_S:
            self._heartbeat_s = now_s
            self._send_heartbeat(self.endpoint)
        for failure in self.endpoint.connection.expire(now_s=now_s):
            self._schedule_retry(failure.call.opaque)
        due_actions = [action for due_s, action in self._timers if due_s <= now_s]
        self._timers = [(due_s, action) for due_s, action in self._timers if due_s > now_s]
        for action in due_actions:
            action()
        due_requests = [
            pending
            for pending in self.pending_requests
            if not pending.is_in_flight and pending.next_attempt_s <= now_s
        ]
        for pending in due_requests:
            self._send(pending, now_s)
        if self.endpoint is not None:
            self.endpoint.flush()

    def heartbeat(self) -> Heartbeat | None:
        """Return the heartbeat of this client; None if it sends none."""
        return None

    def _send_heartbeat(self, endpoint: Endpoint) -> None:
        heartbeat = self.heartbeat()
        if heartbeat is not None:
            body = encode_body(heartbeat)
            endpoint.write(endpoint.connection.send_oneway(RequestCode.HEART_BEAT, None, body))

    def _send(self, pending: PendingRequest, now_s: float) -> None:
        if pending not in self.pending_requests:
            return
        if pending.attempts_left <= 0:
            self.pending_requests.remove(pending)
            pending.on_failure()
        elif self.endpoint is not None:
            pending.attempts_left -= 1
            call, data = self.endpoint.connection.call(
                pending.code, pending.fields, pending.body, deadline_s=now_s + TIMEOUT_MS / 1000
            )
            pending.is_in_flight = True
            self._in_flight[call.opaque] = pending
            self.endpoint.write(data)

    def _schedule_retry(self, opaque: int) -> None:
        pending = self._in_flight.pop(opaque, None)
        if pending is None:
            return
        pending.is_in_flight = False
        delay_s = self.simulation.rng.choice((0, 0.05, 0.2))
        pending.next_attempt_s = self.simulation.clock.elapsed_s() + delay_s

    def received(self, end: Endpoint, data: bytes) -> None:
        for event in end.events(data):
            if isinstance(event, Response):
                pending = self._in_flight.get(event.call.opaque)
                if pending is None:
                    continue
                self._schedule_retry(event.call.opaque)
                if pending.on_response(event) and pending in self.pending_requests:
                    self.pending_requests.remove(pending)
            elif isinstance(event, Request):
                self.handle_request(event)
        end.flush()

    def handle_request(self, request: Request[Any]) -> None:
        """Handle a request of the broker."""

    def closed(self, end: Endpoint) -> None:
        self.endpoint = None
        for failure in end.connection.close():
            self._schedule_retry(failure.call.opaque)

    def die(self) -> None:
        self.is_alive = False
        self.pending_requests.clear()
        self._in_flight.clear()
        self._timers.clear()
        if self.endpoint is not None:
            self.endpoint.connection.close()
            endpoint, self.endpoint = self.endpoint, None
            self.simulation.network.disconnect(endpoint)

    @property
    def is_idle(self) -> bool:
        return not self.pending_requests and not self._timers

    def schedule(self, delay_ms: int, action: Callable[[], None]) -> None:
        self._timers.append((self.simulation.clock.elapsed_s() + delay_ms / 1000, action))

    def start_request(self, pending: PendingRequest) -> None:
        self.pending_requests.append(pending)

    # --- requests of several kinds of clients ----------------------------------------------------

    def park(
        self,
        message: Message,
        on_parked: Callable[[HalfPosition], None],
        on_failure: Callable[[], None],
        extra_properties: str = "",
        size: int = 20,
    ) -> None:
        topic, queue_id = message.queue
        fields = SendMessageV2(
            producer_group=GROUP,
            topic=topic,
            default_topic="TBW102",
            queue_id=queue_id,
            properties=f"TRAN_MSG\x01true\x02PGROUP\x01{GROUP}\x02UNIQ_KEY\x01{message.key}\x02"
            + extra_properties,
        )

        def on_response(response: Response) -> bool:
            if response.command.code != ResponseCode.SUCCESS:
                return False
            fields = response.command.ext_fields
            position = int(fields["queueOffset"]), int(fields["msgId"][16:], 16)
            self.simulation.model.record_parked(message.key, position)
            on_parked(position)
            return True

        body = f"{message.key} ".encode().ljust(size, b".")
        self.start_request(
            PendingRequest(
                RequestCode.SEND_MESSAGE_V2, fields, body, on_response, on_failure, attempts_left=6
            )
        )

    def end(
        self,
        key: str,
        position: HalfPosition,
        verdict: Verdict,
        end_mode: EndMode,
        *,
        from_check: bool,
    ) -> None:
        fields = EndTransaction(
            producer_group=GROUP,
            tran_state_table_offset=position[0],
            commit_log_offset=position[1],
            commit_or_rollback=verdict,
            from_transaction_check=from_check,
            msg_id=key,
            transaction_id=key,
        )
        if end_mode == "one way":
            if self.endpoint is not None:
                self.endpoint.send_oneway(RequestCode.END_TRANSACTION, fields)
            return

        def on_response(response: Response) -> bool:
            code = response.command.code
            assert code != ResponseCode.TRANSACTION_CONFLICT, (
                f"{key}: the database's verdict {verdict.name} was refused: "
                f"{response.command.remark}"
            )
            if code == ResponseCode.SUCCESS:
                self.simulation.model.record_parked(key, position)
                self.simulation.model.record_state(key, response.command.ext_fields["state"])
                if end_mode == "contradicted":
                    opposite = Verdict.COMMIT if verdict is Verdict.ROLLBACK else Verdict.ROLLBACK
                    self.contradict(key, position, opposite)
            return code == ResponseCode.SUCCESS or self.has_expired(response, position)

        self.start_request(PendingRequest(RequestCode.END_TRANSACTION, fields, b"", on_response))

    def has_expired(self, response: Response, *positions: HalfPosition) -> bool:
        """Return whether one of these halves has expired, and assert that only then it is unknown.

        The broker cannot report the state of a half that the log no longer has.
        """
        has_expired = any(map(self.simulation.has_expired, positions))
        remark = response.command.remark
        is_unknown = remark.startswith(("the half at", "no half was parked"))
        assert has_expired or not is_unknown, f"{positions}: {remark}"
        return has_expired

    def contradict(self, key: str, position: HalfPosition, verdict: Verdict) -> None:
        """Send the opposite of the decision. The broker must refuse it."""
        fields = EndTransaction(
            producer_group=GROUP,
            tran_state_table_offset=position[0],
            commit_log_offset=position[1],
            commit_or_rollback=verdict,
        )

        def on_response(response: Response) -> bool:
            code = response.command.code
            assert code != ResponseCode.SUCCESS, f"{key} was decided, but {verdict.name} succeeded"
            return code == ResponseCode.TRANSACTION_CONFLICT or self.has_expired(response, position)

        self.start_request(PendingRequest(RequestCode.END_TRANSACTION, fields, b"", on_response))

    def end_many(self, transaction: str, positions: list[HalfPosition], verdict: Verdict) -> None:
        model = self.simulation.model
        fields = EndTransactions(producer_group=GROUP, commit_or_rollback=verdict)

        def on_response(response: Response) -> bool:
            code = response.command.code
            assert code != ResponseCode.TRANSACTION_CONFLICT, (
                f"{transaction}: the database's verdict {verdict.name} was refused: "
                f"{response.command.remark}"
            )
            if code == ResponseCode.SUCCESS:
                for key in model.members[transaction]:
                    if model.parked.get(key) in positions:
                        model.record_state(key, response.command.ext_fields["state"])
            return code == ResponseCode.SUCCESS or self.has_expired(response, *positions)

        body = encode_body(HalfPositions(halves=positions))
        self.start_request(PendingRequest(RequestCode.END_TRANSACTIONS, fields, body, on_response))

    def end_by_database(self, key: str, position: HalfPosition, end_mode: EndMode) -> None:
        """End a transaction with the database's verdict, after a check or for the operator."""
        model = self.simulation.model
        transaction = model.messages[key].transaction
        verdict = self.database_verdict(transaction)
        if verdict is Verdict.COMMIT and self.simulation.has_many_messages(key):
            self.end_many(transaction, model.database.positions[transaction], verdict)
        else:
            self.end(key, position, verdict, end_mode, from_check=True)

    def database_verdict(self, transaction: str) -> Verdict:
        producers = self.simulation.producers
        if any(transaction in producer.running for producer in producers if producer.is_alive):
            return Verdict.UNKNOWN
        # Write a tombstone unless it is committed, so that a late commit fails.
        is_committed = self.simulation.model.database.roll_back(transaction)
        return Verdict.COMMIT if is_committed else Verdict.ROLLBACK


class Producer(Client):
    """Parks messages, runs local transactions, sends verdicts and responds to checks."""

    def __init__(self, simulation: Simulation, name: str) -> None:
        super().__init__(simulation, name)
        self.running: set[str] = set()

    def heartbeat(self) -> Heartbeat:
        return Heartbeat(client_id=self.name, producer_data_set=[ProducerEntry(group_name=GROUP)])

    def die(self) -> None:
        self.running.clear()
        super().die()

    def begin(
        self,
        count: int = 1,
        *,
        commits: bool = True,
        end_mode: EndMode = "acknowledged",
        size: int = 20,
    ) -> str:
        """Begin a transaction with `count` messages. Return its name."""
        transaction = self.simulation.new_name(self.name)
        messages = [
            Message(f"{transaction}m{number}", QUEUES[number % len(QUEUES)], transaction)
            for number in range(count)
        ]
        self.simulation.model.add(messages)
        self.running.add(transaction)
        positions: dict[str, HalfPosition] = {}

        def on_parked(key: str, position: HalfPosition) -> None:
            positions[key] = position
            if len(positions) == count:
                longest_ms = 600 if self.simulation.has_unreliable_clients else 0
                delay_ms = self.simulation.rng.choice((0, 10, longest_ms))
                self.schedule(
                    delay_ms, lambda: self._decide(transaction, positions, commits, end_mode)
                )

        for message in messages:
            key = message.key
            self.park(
                message,
                lambda position, key=key: on_parked(key, position),  # type: ignore[misc]
                lambda: self._fail(transaction),
                size=size,
            )
        return transaction

    def _fail(self, transaction: str) -> None:
        self.running.discard(transaction)
        self.simulation.model.database.roll_back(transaction)

    def _decide(
        self,
        transaction: str,
        positions: dict[str, HalfPosition],
        commits: bool,
        end_mode: EndMode,
    ) -> None:
        """Run the local transaction and send the verdict."""
        database = self.simulation.model.database
        self.running.discard(transaction)
        if commits:
            is_committed = database.commit(transaction, positions.values())
        else:
            is_committed = database.roll_back(transaction)
        if end_mode == "never":
            return
        verdict = Verdict.COMMIT if is_committed else Verdict.ROLLBACK
        if len(positions) > 1:
            self.end_many(transaction, list(positions.values()), verdict)
            return
        [(key, position)] = positions.items()
        self.end(key, position, verdict, end_mode, from_check=False)

    def handle_request(self, request: Request[Any]) -> None:
        if request.head.code != RequestCode.CHECK_TRANSACTION_STATE:
            return
        simulation = self.simulation
        if simulation.ignores_checks or (
            simulation.has_unreliable_clients and simulation.rng.random() < 0.3
        ):
            return
        fields = request.head.fields
        position = fields.tran_state_table_offset, fields.commit_log_offset
        end_mode: EndMode = "one way" if simulation.rng.random() < 0.6 else "acknowledged"
        self.end_by_database(fields.transaction_id, position, end_mode)


@dataclass
class TaskAttempt:
    """An attempt at a task of a batch."""

    name: str
    task: int
    messages: list[Message]
    parked: dict[str, HalfPosition] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        return len(self.parked) == len(self.messages)


class WriterDriver(Client):
    """Writes batches of a writer until all are written or another driver replaces it."""

    def __init__(self, simulation: Simulation, name: str, writer: str, batches: int) -> None:
        super().__init__(simulation, name)
        self.writer = writer
        self.batches_left = batches
        self.fence = 0
        self.batch = 0
        self._register()

    @property
    def is_idle(self) -> bool:
        return super().is_idle and (self.batches_left <= 0 or not self.is_alive)

    def heartbeat(self) -> Heartbeat:
        return Heartbeat(client_id=self.name, producer_data_set=[ProducerEntry(group_name="w")])

    def _register(self) -> None:
        def on_response(response: Response) -> bool:
            if response.command.code != ResponseCode.SUCCESS:
                return False
            state = decode_body(WriterState, response.body)
            self.simulation.model.record_writer(state)
            self.fence, self.batch = state.fence, state.batch + 1
            self._begin_batch()
            return True

        fields = RegisterWriter(writer=self.writer)
        self.start_request(PendingRequest(RequestCode.REGISTER_WRITER, fields, b"", on_response))

    def _begin_batch(self) -> None:
        """Begin a batch with two tasks. The first task often has two attempts at the same time."""
        if self.batches_left <= 0:
            return
        rng, batch = self.simulation.rng, self.batch
        attempts: list[TaskAttempt] = []
        for task in (0, 0, 1) if rng.random() < 0.7 else (0, 1):
            name = self.simulation.new_name(self.name)
            messages = [
                Message(
                    f"{name}m{number}",
                    rng.choice(QUEUES),
                    writer=self.writer,
                    batch=batch,
                    attempt=name,
                )
                for number in range(rng.randint(1, 2))
            ]
            self.simulation.model.add(messages)
            attempts.append(TaskAttempt(name, task, messages))
        for attempt in attempts:
            self._park_all(attempt, lambda: self._decide_if_complete(batch, attempts))

    def _park_all(self, attempt: TaskAttempt, on_each_parked: Callable[[], None]) -> None:
        extra_properties = (
            f"ESCROW_WRITER\x01{self.writer}\x02ESCROW_BATCH\x01{self.batch}\x02"
            f"ESCROW_ATTEMPT\x01{attempt.name}\x02ESCROW_FENCE\x01{self.fence}\x02"
        )
        for message in attempt.messages:

            def on_parked(position: HalfPosition, key: str = message.key) -> None:
                attempt.parked[key] = position
                on_each_parked()

            self.park(message, on_parked, self._register_again, extra_properties)

    def _register_again(self) -> None:
        """Register again after a failure: all earlier attempts lose."""
        self.pending_requests.clear()
        self._in_flight.clear()
        self._register()

    def _decide_if_complete(self, batch: int, attempts: list[TaskAttempt]) -> None:
        winners = {attempt.task: attempt for attempt in reversed(attempts) if attempt.is_complete}
        if batch != self.batch or len(winners) < 2:
            return
        self.batch = -1  # decided; attempts that complete later change nothing
        for attempt in attempts:
            if attempt not in winners.values():
                self._abort(attempt)
        self._decide(batch, list(winners.values()))

    def _abort(self, attempt: TaskAttempt) -> None:
        """Sometimes roll a lost attempt back before the batch decision does so."""
        if self.simulation.rng.random() < 0.5:
            for key, position in attempt.parked.items():
                self.end(key, position, Verdict.ROLLBACK, "one way", from_check=False)

    def _decide(self, batch: int, winners: list[TaskAttempt]) -> None:
        fields = DecideBatch(writer=self.writer, batch=batch, fence=self.fence)
        body = BatchWinners(
            winners=[
                WinningAttempt(attempt=winner.name, count=len(winner.messages))
                for winner in winners
            ]
        )

        def on_response(response: Response) -> bool:
            code = response.command.code
            if code == ResponseCode.SUCCESS:
                state = decode_body(WriterState, response.body)
                self.simulation.model.record_writer(state)
                if state.batch == batch:
                    names = {winner.attempt for winner in state.winners}
                    assert names == {winner.name for winner in winners}, f"batch {batch}: {names}"
                self.batches_left -= 1
                self.batch = state.batch + 1
                self._begin_batch()
                return True
            if code == ResponseCode.TRANSACTION_FENCED:
                self.batches_left = 0  # another driver has replaced this one
                return True
            if code == ResponseCode.TRANSACTION_CONFLICT:
                self._register_again()
                return True
            return False

        self.start_request(
            PendingRequest(RequestCode.DECIDE_BATCH, fields, encode_body(body), on_response)
        )
        query = WriterHeader(writer=self.writer)
        self.start_request(
            PendingRequest(
                RequestCode.QUERY_WRITER, query, b"", self._record_state, attempts_left=1
            )
        )

    def _record_state(self, response: Response) -> bool:
        if response.command.code == ResponseCode.SUCCESS:
            self.simulation.model.record_writer(decode_body(WriterState, response.body))
        return True


class Consumer(Client):
    """Pulls every queue from its beginning and remembers all messages."""

    def __init__(self, simulation: Simulation, name: str) -> None:
        super().__init__(simulation, name)
        self.next_offsets: dict[Queue, int] = dict.fromkeys(QUEUES, 0)
        # The key at each queue offset.
        self.received_keys: dict[Queue, dict[int, str]] = {queue: {} for queue in QUEUES}

    @property
    def is_idle(self) -> bool:
        return True

    def heartbeat(self) -> Heartbeat:
        return Heartbeat(
            client_id=self.name, consumer_data_set=[ConsumerEntry(group_name=self.name)]
        )

    def act(self) -> None:
        pulled_bodies = {pending.body for pending in self.pending_requests}
        for queue in QUEUES:
            if _pull_body(queue) not in pulled_bodies:
                self._pull(queue)
        super().act()

    def _pull(self, queue: Queue) -> None:
        begin_offset = self.next_offsets[queue]
        fields = PullMessage(
            consumer_group=self.name,
            topic=queue[0],
            queue_id=queue[1],
            queue_offset=begin_offset,
            max_msg_nums=self.simulation.rng.choice((1, 3, 32)),
            sys_flag=self.simulation.rng.choice((4, 6)),
            suspend_timeout_millis=250,
            subscription="*",
            expression_type="TAG",
        )

        def on_response(response: Response) -> bool:
            code, fields = response.command.code, response.command.ext_fields
            if begin_offset == self.next_offsets[queue] and code in (
                ResponseCode.SUCCESS,
                ResponseCode.PULL_OFFSET_MOVED,
            ):
                visible = self.simulation.model.visible[queue]
                for offset, key in _decode_pulled(bytes(response.body)):
                    self.received_keys[queue][offset] = key
                    assert offset in visible, f"{key} at {offset} of {queue} was never visible"
                    visible_key, _ = visible[offset]
                    assert visible_key == key, (
                        f"{queue} {offset}: received {key} instead of {visible_key}"
                    )
                self.next_offsets[queue] = int(fields["nextBeginOffset"])
            return True

        self.start_request(
            PendingRequest(
                RequestCode.PULL_MESSAGE, fields, _pull_body(queue), on_response, attempts_left=2
            )
        )

    def forget_lost_messages(self) -> None:
        """Prepare to pull the messages again that a power cut has removed or replaced."""
        for queue, visible in self.simulation.model.visible.items():
            received = self.received_keys[queue]
            lost_offsets = [
                offset
                for offset, key in received.items()
                if offset not in visible or visible[offset][0] != key
            ]
            for offset in lost_offsets:
                del received[offset]
            self.next_offsets[queue] = min([self.next_offsets[queue], *lost_offsets])

    def check_received_all(self) -> None:
        """Assert that all messages were received, except those that expired before."""
        assert self.simulation.process is not None
        for queue, visible in self.simulation.model.visible.items():
            begin = self.simulation.process.store.min_offset(*queue)
            missing_keys = [
                key
                for offset, (key, _) in visible.items()
                if offset >= begin and offset not in self.received_keys[queue]
            ]
            assert not missing_keys, f"{self.name} never received {missing_keys} of {queue}"


def _pull_body(queue: Queue) -> bytes:
    """Return a body that identifies the queue of a pending pull. A broker ignores it."""
    return b"%d" % QUEUES.index(queue)


def _decode_pulled(body: bytes) -> list[tuple[int, str]]:
    """Return queue offset and key of each record in the body of a pull response."""
    messages = []
    position = 0
    while position < len(body):
        record = body[position:]
        size = int.from_bytes(record[:4], "big")
        queue_offset = int.from_bytes(record[20:28], "big")
        messages.append((queue_offset, record[88:size].split(b" ")[0].decode()))
        position += size
    return messages


class Operator(Client):
    """Decides stranded transactions with the database's verdict, or resumes their checks."""

    def act(self) -> None:
        super().act()
        process, rng = self.simulation.process, self.simulation.rng
        if process is None or self.endpoint is None or rng.random() > 0.3:
            return
        transactions = process.broker.transactions
        for half in list(transactions.coordinator.halves):
            key = half.key.decode()
            if not half.is_stranded or self.pending_requests:
                continue
            message = self.simulation.model.messages[key]
            position = half.queue_offset, half.log_offset
            if message.writer:
                assert half.attempt is not None
                _, batch, _, fence = half.attempt
                if transactions.coordinator.writers.has_lost(message.writer, batch, fence):
                    self.end(key, position, Verdict.ROLLBACK, "one way", from_check=False)
            elif rng.random() < 0.5:
                self._resume(key)
            elif self.simulation.has_many_messages(key):
                self.end_by_database(key, position, "acknowledged")
            else:
                self._settle(key)
        self.endpoint.flush()

    def _resume(self, key: str) -> None:
        self.simulation.model.resumed.add(key)
        fields = ResumeTransaction(
            transaction_id=key, reason="producer is back", operator=self.name
        )
        self.start_request(
            PendingRequest(
                RequestCode.RESUME_TRANSACTION, fields, b"", lambda response: True, attempts_left=2
            )
        )

    def _settle(self, key: str) -> None:
        model = self.simulation.model
        verdict = self.database_verdict(model.messages[key].transaction)
        if verdict is Verdict.UNKNOWN:
            return
        fields = SettleTransaction(
            transaction_id=key,
            commit_or_rollback=verdict,
            reason="read the database",
            operator=self.name,
        )

        def on_response(response: Response) -> bool:
            code = response.command.code
            assert code != ResponseCode.TRANSACTION_CONFLICT, f"{key}: {response.command.remark}"
            if code == ResponseCode.SUCCESS and key in model.parked:
                model.record_state(key, response.command.ext_fields["state"])
            return True

        self.start_request(
            PendingRequest(
                RequestCode.SETTLE_TRANSACTION, fields, b"", on_response, attempts_left=2
            )
        )
