from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Awaitable, Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpwrap.control import messages as m
from tpwrap.control import wire

KEY = b"0" * 32
FROM_SUPERVISOR: msgspec.msgpack.Decoder[m.SupervisorMessage] = msgspec.msgpack.Decoder(m.SupervisorMessage)
FROM_COORDINATOR: msgspec.msgpack.Decoder[m.CoordinatorMessage] = msgspec.msgpack.Decoder(
    m.CoordinatorMessage
)
FROM_WORKER: msgspec.msgpack.Decoder[m.WorkerMessage] = msgspec.msgpack.Decoder(m.WorkerMessage)
HELLO = m.Hello(1, 0, "h", 1, 1, "h:1")


def shake(client_key: bytes, server_key: bytes) -> tuple[wire.Seal, wire.Seal]:
    client, server = wire.Handshake("client", client_key), wire.Handshake("server", server_key)
    while not (client.done and server.done):
        for body in client.send():
            server.receive(body)
        for body in server.send():
            client.receive(body)
    assert client.seal is not None
    assert server.seal is not None
    return client.seal, server.seal


# --- frames ------------------------------------------------------------------------------------------


@given(st.lists(st.binary(max_size=300), max_size=10), st.data())
def test_frames_survive_any_cut(bodies: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(map(wire.frame, bodies))
    buffer = wire.FrameBuffer()
    got: list[bytes] = []
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        buffer.feed(stream[:size])
        stream = stream[size:]
        while (body := buffer.next()) is not None:
            got.append(body)
    assert got == bodies
    assert not buffer.partial


@given(st.binary(max_size=200))
def test_any_bytes_are_frames_or_an_error(data: bytes) -> None:
    buffer = wire.FrameBuffer(limit=64)
    buffer.feed(data)
    try:
        while (body := buffer.next()) is not None:
            assert len(body) <= 64
    except wire.FrameError:
        pass


def test_an_oversized_frame_is_refused_before_its_body_comes() -> None:
    buffer = wire.FrameBuffer()
    buffer.feed(struct.pack("<I", wire.MAX_FRAME + 1))
    with pytest.raises(wire.FrameError, match="over the limit"):
        buffer.next()
    with pytest.raises(wire.FrameError, match="over the limit"):
        wire.frame(bytes(wire.MAX_FRAME + 1))


# --- messages ------------------------------------------------------------------------------------------

PLAN = m.Plan(
    generation=3,
    step=20,
    members=["h:1", "h:2", "h:3"],
    sources={1: [0], 2: []},
    newcomers=[1, 2],
    buddies=[["s:1"], ["s:0"], []],
    keepers={1: ["s:0"], 2: ["s:1"]},
    way="redo",
    votes=True,
)


@pytest.mark.parametrize(
    "message",
    [
        m.SetupDone(0, ["numpy"]),
        m.SetupDone(0, ["numpy"], "tp0"),
        m.FirstUpdate(redo=True),
        m.FirstUpdate(redo=False, shard="tp0"),
        m.Released(3, 20, 0.5),
        m.Digest(20, "ab"),
        m.Tensors(20, {"model/w": "ab"}),
        m.Released(3, 20, 0.5, voted=True, replay_from=19),
    ],
)
def test_what_workers_say_arrives_as_it_was(message: m.WorkerMessage) -> None:
    sent = m.FromWorker(0, "w", message)
    assert FROM_SUPERVISOR.decode(msgspec.msgpack.encode(sent)) == sent


@pytest.mark.parametrize(
    "message",
    [
        m.Rule(votes=True),
        m.Rule(votes=False),
        m.Explain(20),
        PLAN,
        msgspec.structs.replace(PLAN, way="replay", votes=None),
        m.Assign(3, 1, 3, {"RANK": "1"}, "h:1", 1, [], PLAN.buddies, PLAN),
    ],
)
def test_what_workers_are_told_arrives_as_it_was(message: m.CoordinatorToWorker) -> None:
    sent = m.ToWorker("w", message)
    assert FROM_COORDINATOR.decode(msgspec.msgpack.encode(sent)) == sent


def test_a_plan_knows_two_ways() -> None:
    odd = m.ToWorker("w", msgspec.structs.replace(PLAN, way="jump"))  # type: ignore[arg-type]
    with pytest.raises(msgspec.ValidationError):
        FROM_COORDINATOR.decode(msgspec.msgpack.encode(odd))


# --- signatures ----------------------------------------------------------------------------------------


@given(st.lists(st.binary(max_size=50), min_size=1, max_size=5))
def test_both_directions(payloads: list[bytes]) -> None:
    client, server = shake(KEY, KEY)
    for payload in payloads:
        assert server.open(client.close(payload)) == payload
        assert client.open(server.close(payload)) == payload


@given(st.binary(min_size=1, max_size=50), st.data())
def test_a_changed_frame_is_refused(payload: bytes, data: st.DataObject) -> None:
    client, server = shake(KEY, KEY)
    body = bytearray(client.close(payload))
    place = data.draw(st.integers(0, len(body) - 1))
    body[place] ^= data.draw(st.integers(1, 255))
    with pytest.raises(wire.FrameError, match="wrong signature"):
        server.open(bytes(body))


@given(st.binary(max_size=60))
def test_a_forged_frame_is_refused(body: bytes) -> None:
    _, server = shake(KEY, KEY)
    with pytest.raises(wire.FrameError):
        server.open(body)


def test_replayed_reordered_reflected_and_foreign_frames_are_refused() -> None:
    client, server = shake(KEY, KEY)
    first, second = client.close(b"1"), client.close(b"2")
    with pytest.raises(wire.FrameError):
        server.open(second)  # reordered
    assert server.open(first) == b"1"
    with pytest.raises(wire.FrameError):
        server.open(first)  # replayed
    with pytest.raises(wire.FrameError):
        client.open(first)  # reflected
    _, other = shake(KEY, KEY)
    with pytest.raises(wire.FrameError):
        other.open(first)  # of another connection with the same key


def test_handshake_needs_the_same_key() -> None:
    with pytest.raises(wire.HandshakeError, match="does not hold this job's key"):
        shake(b"a" * 32, b"b" * 32)
    shake(b"short", b"short")
    shake(b"x" * 500, b"x" * 500)


@given(st.binary(max_size=100), st.sampled_from(["client", "server"]))
def test_any_handshake_bytes_are_refused(body: bytes, role: str) -> None:
    side = wire.Handshake(role, KEY)  # type: ignore[arg-type]
    for _ in range(2):
        with pytest.raises(wire.HandshakeError):
            side.receive(body)
    assert not side.done


def test_a_server_cannot_be_made_to_prove_itself_to_itself() -> None:
    """Its own answer, sent back as the client's proof, is worth nothing."""
    server = wire.Handshake("server", KEY)
    server.receive(b"TPW1" + bytes(32))
    (answer,) = server.send()
    with pytest.raises(wire.HandshakeError):
        server.receive(answer[32:])


# --- channels ------------------------------------------------------------------------------------------


def with_server(
    story: Callable[[int, asyncio.Queue[object]], Awaitable[None]], reply: m.CoordinatorMessage | None = None
) -> None:
    """A server that queues what it receives, and at the end ("closed", why)."""

    async def main() -> None:
        received: asyncio.Queue[object] = asyncio.Queue()

        async def handler(channel: wire.Channel[m.SupervisorMessage]) -> None:
            while (message := await channel.receive()) is not None:
                received.put_nowait(message)
                if reply is not None:
                    await channel.send(reply)
            received.put_nowait(("closed", channel.why_closed))

        server = await wire.serve("127.0.0.1", 0, KEY, FROM_SUPERVISOR, handler)
        await asyncio.wait_for(story(server.sockets[0].getsockname()[1], received), 10)
        server.close()

    asyncio.run(main())


def test_messages_go_both_ways() -> None:
    async def story(port: int, received: asyncio.Queue[object]) -> None:
        channel = await wire.Channel.connect("127.0.0.1", port, KEY, FROM_COORDINATOR)
        for text in ("x", "y" * 1_000_000):
            message = m.FromWorker(0, "n0s0w0", m.Notice("info", text))
            await channel.send(message)
            assert await received.get() == message
            assert await channel.receive() == m.Kill("w")
        channel.close()
        channel.post(HELLO)
        assert await channel.receive() is None
        assert await received.get() == ("closed", "connection closed")

    with_server(story, m.Kill("w"))


def test_tcp_nodelay_is_on() -> None:
    async def story(port: int, received: asyncio.Queue[object]) -> None:
        channel = await wire.Channel.connect("127.0.0.1", port, KEY, FROM_COORDINATOR)
        sock = channel._writer.get_extra_info("socket")
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0
        channel.close()

    with_server(story)


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (wire.frame(b"x" * 40), "wrong signature"),
        (struct.pack("<I", 1 << 31), "over the limit"),
        (struct.pack("<I", 100) + b"abc", "in the middle of a message"),
        (b"\x01", "in the middle of a message"),
        (wire.frame(b""), "wrong signature"),
    ],
)
def test_broken_frames_close_the_connection(raw: bytes, why: str) -> None:
    async def story(port: int, received: asyncio.Queue[object]) -> None:
        channel = await wire.Channel.connect("127.0.0.1", port, KEY, FROM_COORDINATOR)
        await channel.send(HELLO)
        channel._writer.write(raw)
        channel.close()
        assert await received.get() == HELLO
        closed = await received.get()
        assert isinstance(closed, tuple)
        assert why in closed[1]

    with_server(story)


