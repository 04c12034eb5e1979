"""SIGTERM and Ctrl-C: every way to consume ends, and commits what is done. With real processes."""

from __future__ import annotations

import asyncio
import signal
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from escrowmq import Consumer
from tests.support.brokers import Server
from tests.support.clients import receive, send
from tests.support.programs import Program, run_program

pytestmark = pytest.mark.slow

BODIES = [b"1", b"2", b"3"]

# Each program prints a line for each message. `topic` is also its group.
BLOCKING = {
    "iteration": """
        with Consumer(address, group=topic, subscribe=topic) as consumer:
            for message in consumer:
                show(message)
    """,
    "receive": """
        with Consumer(address, group=topic, subscribe=topic) as consumer:
            while True:
                show(consumer.receive())
    """,
    "receive with a timeout": """
        with Consumer(address, group=topic, subscribe=topic) as consumer:
            while True:
                if message := consumer.receive(timeout_s=0.5):
                    show(message)
    """,
    "receive_batch": """
        with Consumer(address, group=topic, subscribe=topic) as consumer:
            while True:
                for message in consumer.receive_batch(8):
                    show(message)
    """,
    "poll": """
        with LiteConsumer(address, group=topic, subscribe=topic) as consumer:
            while True:
                for message in consumer.poll(timeout_s=0.5):
                    show(message)
    """,
    "pull": """
        with PullConsumer(address, group=topic) as consumer:
            queues = consumer.queues(topic)
            offsets = {queue: consumer.earliest_offset(queue) for queue in queues}
            while True:
                for queue in queues:
                    messages, offsets[queue], *_ = consumer.pull(queue, offsets[queue], wait_s=0.1)
                    consumer.commit(queue, offsets[queue])
                    for message in messages:
                        show(message)
    """,
    "run": """
        consumer = Consumer(address, group=topic)
        consumer.on(topic)(show)
        consumer.run()
    """,
    "inbox": """
        from escrowmq.sql import Inbox
        from sqlalchemy import create_engine
        inbox = Inbox(create_engine("sqlite:///" + sys.argv[3]), group=topic)
        with Consumer(address, group=topic, subscribe=topic) as consumer:
            inbox.run(consumer, inbox.effect(lambda session, message: show(message)))
    """,
}
ASYNCIO = {
    "iteration": """
        async with Consumer(address, group=topic, subscribe=topic) as consumer:
            async for message in consumer:
                show(message)
    """,
    "receive": """
        async with Consumer(address, group=topic, subscribe=topic) as consumer:
            while True:
                show(await consumer.receive())
    """,
    "receive_batch": """
        async with Consumer(address, group=topic, subscribe=topic) as consumer:
            while True:
                for message in await consumer.receive_batch(8):
                    show(message)
    """,
    "poll": """
        async with LiteConsumer(address, group=topic, subscribe=topic) as consumer:
            while True:
                for message in await consumer.poll(timeout_s=0.5):
                    show(message)
    """,
    "pull": """
        async with PullConsumer(address, group=topic) as consumer:
            queues = await consumer.queues(topic)
            offsets = {queue: await consumer.earliest_offset(queue) for queue in queues}
            while True:
                for queue in queues:
                    messages, offsets[queue], *_ = await consumer.pull(
                        queue, offsets[queue], wait_s=0.1
                    )
                    await consumer.commit(queue, offsets[queue])
                    for message in messages:
                        show(message)
    """,
    "run": """
        consumer = Consumer(address, group=topic)
        consumer.on(topic)(show)
        await consumer.run()
    """,
    "inbox": """
        from escrowmq.sql import AsyncInbox
        from sqlalchemy.ext.asyncio import create_async_engine
        inbox = AsyncInbox(create_async_engine("sqlite+aiosqlite:///" + sys.argv[3]), group=topic)
        await inbox.create_tables()

        async def effect(session, message):
            show(message)

        async with Consumer(address, group=topic, subscribe=topic) as consumer:
            await inbox.run(consumer, inbox.effect(effect))
    """,
    "a task beside others": """
        async def consume():
            global consumer
            async with Consumer(address, group=topic, subscribe=topic) as consumer:
                async for message in consumer:
                    show(message)

        await asyncio.gather(consume(), asyncio.Event().wait())
    """,
    "a task that polls beside others": """
        async def consume():
            global consumer
            async with LiteConsumer(address, group=topic, subscribe=topic) as consumer:
                while True:
                    for message in await consumer.poll(timeout_s=0.5):
                        show(message)

        await asyncio.gather(consume(), asyncio.Event().wait())
    """,
}
WAYS = [("blocking", name) for name in BLOCKING] + [("asyncio", name) for name in ASYNCIO]


COMMON = """
import asyncio, signal, sys, threading
address, topic = sys.argv[1:3]
shown = 0

def show(message):
    global shown
    shown += 1
    print(message.body.decode(), flush=True)
    if shown == 3:
        threading.Thread(target=wait_idle, daemon=True).start()

def wait_idle():
    while consumer.has_messages_in_hand:
        threading.Event().wait(0.01)
    print("idle", flush=True)
"""


def program_source(kind: str, name: str, *, runner: str = "asyncio.run") -> str:
    """Return the program for one way to consume. It prints "idle" when it has all messages and
    waits for more."""
    is_blocking = kind == "blocking"
    module = "escrowmq.blocking" if is_blocking else "escrowmq"
    return "\n".join(
        (
            COMMON,
            f"from {module} import Consumer, LiteConsumer, PullConsumer",
            "def main():" if is_blocking else "async def main():",
            "        global consumer",
            (BLOCKING if is_blocking else ASYNCIO)[name].strip("\n"),
            "main()" if is_blocking else f"{runner}(main())",
        )
    )


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("termination")) as server:
        yield server


