"""/healthz, /readyz and /metrics of the agent. Health is that of this process alone: it never depends on NVML.

A liveness probe that fails with the driver would kill the monitor inside a driver call, which has wedged GPUs until
reboot (dcgm-exporter#84).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from aiohttp import web

from agent.journal import Journals
from agent.session import Session
from headway.readings import CONTENT_TYPE, Readings


async def serve(
    listen: tuple[str, int],
    readings: Readings,
    scrape: Callable[[], None],
    journals: Journals,
    sessions: Sequence[Session],
) -> web.AppRunner:
    """Serve until `cleanup` of the returned runner. Raises OSError where the address cannot be had."""

    async def healthz(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def readyz(_: web.Request) -> web.Response:
        connected = {session.peer.url: session.connected for session in sessions}
        ready = not connected or any(connected.values())
        body = {"ready": ready, "durable": journals.durable, "aggregators": connected}
        return web.Response(text=json.dumps(body) + "\n", status=200 if ready else 503, content_type="application/json")

    async def metrics(_: web.Request) -> web.Response:
        scrape()
        return web.Response(body=readings.render().encode(), headers={"Content-Type": CONTENT_TYPE})

    app = web.Application(client_max_size=4096)
    app.router.add_get("/healthz", healthz)
    app.router.add_get("/readyz", readyz)
    app.router.add_get("/metrics", metrics)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, *listen, backlog=16).start()
    except OSError:
        await runner.cleanup()
        raise
    return runner