def test_an_unknown_message_closes_the_connection() -> None:
    async def story(port: int, received: asyncio.Queue[object]) -> None:
        channel = await wire.Channel.connect("127.0.0.1", port, KEY, FROM_COORDINATOR)
        await channel.send(m.Shutdown("not for a coordinator"))
        closed = await received.get()
        assert isinstance(closed, tuple)
        assert "does not know" in closed[1]
        assert await channel.receive() is None

    with_server(story)


def test_strangers_never_reach_the_handler() -> None:
    async def story(port: int, received: asyncio.Queue[object]) -> None:
        with pytest.raises(wire.HandshakeError, match="no job of ours"):
            await wire.Channel.connect("127.0.0.1", port, b"wrong", FROM_COORDINATOR)
        for raw in (
            b"GET / HTTP/1.1\r\n\r\n",
            wire.frame(b"TPW1" + bytes(32)) + wire.frame(bytes(32)),
            b"\xff" * 64,
        ):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(raw)
            try:
                await reader.read()  # perhaps an answer to the challenge
                assert await reader.read() == b""  # then the end
            except ConnectionResetError:
                pass
            writer.close()
        assert received.empty()

    with_server(story)


def test_nobody_listens() -> None:
    async def main() -> None:
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            port = unused.getsockname()[1]
        with pytest.raises(OSError, match=str(port)):
            await wire.Channel.connect("127.0.0.1", port, KEY, FROM_COORDINATOR)

    asyncio.run(main())


