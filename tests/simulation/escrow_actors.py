"""The clients of a simulated world: producers, drivers of writers, consumers, an operator.

Each is a process with a connection to the broker. It repeats requests that are not answered, loses
its memory when it dies, and is replaced by a process that only knows the database.
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
    SendMessage,
    SettleTransaction,
    WriterHeader,
)
from escrowmq.remoting.requests import Request
from escrowmq.testing.network import Endpoint
from tests.simulation.escrow_truth import QUEUES, Message, Place, Queue

if TYPE_CHECKING:
    from tests.simulation.escrow_world import World

GROUP = "p"
PATIENCE_MS = 300
How = Literal["acknowledged", "one way", "forgotten", "contradicted"]


@dataclass
class Errand:
    """One request, repeated until it gets a final response."""

    code: int
    fields: Header
    body: bytes
    done: Callable[[Response], bool]
    gave_up: Callable[[], None] = lambda: None
    tries: int = 40
    next_s: float = 0.0
    waits: bool = False


class Client:
    """A process with at most one connection to the broker."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.line: Endpoint | None = None
        self.is_alive = True
        self.errands: list[Errand] = []
        self._waiting: dict[int, Errand] = {}
        self._later: list[tuple[float, Callable[[], None]]] = []
        self._beat_s = -1e9

    # --- connection ------------------------------------------------------------------------------

    def act(self) -> None:
        """Act once per step, while the process lives."""
        now_s = self.world.clock.elapsed_s()
        if self.line is None:
            self.line = self.world.connect(self)
            self._beat_s = -1e9
        if self.line is None:
            return
        if now_s - self._beat_s > 1:
            self._beat_s = now_s
            self.heartbeat(self.line)
        for failed in self.line.connection.expire(now_s=now_s):
            self._try_again(failed.call.opaque)
        due = [step for at_s, step in self._later if at_s <= now_s]
        self._later = [(at_s, step) for at_s, step in self._later if at_s > now_s]
        for step in due:
            step()
        for errand in [one for one in self.errands if not one.waits and one.next_s <= now_s]:
            self._send(errand, now_s)
        if self.line is not None:
            self.line.flush()

    def heartbeat(self, line: Endpoint) -> None:
        pass

    def _send(self, errand: Errand, now_s: float) -> None:
        if errand not in self.errands:
            return
        if errand.tries <= 0:
            self.errands.remove(errand)
            errand.gave_up()
        elif self.line is not None:
            errand.tries -= 1
            call, data = self.line.connection.call(
                errand.code, errand.fields, errand.body, deadline_s=now_s + PATIENCE_MS / 1000
            )
            errand.waits = True
            self._waiting[call.opaque] = errand
            self.line.write(data)

    def _try_again(self, opaque: int) -> None:
        errand = self._waiting.pop(opaque, None)
        if errand is None:
            return
        errand.waits = False
        errand.next_s = self.world.clock.elapsed_s() + self.world.rng.choice((0, 0.05, 0.2))

    def received(self, end: Endpoint, data: bytes) -> None:
        for event in end.events(data):
            if isinstance(event, Response):
                errand = self._waiting.get(event.call.opaque)
                if errand is None:
                    continue
                self._try_again(event.call.opaque)
                if errand.done(event) and errand in self.errands:
                    self.errands.remove(errand)
            elif isinstance(event, Request):
                self.asked(event)
        end.flush()

    def asked(self, request: Request[Any]) -> None:
        pass

    def closed(self, end: Endpoint) -> None:
        self.line = None
        for failed in end.connection.close():
            self._try_again(failed.call.opaque)

    def die(self) -> None:
        self.is_alive = False
        self.errands.clear()
        self._waiting.clear()
        self._later.clear()
        if self.line is not None:
            self.line.connection.close()
            line, self.line = self.line, None
            self.world.network.disconnect(line)

    @property
    def is_idle(self) -> bool:
        return not self.errands and not self._later

    def later(self, ms: int, step: Callable[[], None]) -> None:
        self._later.append((self.world.clock.elapsed_s() + ms / 1000, step))

    def run(self, errand: Errand) -> None:
        self.errands.append(errand)

    # --- requests of most clients ----------------------------------------------------------------

    def park(
        self,
        message: Message,
        done: Callable[[Place], None],
        gave_up: Callable[[], None],
        extra: str = "",
        size: int = 20,
    ) -> None:
        topic, queue_id = message.queue
        fields = SendMessage(
            producer_group=GROUP,
            topic=topic,
            default_topic="TBW102",
            queue_id=queue_id,
            properties=f"TRAN_MSG\x01true\x02PGROUP\x01{GROUP}\x02UNIQ_KEY\x01{message.key}\x02{extra}",
        )

        def answered(answer: Response) -> bool:
            if answer.command.code != ResponseCode.SUCCESS:
                return False
            fields = answer.command.ext_fields
            place = int(fields["queueOffset"]), int(fields["msgId"][16:], 16)
            self.world.truth.was_parked(message.key, place)
            done(place)
            return True

        body = f"{message.key} ".encode().ljust(size, b".")
        self.run(Errand(RequestCode.SEND_MESSAGE, fields, body, answered, gave_up, tries=6))

    def end(self, key: str, place: Place, verdict: Verdict, how: How, *, checked: bool) -> None:
        fields = EndTransaction(
            producer_group=GROUP,
            tran_state_table_offset=place[0],
            commit_log_offset=place[1],
            commit_or_rollback=verdict,
            from_transaction_check=checked,
            msg_id=key,
            transaction_id=key,
        )
        if how == "one way":
            if self.line is not None:
                self.line.send_oneway(RequestCode.END_TRANSACTION, fields)
            return

        def answered(answer: Response) -> bool:
            code = answer.command.code
            assert code != ResponseCode.TRANSACTION_CONFLICT, (
                f"{key}: {verdict.name} is its database's word: {answer.command.remark}"
            )
            if code == ResponseCode.SUCCESS:
                self.world.truth.was_parked(key, place)
                self.world.truth.tell(key, answer.command.ext_fields["state"])
                if how == "contradicted":
                    other = Verdict.COMMIT if verdict is Verdict.ROLLBACK else Verdict.ROLLBACK
                    self.contradict(key, place, other)
            return code == ResponseCode.SUCCESS or self.is_lost(answer, place)

        self.run(Errand(RequestCode.END_TRANSACTION, fields, b"", answered))

    def is_lost(self, answer: Response, *places: Place) -> bool:
        """Whether the broker may have lost this half: the log does not hold it any more."""
        is_gone = any(map(self.world.is_gone, places))
        remark = answer.command.remark
        is_unknown = remark.startswith(("the half at", "no half was parked"))
        assert is_gone or not is_unknown, f"{places}: {remark}"
        return is_gone

    def contradict(self, key: str, place: Place, verdict: Verdict) -> None:
        """Send the opposite of what was decided: it is refused, and nothing changes."""
        fields = EndTransaction(
            producer_group=GROUP,
            tran_state_table_offset=place[0],
            commit_log_offset=place[1],
            commit_or_rollback=verdict,
        )

        def answered(answer: Response) -> bool:
            code = answer.command.code
            assert code != ResponseCode.SUCCESS, f"{key} was decided, then {verdict.name} as well"
            return code == ResponseCode.TRANSACTION_CONFLICT or self.is_lost(answer, place)

        self.run(Errand(RequestCode.END_TRANSACTION, fields, b"", answered))

    def end_many(self, transaction: str, places: list[Place], verdict: Verdict) -> None:
        truth = self.world.truth
        fields = EndTransactions(producer_group=GROUP, commit_or_rollback=verdict)

        def answered(answer: Response) -> bool:
            code = answer.command.code
            assert code != ResponseCode.TRANSACTION_CONFLICT, (
                f"{transaction}: {verdict.name} is its database's word: {answer.command.remark}"
            )
            if code == ResponseCode.SUCCESS:
                for key in truth.members[transaction]:
                    if truth.parked.get(key) in places:
                        truth.tell(key, answer.command.ext_fields["state"])
            return code == ResponseCode.SUCCESS or self.is_lost(answer, *places)

        body = encode_body(HalfPositions(halves=places))
        self.run(Errand(RequestCode.END_TRANSACTIONS, fields, body, answered))

    def end_as_the_database_says(self, key: str, place: Place, how: How) -> None:
        """Decide as the database says: for answers to checks, and for the operator."""
        truth = self.world.truth
        transaction = truth.messages[key].transaction
        verdict = self.verdict_on(transaction)
        if verdict is Verdict.COMMIT and self.world.is_one_of_many(key):
            self.end_many(transaction, truth.database.places[transaction], verdict)
        else:
            self.end(key, place, verdict, how, checked=True)

    def verdict_on(self, transaction: str) -> Verdict:
        if any(transaction in one.running for one in self.world.producers if one.is_alive):
            return Verdict.UNKNOWN
        # Write a tombstone unless it is committed, so that a late commit fails.
        committed = self.world.truth.database.roll_back(transaction)
        return Verdict.COMMIT if committed else Verdict.ROLLBACK


