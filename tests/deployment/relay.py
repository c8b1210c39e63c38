"""A relay between Flower's nodes and their server, in a thread: it reads what they send."""

from __future__ import annotations

import asyncio
import ssl
import threading
from asyncio import StreamReader, StreamWriter
from pathlib import Path


class Relay:
    """A TLS server in place of the SuperLink, which it has the certificate of.

    Args:
        folder: Where ``ca.crt``, ``server.pem`` and ``server.key`` are.
        port: The port of the relay.
        target: The port of the SuperLink.

    Attributes:
        up: What the nodes have sent: the bytes of each connection.
        down: What they have received.
    """

    def __init__(self, folder: Path, port: int, target: int) -> None:
        self.up: list[bytearray] = []
        self.down: list[bytearray] = []
        self._target = target
        self._as_server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._as_server.load_cert_chain(folder / "server.pem", folder / "server.key")
        self._as_client = ssl.create_default_context(cafile=str(folder / "ca.crt"))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        serve = asyncio.start_server(self._serve, "127.0.0.1", port, ssl=self._as_server)
        asyncio.run_coroutine_threadsafe(serve, self._loop).result()

    def clear(self) -> None:
        """Forget what was read, and go on to read the connections that are open."""
        for stream in (*self.up, *self.down):
            stream.clear()

    def close(self) -> None:
        """End the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    async def _serve(self, reader: StreamReader, writer: StreamWriter) -> None:
        try:
            server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self._target, ssl=self._as_client)
        except OSError:  # the SuperLink has been killed
            writer.close()
            return
        up, down = bytearray(), bytearray()
        self.up.append(up)
        self.down.append(down)
        await asyncio.gather(self._pump(reader, server_writer, up), self._pump(server_reader, writer, down))

    async def _pump(self, reader: StreamReader, writer: StreamWriter, read: bytearray) -> None:
        try:
            while data := await reader.read(1 << 16):
                read += data
                writer.write(data)
                await writer.drain()
        except OSError:
            pass  # one side has closed the connection, so the other follows
        finally:
            writer.close()
