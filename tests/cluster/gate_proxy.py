"""A TCP proxy on loopback between a process under test and a server: passes, holds back, or is away. Knows no TLS."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import yaml

CHUNK_BYTES = 65536


class GateProxy:
    """`hold_requests` keeps back what the client sends, `hold_answers` what the server sends; `away` cuts all off."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._server: asyncio.Server | None = None
        self._pumps: set[asyncio.Task[None]] = set()
        self._open = {"request": asyncio.Event(), "answer": asyncio.Event()}
        self.held_bytes = 0
        self.port = 0
        self.release()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def away(self) -> None:
        """No new connections, and those that stand are cut."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    def hold(self, what: str) -> None:
        """`request` or `answer`; `held_bytes` counts from now on."""
        self.held_bytes = 0
        self._open[what].clear()

    def release(self) -> None:
        for opened in self._open.values():
            opened.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            server_reader, server_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.close()
            return
        pumps = [
            asyncio.create_task(self._pump(reader, server_writer, "request")),
            asyncio.create_task(self._pump(server_reader, writer, "answer")),
        ]
        for pump in pumps:
            self._pumps.add(pump)
            pump.add_done_callback(self._pumps.discard)
        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        for pump in pumps:
            pump.cancel()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, what: str) -> None:
        try:
            while data := await reader.read(CHUNK_BYTES):
                if not self._open[what].is_set():
                    self.held_bytes += len(data)
                    await self._open[what].wait()
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()


@contextlib.asynccontextmanager
async def in_front_of(kubeconfig: str, folder: Path) -> AsyncIterator[tuple[GateProxy, str]]:
    """A proxy in front of the API server of that kubeconfig, and a kubeconfig that goes through it."""
    config = yaml.safe_load(await asyncio.to_thread(Path(kubeconfig).read_text))
    cluster = config["clusters"][0]["cluster"]
    host, _, port = cluster["server"].removeprefix("https://").partition(":")
    proxy = GateProxy((host, int(port)))
    await proxy.start()
    cluster["server"] = f"https://{host}:{proxy.port}"
    through = folder / "kubeconfig-through-proxy"
    await asyncio.to_thread(through.write_text, yaml.safe_dump(config))
    try:
        yield proxy, str(through)
    finally:
        proxy.release()
        await proxy.away()