class Producer(Client):
    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name)
        self.running: set[str] = set()

    def heartbeat(self, line: Endpoint) -> None:
        beat = Heartbeat(client_id=self.name, producer_data_set=[ProducerEntry(group_name=GROUP)])
        line.write(line.connection.send_oneway(RequestCode.HEART_BEAT, None, encode_body(beat)))

    def die(self) -> None:
        self.running.clear()
        super().die()

    def begin(
        self, count: int = 1, *, commits: bool = True, how: How = "acknowledged", size: int = 20
    ) -> str:
        """Begin a transaction with this number of messages."""
        transaction = self.world.new_name(self.name)
        messages = [
            Message(f"{transaction}.{number}", QUEUES[number % len(QUEUES)], transaction)
            for number in range(count)
        ]
        self.world.truth.add(messages)
        self.running.add(transaction)
        places: dict[str, Place] = {}

        def parked(key: str, place: Place) -> None:
            places[key] = place
            if len(places) == count:
                delay_ms = self.world.rng.choice((0, 10, 600 if self.world.is_wild else 0))
                self.later(delay_ms, lambda: self._decide(transaction, places, commits, how))

        for message in messages:
            key = message.key
            self.park(
                message,
                lambda place, key=key: parked(key, place),  # type: ignore[misc]
                lambda: self._fail(transaction),
                size=size,
            )
        return transaction

    def _fail(self, transaction: str) -> None:
        self.running.discard(transaction)
        self.world.truth.database.roll_back(transaction)

    def _decide(self, transaction: str, places: dict[str, Place], commits: bool, how: How) -> None:
        """Run the local transaction and send the verdict."""
        database = self.world.truth.database
        self.running.discard(transaction)
        if commits:
            committed = database.commit(transaction, places.values())
        else:
            committed = database.roll_back(transaction)
        if how == "forgotten":
            return
        verdict = Verdict.COMMIT if committed else Verdict.ROLLBACK
        if len(places) > 1:
            self.end_many(transaction, list(places.values()), verdict)
            return
        [(key, place)] = places.items()
        self.end(key, place, verdict, how, checked=False)

    def asked(self, request: Request[Any]) -> None:
        if request.head.code != RequestCode.CHECK_TRANSACTION_STATE:
            return
        if self.world.is_silent or (self.world.is_wild and self.world.rng.random() < 0.3):
            return  # too busy
        fields = request.head.fields
        place = fields.tran_state_table_offset, fields.commit_log_offset
        how: How = "one way" if self.world.rng.random() < 0.6 else "acknowledged"
        self.end_as_the_database_says(fields.transaction_id, place, how)


