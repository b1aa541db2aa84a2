"""The read-only API: what the engine knows, why, and what stands in Kubernetes. Whatever changes something goes through
the Kubernetes API instead.

Every list carries `epoch` (of this process) and `version` (rises with every input), so that a reader knows whether two
answers belong together; it is cut at MAX_ITEMS and then says so. Errors are JSON: `error` (what happened), `what` (of
what), `do` (what to do).
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from headway.readings import CONTENT_TYPE

if TYPE_CHECKING:
    from aggregator.app import Aggregator
    from aggregator.serve.metrics import Scrape

log = logging.getLogger(__name__)

MAX_ITEMS = 20_000
MAX_REQUEST_BYTES = 16 * 1024
LISTS = "/v1/nodes, /v1/gpus, /v1/verdicts, /v1/why/NODE, /v1/why/NODE/gpu-N, /v1/published, /v1/policy"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Api:
    def __init__(self, aggregator: Aggregator, scrape: Scrape) -> None:
        self._a = aggregator
        self._scrape = scrape

    def app(self) -> web.Application:
        app = web.Application(middlewares=[errors_as_json], client_max_size=MAX_REQUEST_BYTES)
        app.router.add_get("/v1/nodes", self.nodes)
        app.router.add_get("/v1/gpus", self.gpus)
        app.router.add_get("/v1/verdicts", self.verdicts)
        app.router.add_get("/v1/why/{node}", self.why)
        app.router.add_get("/v1/why/{node}/{part}", self.why)
        app.router.add_get("/v1/published", self.published)
        app.router.add_get("/v1/policy", self.policy)
        app.router.add_get("/healthz", self.healthz)
        app.router.add_get("/readyz", self.readyz)
        app.router.add_get("/metrics", self.metrics)
        return app

    async def nodes(self, request: web.Request) -> web.Response:
        now_s = self._a.clock.now()
        return self._list(now_s, self._a.core.engine.node_views(now_s))

    async def gpus(self, request: web.Request) -> web.Response:
        now_s = self._a.clock.now()
        return self._list(now_s, self._a.core.engine.gpu_views(now_s))

    async def verdicts(self, request: web.Request) -> web.Response:
        """Only parts that are not HEALTHY, or that people have decided about."""
        now_s = self._a.clock.now()
        return self._list(now_s, self._a.core.engine.verdict_views(now_s))

    async def why(self, request: web.Request) -> web.Response:
        node, part = request.match_info["node"], request.match_info.get("part")
        now_s = self._a.clock.now()
        answer = self._a.core.engine.why(node, part, now_s)
        if answer is None:
            what = node if part is None else f"{node}/{part}"
            return error(404, "not known", what, "GET /v1/nodes and /v1/gpus list what is")
        return self._body(now_s, {"why": answer})

    async def published(self, request: web.Request) -> web.Response:
        """What of ours stands on the nodes, as last seen, and the newest changes."""
        names = self._a.names
        gate = self._a.gate
        writing = {
            "leader": gate.lease.held,
            "holder": gate.lease.holder,
            "stopped": gate.stopped,
            "why_not": gate.why_not,
            "dry_run": self._a.dry_run,
            "held_back": sorted(self._a.publisher.held_back)[:MAX_ITEMS],
        }
        standing = (standing_on(view, names) for view in self._a.publisher.views.values())
        items = [item for item in standing if item is not None]
        return self._list(self._a.clock.now(), items, writing=writing, recent=list(self._a.written.recent))

    async def policy(self, request: web.Request) -> web.Response:
        now_s = self._a.clock.now()
        pools = list(self._a.core.engine.pool_views(now_s))
        return self._body(now_s, {"policy": self._a.policy.state, "pools": pools})

    async def healthz(self, request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def readyz(self, request: web.Request) -> web.Response:
        missing = self._a.not_ready
        return web.Response(text="".join(f"{line}\n" for line in missing) or "ok\n", status=503 if missing else 200)

    async def metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=self._scrape.text().encode(), headers={"Content-Type": CONTENT_TYPE})

    def _list(self, now_s: float, items: Iterable[object], **more: object) -> web.Response:
        kept = list(islice(items, MAX_ITEMS + 1))
        truncated = len(kept) > MAX_ITEMS
        return self._body(now_s, {"items": kept[:MAX_ITEMS], "truncated": truncated, **more})

    def _body(self, now_s: float, content: dict[str, Any]) -> web.Response:
        """`at_s` is the time for which the answer holds."""
        head = {"epoch": self._a.epoch, "version": self._a.core.version, "at_s": now_s}
        return web.Response(body=msgspec.json.encode(head | content), content_type="application/json")


def error(status: int, error: str, what: str, do: str) -> web.Response:
    body = msgspec.json.encode({"error": error, "what": what, "do": do})
    return web.Response(body=body, status=status, content_type="application/json")


@web.middleware
async def errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPMethodNotAllowed as refused:
        allowed = ", ".join(sorted(refused.allowed_methods))
        return error(405, f"{request.method} is not taken", request.path, f"this API only reads: {allowed}")
    except web.HTTPNotFound:
        return error(404, "no such path", request.path, f"there are {LISTS}, /healthz, /readyz, /metrics")
    except web.HTTPException as refused:
        return error(refused.status, refused.reason, request.path, f"there are {LISTS}")


def standing_on(view: Any, names: Any) -> dict[str, object] | None:
    """Our own taints, condition, annotation and labels on a node; None where there are none."""
    taints = [taint for taint in view.taints if taint.key in names.removable_taints]
    conditions = [condition for condition in view.conditions if condition.type in names.removable_conditions]
    annotations = {key: value for key, value in view.annotations.items() if key in names.removable_annotations}
    labels = {key: value for key, value in view.labels.items() if key in names.removable_labels}
    if not (taints or conditions or annotations or labels):
        return None
    return {
        "node": view.name,
        "taints": taints,
        "conditions": conditions,
        "annotations": annotations,
        "labels": labels,
    }


__all__: Sequence[str] = ("Api", "error", "standing_on")