async def assert_committed(server: Server, topic: str) -> None:
    """Assert that the group gets none of the first messages again."""
    await send(server, topic, b"next")
    async with Consumer(server.namesrv_address, group=topic, subscribe=topic) as consumer:
        assert await receive(consumer, 1) == [b"next"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
@pytest.mark.parametrize(("kind", "name"), WAYS, ids=[f"{kind} {name}" for kind, name in WAYS])
def test_every_way_to_consume_ends_at_a_signal_and_commits(
    server: Server, tmp_path: Path, kind: str, name: str, number: signal.Signals
) -> None:
    topic = f"{kind}-{name}-{number.name}".replace(" ", "-")
    asyncio.run(send(server, topic, *BODIES))
    arguments = (server.namesrv_address, topic, str(tmp_path / "inbox.db"))
    with Program(program_source(kind, name), *arguments) as program:
        program.wait_for("idle")
        program.send_signal(number)
        result = program.wait()
    if number is signal.SIGTERM or name == "run":
        assert (result.code, result.err) == (0, "")
    else:
        # Python ends a program that does not catch KeyboardInterrupt like this.
        assert (result.code, result.last_error) == (-signal.SIGINT, "KeyboardInterrupt")
    asyncio.run(assert_committed(server, topic))


def test_uvloop_ends_at_sigterm_too(server: Server) -> None:
    asyncio.run(send(server, "uvloop", *BODIES))
    source = program_source("asyncio", "iteration", runner="__import__('uvloop').run")
    with Program(source, server.namesrv_address, "uvloop") as program:
        program.wait_for("idle")
        program.send_signal(signal.SIGTERM)
        result = program.wait()
    assert (result.code, result.err) == (0, "")
    asyncio.run(assert_committed(server, "uvloop"))


IN_HAND = """
    import asyncio, pathlib, sys, threading
    from escrowmq{module} import Consumer
    address, topic, permission = sys.argv[1:4]

    def process():
        print("begins", flush=True)
        while not pathlib.Path(permission).exists():
            threading.Event().wait(0.01)
        print("done", flush=True)

    {definition}
        {block}with Consumer(address, group=topic, subscribe=topic) as consumer:
            {block}for message in consumer:
                process()
                if {leaves}:
                    break
        print("after the block", flush=True)

    {call}
"""


@pytest.mark.parametrize("leaves", [False, True], ids=["asks for the next", "leaves the loop"])
@pytest.mark.parametrize("kind", ["blocking", "asyncio"])
def test_the_message_in_hand_is_finished_first(
    server: Server, tmp_path: Path, kind: str, leaves: bool
) -> None:
    topic = f"in-hand-{kind}-{leaves}"
    asyncio.run(send(server, topic, b"long"))
    is_asyncio = kind == "asyncio"
    source = IN_HAND.format(
        module="" if is_asyncio else ".blocking",
        definition="async def main():" if is_asyncio else "def main():",
        block="async " if is_asyncio else "",
        call="asyncio.run(main())" if is_asyncio else "main()",
        leaves=leaves,
    )
    permission = tmp_path / "finish"
    with Program(source, server.namesrv_address, topic, str(permission)) as program:
        program.wait_for("begins")
        program.send_signal(signal.SIGTERM)
        permission.touch()
        program.wait_for("done")
        result = program.wait()
    assert (result.code, result.out, result.err) == (0, "begins\ndone\n", "")
    asyncio.run(assert_committed(server, topic))


def test_a_second_sigterm_does_not_wait_for_the_message_in_hand(
    server: Server, tmp_path: Path
) -> None:
    asyncio.run(send(server, "stuck", b"stuck"))
    source = "import logging, sys\nlogging.basicConfig(level=20, stream=sys.stdout)\n"
    source += textwrap.dedent(IN_HAND).format(
        module=".blocking", definition="def main():", block="", call="main()", leaves=False
    )
    with Program(source, server.namesrv_address, "stuck", str(tmp_path / "never")) as program:
        program.wait_for("begins")
        program.send_signal(signal.SIGTERM)
        program.wait_for("SIGTERM: the program ends when the messages in hand are done")
        program.send_signal(signal.SIGTERM)
        assert program.wait().code == 0


def test_a_handler_of_the_program_is_kept(server: Server) -> None:
    source = """
        import signal, sys
        from escrowmq.blocking import Consumer

        def stop(*_):
            print("its own", flush=True)
            consumer.close()

        signal.signal(signal.SIGTERM, stop)
        with Consumer(sys.argv[1], group="own", subscribe="own") as consumer:
            print("ready", flush=True)
            for message in consumer:
                pass
        print("after the block", flush=True)
    """
    with Program(source, server.namesrv_address) as program:
        program.wait_for("ready")
        program.send_signal(signal.SIGTERM)
        result = program.wait()
    assert result.out.splitlines() == ["ready", "its own", "after the block"]
    assert result.code == 0


def test_sigterm_has_its_default_after_the_block_and_in_a_child(server: Server) -> None:
    source = """
        import os, signal, sys, warnings
        from escrowmq.blocking import LiteConsumer
        warnings.simplefilter("ignore")
        with LiteConsumer(sys.argv[1], group="default", subscribe="default") as consumer:
            print(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)
            child = os.fork()
            if not child:
                os.kill(os.getpid(), signal.SIGTERM)
                os._exit(0)
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        print(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)
    """
    result = run_program(source, server.namesrv_address)
    assert result.out.splitlines() == ["False", str(-signal.SIGTERM), "True"], result.err
