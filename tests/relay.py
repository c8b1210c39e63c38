"""A relay between Flower's nodes and their server, in a thread: it reads, delays and cuts their connections."""

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
        delay: Seconds by which each piece of at most ``piece`` bytes is delayed.
        piece: Bytes that are sent at once.
        lose: Pairs of texts. The next answer that has the second text, to a request that has the first, is lost: its
            connection is cut, and the pair is removed.
    """

    def __init__(self, folder: Path, port: int, target: int) -> None:
        self.up: list[bytearray] = []
        self.down: list[bytearray] = []
        self.delay, self.piece = 0.0, 1 << 16
        self.lose: list[tuple[bytes, bytes]] = []
        self._target = target
        self._open: set[StreamWriter] = set()
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

    def cut(self) -> int:
        """Close all connections; the number of connections."""
        writers = list(self._open)
        for writer in writers:
            self._loop.call_soon_threadsafe(writer.transport.abort)
        return len(writers)

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
        self._open |= {writer, server_writer}
        up, down = bytearray(), bytearray()
        self.up.append(up)
        self.down.append(down)
        await asyncio.gather(self._pump(reader, server_writer, up), self._pump(server_reader, writer, down, up))

    def _loses(self, data: bytes, up: bytearray) -> bool:
        """Whether an answer to the last request of a connection is lost."""
        request = up[up.rfind(b"POST /") :]
        found = next(((asked, text) for asked, text in self.lose if asked in request and text in data), None)
        if found:
            self.lose.remove(found)
        return found is not None

    async def _pump(
        self, reader: StreamReader, writer: StreamWriter, read: bytearray, up: bytearray | None = None
    ) -> None:
        try:
            while data := await reader.read(self.piece):
                if up is not None and self._loses(data, up):
                    writer.transport.abort()
                    break
                read += data
                await asyncio.sleep(self.delay)
                writer.write(data)
                await writer.drain()
        except OSError:
            pass  # one side has closed the connection, so the other follows
        finally:
            self._open.discard(writer)
            writer.close()