@dataclass
class Try:
    """One attempt at one task of a batch."""

    name: str
    task: int
    messages: list[Message]
    parked: dict[str, Place] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        return len(self.parked) == len(self.messages)


class Driver(Client):
    """Writes batches of one writer until it has written enough or another driver replaces it."""

    def __init__(self, world: World, name: str, writer: str, batches: int) -> None:
        super().__init__(world, name)
        self.writer = writer
        self.left = batches
        self.fence = 0
        self.batch = 0
        self._register()

    @property
    def is_idle(self) -> bool:
        return super().is_idle and (self.left <= 0 or not self.is_alive)

    def heartbeat(self, line: Endpoint) -> None:
        beat = Heartbeat(client_id=self.name, producer_data_set=[ProducerEntry(group_name="w")])
        line.write(line.connection.send_oneway(RequestCode.HEART_BEAT, None, encode_body(beat)))

    def _register(self) -> None:
        def answered(answer: Response) -> bool:
            if answer.command.code != ResponseCode.SUCCESS:
                return False
            state = decode_body(WriterState, answer.body)
            self.world.truth.tell_writer(state)
            self.fence, self.batch = state.fence, state.batch + 1
            self._begin_batch()
            return True

        fields = RegisterWriter(writer=self.writer)
        self.run(Errand(RequestCode.REGISTER_WRITER, fields, b"", answered))

    def _begin_batch(self) -> None:
        """Begin a batch with two tasks, one of them with two attempts at the same time."""
        if self.left <= 0:
            return
        rng, batch = self.world.rng, self.batch
        tries: list[Try] = []
        for task in (0, 0, 1) if rng.random() < 0.7 else (0, 1):
            name = self.world.new_name(self.name)
            messages = [
                Message(
                    f"{name}.{number}",
                    rng.choice(QUEUES),
                    writer=self.writer,
                    batch=batch,
                    attempt=name,
                )
                for number in range(rng.randint(1, 2))
            ]
            self.world.truth.add(messages)
            tries.append(Try(name, task, messages))
        for one in tries:
            self._park_all(one, lambda: self._decide_if_complete(batch, tries))

    def _park_all(self, one: Try, parked: Callable[[], None]) -> None:
        extra = (
            f"ESCROW_WRITER\x01{self.writer}\x02ESCROW_BATCH\x01{self.batch}\x02"
            f"ESCROW_ATTEMPT\x01{one.name}\x02ESCROW_FENCE\x01{self.fence}\x02"
        )
        for message in one.messages:

            def done(place: Place, key: str = message.key) -> None:
                one.parked[key] = place
                parked()

            self.park(message, done, self._start_over, extra)

    def _start_over(self) -> None:
        """Register again after a failed task: all earlier attempts lose."""
        self.errands.clear()
        self._waiting.clear()
        self._register()

    def _decide_if_complete(self, batch: int, tries: list[Try]) -> None:
        winners = {one.task: one for one in reversed(tries) if one.is_complete}
        if batch != self.batch or len(winners) < 2:
            return
        self.batch = -1  # decided; later attempts change nothing
        for one in tries:
            if one not in winners.values():
                self._abort(one)
        self._decide(batch, list(winners.values()))

    def _abort(self, one: Try) -> None:
        """Roll a lost attempt back, as the batch decision will do anyway."""
        if self.world.rng.random() < 0.5:
            for key, place in one.parked.items():
                self.end(key, place, Verdict.ROLLBACK, "one way", checked=False)

    def _decide(self, batch: int, winners: list[Try]) -> None:
        fields = DecideBatch(writer=self.writer, batch=batch, fence=self.fence)
        body = BatchWinners(
            winners=[WinningAttempt(attempt=one.name, count=len(one.messages)) for one in winners]
        )

        def answered(answer: Response) -> bool:
            code = answer.command.code
            if code == ResponseCode.SUCCESS:
                state = decode_body(WriterState, answer.body)
                self.world.truth.tell_writer(state)
                if state.batch == batch:
                    won = {winner.attempt for winner in state.winners}
                    assert won == {one.name for one in winners}, f"{won} won batch {batch}"
                self.left -= 1
                self.batch = state.batch + 1
                self._begin_batch()
                return True
            if code == ResponseCode.TRANSACTION_FENCED:
                self.left = 0  # another driver has replaced this one
                return True
            if code == ResponseCode.TRANSACTION_CONFLICT:
                self._start_over()
                return True
            return False

        self.run(Errand(RequestCode.DECIDE_BATCH, fields, encode_body(body), answered))
        query = WriterHeader(writer=self.writer)
        self.run(Errand(RequestCode.QUERY_WRITER, query, b"", self._hear_state, tries=1))

    def _hear_state(self, answer: Response) -> bool:
        if answer.command.code == ResponseCode.SUCCESS:
            self.world.truth.tell_writer(decode_body(WriterState, answer.body))
        return True


