"""Carries plans out: each dirty node is planned against its newest view and patched, safely and in bounded number.

Level-triggered. A mark says only *that* a node may differ, never what to do; whatever interrupts a write (a conflict,
a lost connection, a crash) is healed by planning again. Before every single request the gate is asked (Lease held, not
stopped). One node is never written by two tasks at once, so a plan is never made against a view of before our own
last write.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from aggregator.engine.inputs import DesiredNode, NodeView, Note
from aggregator.kube.client import KubeClient, KubeError, Unreachable
from aggregator.kube.events import note_on_node
from aggregator.kube.objects import decode_node
from aggregator.kube.plan import Patch, plan
from headway.names import Names

log = logging.getLogger(__name__)

IN_FLIGHT = 16
CONFLICT_ATTEMPTS = 8
BACKOFF_MIN_S = 0.2
BACKOFF_MAX_S = 30.0
#: Facts told per node that are remembered; older ones cost a refused create when they are told again.
NOTES_REMEMBERED = 64


@dataclass(frozen=True, slots=True)
class Written:
    """A patch that was answered; times are wall clock. In a dry run `answered_s` is 0 and nothing was sent."""

    patch: Patch
    planned_s: float
    sent_s: float
    answered_s: float


class Publisher:
    """`desired(node)` is asked each time; `gate()` must say True before each request; `on_view` hears our writes.

    A budget is shared by nodes that are written at the same time. So right before a fence is sent it is reserved, and
    released when what the API server made of it has been seen; a write whose answer was lost keeps its slot until it is
    tried again.
    """

    def __init__(
        self,
        client: KubeClient,
        names: Names,
        *,
        desired: Callable[[str], DesiredNode | None],
        reserve: Callable[[str], bool],
        release: Callable[[str], None],
        gate: Callable[[], Awaitable[bool]],
        now: Callable[[], float],
        on_view: Callable[[NodeView], None],
        on_written: Callable[[Written], None],
        dry_run: bool = False,
        rng: random.Random | None = None,
    ) -> None:
        self._client = client
        self._names = names
        self._desired = desired
        self._reserve = reserve
        self._release = release
        self._gate = gate
        self._now = now
        self._on_view = on_view
        self._on_written = on_written
        self._dry_run = dry_run
        self._rng = rng or random.Random()
        self._views: dict[str, NodeView] = {}
        self._dirty: dict[str, None] = {}
        self._busy: dict[str, asyncio.Task[None]] = {}
        self._again: dict[str, asyncio.TimerHandle] = {}
        self._failures: dict[str, int] = {}
        self._told: dict[str, dict[str, None]] = {}
        self._shown: dict[str, tuple[Patch, ...]] = {}
        self._wake = asyncio.Event()
        self.counts: dict[str, int] = {"conflict": 0, "refused": 0, "unreachable": 0, "held_back": 0}
        self.held_back: set[str] = set()

    def saw(self, view: NodeView) -> bool:
        """Take a node's view from the watch; False where ours is newer (our own write came back first)."""
        have = self._views.get(view.name)
        if have is not None and have.uid == view.uid and _newer(have.resource_version, view.resource_version):
            return False
        self._views[view.name] = view
        return True

    def gone(self, name: str, uid: str) -> None:
        have = self._views.get(name)
        if have is not None and have.uid == uid:
            del self._views[name]
            self._forget(name)

    def _forget(self, name: str) -> None:
        self._told.pop(name, None)
        self._failures.pop(name, None)
        self._shown.pop(name, None)
        self.held_back.discard(name)
        if timer := self._again.pop(name, None):
            timer.cancel()

    @property
    def views(self) -> dict[str, NodeView]:
        return self._views

    def mark(self, nodes: Iterable[str]) -> None:
        for node in nodes:
            self._dirty[node] = None
        if self._dirty:
            self._wake.set()

    def mark_all(self) -> None:
        self.mark(tuple(self._views))

    @property
    def idle(self) -> bool:
        return not self._dirty and not self._busy and not self._again

    @property
    def waiting(self) -> int:
        """Nodes that wait to be planned, now or after a failure."""
        return len(self._dirty) + len(self._again)

    async def run(self) -> None:
        """Until cancelled; then the writes in flight are cut off, which the next plan heals."""
        try:
            while True:
                await self._wake.wait()
                self._start_some()
        finally:
            for task in self._busy.values():
                task.cancel()
            for timer in self._again.values():
                timer.cancel()
            await asyncio.gather(*self._busy.values(), return_exceptions=True)

    def _start_some(self) -> None:
        self._wake.clear()
        for node in tuple(self._dirty):
            if len(self._busy) >= IN_FLIGHT:
                return
            if node not in self._busy:
                del self._dirty[node]
                task = asyncio.create_task(self._bring(node), name=f"write {node}")
                self._busy[node] = task
                task.add_done_callback(lambda done, node=node: self._finished(node, done))  # type: ignore[misc]

    def _finished(self, node: str, task: asyncio.Task[None]) -> None:
        self._busy.pop(node, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            # A programmer's error: let the process see it, and do not go on in silence.
            asyncio.get_running_loop().call_exception_handler(
                {"message": f"writing {node} failed", "exception": error, "task": task}
            )
        if self._dirty:
            self._wake.set()

    async def _bring(self, node: str) -> None:
        try:
            await self._settle(node)
            self._release(node)
            self._failures.pop(node, None)
        except Unreachable as error:
            self._later(node, "unreachable", error, None)
        except KubeError as error:
            self._release(node)
            if error.status == 404:
                return
            self._later(node, "refused", error, error.retry_after_s)

    def _later(self, node: str, what: str, error: Exception, retry_after_s: float | None) -> None:
        self.counts[what] += 1
        failures = self._failures[node] = self._failures.get(node, 0) + 1
        if failures == 1:
            log.warning("write failed node=%s error=%s", node, error)
        delay_s = self._rng.uniform(0.5, 1.0) * min(BACKOFF_MAX_S, BACKOFF_MIN_S * 2 ** min(failures, 10))
        delay_s = max(delay_s, min(retry_after_s or 0.0, BACKOFF_MAX_S))
        if node not in self._again:
            self._again[node] = asyncio.get_running_loop().call_later(delay_s, self._retry, node)

    def _retry(self, node: str) -> None:
        self._again.pop(node, None)
        self.mark((node,))

    async def _settle(self, node: str) -> None:
        for _ in range(CONFLICT_ATTEMPTS):
            want, have = self._desired(node), self._views.get(node)
            if want is None or have is None:
                return
            planned_s = time.time()
            patches = plan(want, have, self._names, self._now())
            if self._dry_run:
                self._show(node, patches, planned_s)
                return
            if await self._send_all(patches, planned_s, fences(want)):
                await self._tell(have, want.notes)
                return
        # Somebody writes this node faster than we can read it: come back later.
        raise Unreachable(f"{node}: {CONFLICT_ATTEMPTS} conflicts in a row")

    def _show(self, node: str, patches: tuple[Patch, ...], planned_s: float) -> None:
        if patches != self._shown.get(node):
            self._shown[node] = patches
            for patch in patches:
                self._on_written(Written(patch, planned_s, 0.0, 0.0))

    async def _allowed(self, node: str) -> bool:
        if await self._gate():
            self.held_back.discard(node)
            return True
        self._release(node)
        self.held_back.add(node)
        self.counts["held_back"] += 1
        return False

    async def _send_all(self, patches: tuple[Patch, ...], planned_s: float, fence: bool) -> bool:
        """False where the node must be planned again, from a new view or because the budget went to another."""
        for patch in patches:
            if not await self._allowed(patch.node):
                return True
            if fence and patch.guarded and not self._reserve(patch.node):
                return False
            sent_s = time.time()
            try:
                answer = await self._client.request(
                    "PATCH", patch.path, body=patch.body, content_type=patch.content_type
                )
            except KubeError as error:
                if error.status not in (409, 422):
                    raise
                # 409: somebody else wrote first. 422: a node of another UID stands under this name.
                self.counts["conflict"] += 1
                await self._read(patch.node)
                self._release(patch.node)
                if error.status == 422 and self._views[patch.node].uid == patch.body["metadata"]["uid"]:
                    raise
                return False
            self._take(decode_node(answer).view())
            self._release(patch.node)
            self._on_written(Written(patch, planned_s, sent_s, time.time()))
        return True

    async def _read(self, node: str) -> None:
        self._take(decode_node(await self._client.request("GET", f"/api/v1/nodes/{node}")).view())

    def _take(self, view: NodeView) -> None:
        if self.saw(view):
            self._on_view(view)

    async def _tell(self, node: NodeView, notes: tuple[Note, ...]) -> None:
        told = self._told.setdefault(node.name, {})
        for note in notes:
            if note.key in told or not await self._allowed(node.name):
                continue
            await note_on_node(self._client, node, note)
            told[note.key] = None
            while len(told) > NOTES_REMEMBERED:
                del told[next(iter(told))]


def fences(want: DesiredNode) -> bool:
    """Whether it takes the node out of service."""
    return any(taint.effect == "NoSchedule" for taint in want.taints)


def _newer(mine: str, theirs: str) -> bool:
    """Whether `mine` is the later resourceVersion. They are ordered numbers where the API server is etcd-backed
    (stated as API since Kubernetes 1.35); anything else is taken as not newer, so the watch wins."""
    return mine.isdigit() and theirs.isdigit() and int(mine) > int(theirs)
