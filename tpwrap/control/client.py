"""A supervisor's connection to the coordinator: hello, heartbeats both ways, messages in order."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence

import msgspec

from tpwrap.control.messages import CoordinatorMessage, Heartbeat, Hello, SupervisorMessage
from tpwrap.control.wire import Channel, HandshakeError
from tpwrap.core.timeouts import Timeouts

_RETRY_SECONDS = 0.1


class CoordinatorLink:
    """Made by `open`. `post` sends without waiting; `messages` yields until the coordinator is lost."""

    def __init__(self, channel: Channel[CoordinatorMessage], timeouts: Timeouts) -> None:
        self._channel = channel
        self._timeouts = timeouts
        self._heartbeats = asyncio.create_task(self._beat())

    @staticmethod
    async def open(
        host: str, ports: Sequence[int], key: bytes, hello: Hello, timeouts: Timeouts, within: float
    ) -> CoordinatorLink:
        """Connect and introduce this node. Tries again for `within` seconds: the coordinator may start a little later
        than a supervisor. Not for long, because it may also be dead already, and then nothing of the node may stay
        behind.

        A peer without the job's key is refused at once if there is one port only. Of several (which both sides derive
        from the key) some may belong to other programs of that host.
        """
        decoder: msgspec.msgpack.Decoder[CoordinatorMessage] = msgspec.msgpack.Decoder(CoordinatorMessage)
        deadline = asyncio.get_running_loop().time() + within
        for attempt in itertools.count():
            port = ports[attempt % len(ports)]
            try:
                channel = await Channel.connect(host, port, key, decoder)
                break
            except OSError as e:
                if isinstance(e, HandshakeError) and len(ports) == 1:
                    raise
                if asyncio.get_running_loop().time() > deadline:
                    raise
                if port == ports[-1]:
                    await asyncio.sleep(_RETRY_SECONDS)
        channel.post(hello)
        return CoordinatorLink(channel, timeouts)

    def post(self, message: SupervisorMessage) -> None:
        """Send, in order of the calls."""
        self._channel.post(message)

    async def messages(self) -> AsyncIterator[CoordinatorMessage]:
        """Everything but heartbeats. Ends when the connection is lost or silent for `node_silence`."""
        while True:
            try:
                message = await asyncio.wait_for(self._channel.receive(), self._timeouts.node_silence)
            except asyncio.TimeoutError:
                self._channel.why_closed = f"silent for {self._timeouts.node_silence:g} s"
                return
            if message is None:
                return
            if not isinstance(message, Heartbeat):
                yield message

    @property
    def why_lost(self) -> str:
        """After `messages` has ended: one line on why."""
        return self._channel.why_closed

    def close(self) -> None:
        self._heartbeats.cancel()
        self._channel.close()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._timeouts.heartbeat)
            self._channel.post(Heartbeat())