class Consumer(Client):
    """Pulls every queue from its beginning and remembers all messages."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name)
        self.positions: dict[Queue, int] = dict.fromkeys(QUEUES, 0)
        self.got: dict[Queue, dict[int, str]] = {queue: {} for queue in QUEUES}

    @property
    def is_idle(self) -> bool:
        return True

    def heartbeat(self, line: Endpoint) -> None:
        beat = Heartbeat(
            client_id=self.name, consumer_data_set=[ConsumerEntry(group_name=self.name)]
        )
        line.write(line.connection.send_oneway(RequestCode.HEART_BEAT, None, encode_body(beat)))

    def act(self) -> None:
        for queue in QUEUES:
            if not any(errand.body == b"%d" % QUEUES.index(queue) for errand in self.errands):
                self._pull(queue)
        super().act()

    def _pull(self, queue: Queue) -> None:
        fields = PullMessage(
            consumer_group=self.name,
            topic=queue[0],
            queue_id=queue[1],
            queue_offset=self.positions[queue],
            max_msg_nums=self.world.rng.choice((1, 3, 32)),
            sys_flag=self.world.rng.choice((4, 6)),
            suspend_timeout_millis=250,
            subscription="*",
            expression_type="TAG",
        )
        position = self.positions[queue]

        def answered(answer: Response) -> bool:
            code, fields = answer.command.code, answer.command.ext_fields
            if position == self.positions[queue] and code in (
                ResponseCode.SUCCESS,
                ResponseCode.PULL_OFFSET_MOVED,
            ):
                for offset, key in _pulled(bytes(answer.body)):
                    self.got[queue][offset] = key
                    seen = self.world.truth.seen[queue].get(offset)
                    assert seen is not None, f"{key} at {offset} of {queue} was never there"
                    assert seen[0] == key, f"{queue} {offset}: {key} came, {seen[0]} is there"
                self.positions[queue] = int(fields["nextBeginOffset"])
            return True

        # The body identifies the errand; a broker ignores it.
        body = b"%d" % QUEUES.index(queue)
        self.run(Errand(RequestCode.PULL_MESSAGE, fields, body, answered, tries=2))

    def rewind(self) -> None:
        """After a power cut, read messages again that were not durable: they may have changed."""
        for queue, seen in self.world.truth.seen.items():
            mine = self.got[queue]
            changed = [at for at in mine if at not in seen or seen[at][0] != mine[at]]
            for at in changed:
                del mine[at]
            self.positions[queue] = min([self.positions[queue], *changed])

    def judge(self) -> None:
        """Assert that all messages were received, except those that expired before."""
        assert self.world.process is not None
        for queue, seen in self.world.truth.seen.items():
            begin = self.world.process.store.min_offset(*queue)
            missing = [
                key for at, (key, _) in seen.items() if at >= begin and at not in self.got[queue]
            ]
            assert not missing, f"{self.name} never got {missing} of {queue}"


def _pulled(body: bytes) -> list[tuple[int, str]]:
    found, at = [], 0
    while at < len(body):
        size = int.from_bytes(body[at : at + 4], "big")
        offset = int.from_bytes(body[at + 20 : at + 28], "big")
        found.append((offset, body[at + 88 : at + size].split(b" ")[0].decode()))
        at += size
    return found


class Operator(Client):
    """Decides stranded transactions as the database says, or resumes their checks."""

    def act(self) -> None:
        super().act()
        process, rng = self.world.process, self.world.rng
        if process is None or self.line is None or rng.random() > 0.3:
            return
        transactions = process.broker.transactions
        for half in list(transactions.coordinator.halves):
            key = half.key.decode()
            if not half.is_stranded or self.errands:
                continue
            message = self.world.truth.messages[key]
            place = half.queue_offset, half.log_offset
            if message.writer:
                assert half.attempt is not None
                _, batch, _, fence = half.attempt
                if transactions.coordinator.writers.has_lost(message.writer, batch, fence):
                    self.end(key, place, Verdict.ROLLBACK, "one way", checked=False)
            elif rng.random() < 0.5:
                self._resume(key)
            elif self.world.is_one_of_many(key):
                self.end_as_the_database_says(key, place, "acknowledged")
            else:
                self._settle(key)
        self.line.flush()

    def _resume(self, key: str) -> None:
        self.world.truth.again.add(key)
        fields = ResumeTransaction(transaction_id=key, reason="asked to", operator=self.name)
        self.run(Errand(RequestCode.RESUME_TRANSACTION, fields, b"", lambda answer: True, tries=2))

    def _settle(self, key: str) -> None:
        truth = self.world.truth
        verdict = self.verdict_on(truth.messages[key].transaction)
        if verdict is Verdict.UNKNOWN:
            return
        fields = SettleTransaction(
            transaction_id=key,
            commit_or_rollback=verdict,
            reason="looked it up",
            operator=self.name,
        )

        def answered(answer: Response) -> bool:
            code = answer.command.code
            assert code != ResponseCode.TRANSACTION_CONFLICT, f"{key}: {answer.command.remark}"
            if code == ResponseCode.SUCCESS and key in truth.parked:
                truth.tell(key, answer.command.ext_fields["state"])
            return True

        self.run(Errand(RequestCode.SETTLE_TRANSACTION, fields, b"", answered, tries=2))