def test_a_peer_that_does_not_read_never_blocks_post() -> None:
    async def story(port: int, received: asyncio.Queue[object]) -> None:
        channel = await wire.Channel.connect("127.0.0.1", port, KEY, FROM_COORDINATOR)
        for _ in range(200):
            channel.post(m.FromWorker(0, "w", m.Notice("info", "z" * 50_000)))
        channel.abort()
        assert await channel.receive() is None

    with_server(story)


# --- the unix socket ------------------------------------------------------------------------------------


@given(st.text(max_size=300), st.integers(0, 10))
def test_blocking_helpers(text: str, step: int) -> None:
    left, right = socket.socketpair()
    with left, right:
        wire.send_blocking(left, m.Notice("info", text))
        wire.send_blocking(left, m.Progress(step))
        assert wire.receive_blocking(right, FROM_WORKER) == m.Notice("info", text)
        assert wire.receive_blocking(right, FROM_WORKER) == m.Progress(step)
        left.sendall(wire.pack(m.Progress(step))[:-1])
        left.close()
        assert wire.receive_blocking(right, FROM_WORKER) is None


def test_blocking_helpers_and_what_is_broken() -> None:
    left, right = socket.socketpair()
    with left, right:
        left.sendall(wire.frame(b"\xc1"))
        with pytest.raises(msgspec.MsgspecError):
            wire.receive_blocking(right, FROM_WORKER)
        left.sendall(struct.pack("<I", wire.MAX_FRAME + 1))
        with pytest.raises(wire.FrameError):
            wire.receive_blocking(right, FROM_WORKER)


def test_large_messages_block_and_arrive() -> None:
    left, right = socket.socketpair()
    message = m.Notice("info", "x" * 5_000_000)
    with left, right:
        sender = threading.Thread(target=wire.send_blocking, args=(left, message))
        sender.start()
        assert wire.receive_blocking(right, FROM_WORKER) == message
        sender.join()


def test_read_frame() -> None:
    async def main() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(wire.pack("n2s0w1") + wire.pack(m.Progress(3)) + wire.pack(m.Progress(4))[:-1])
        reader.feed_eof()
        name = await wire.read_frame(reader)
        assert name is not None
        assert msgspec.msgpack.decode(name, type=str) == "n2s0w1"
        body = await wire.read_frame(reader)
        assert body is not None
        assert FROM_WORKER.decode(body) == m.Progress(3)
        assert await wire.read_frame(reader) is None
        reader = asyncio.StreamReader()
        reader.feed_data(b"\xff\xff\xff\xff")
        with pytest.raises(wire.FrameError):
            await wire.read_frame(reader)

    asyncio.run(main())
