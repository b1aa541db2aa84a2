"""The aggregator, wired: watches and agents feed the engine, dirty nodes wake the publisher, people read the API.

Every long-running part is a task of one group: a programmer's error in any of them ends the process, and Kubernetes
starts it anew. What is expected to fail (the API server, an agent, a disk) is handled where it fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import ssl
from collections.abc import AsyncIterator, Iterable
from typing import Any

from aiohttp import web

from aggregator import state
from aggregator.clock import Clock
from aggregator.config import AggregatorConfig
from aggregator.core import Core
from aggregator.engine.inputs import DesiredNode, NodeGone, NodeSeen, NodeView, PolicyLoaded
from aggregator.gate import Gate
from aggregator.ingest.auth import Authenticator, Insecure, Tokens
from aggregator.ingest.pods import Pods
from aggregator.ingest.server import IngestServer
from aggregator.kube.client import KubeClient, KubeError, Unreachable
from aggregator.kube.events import policy_refused
from aggregator.kube.lease import Lease
from aggregator.kube.stop import StopSwitch
from aggregator.kube.write import Publisher
from aggregator.policy_source import PolicySource
from aggregator.serve.api import Api
from aggregator.serve.metrics import Scrape
from aggregator.tls import Certificate
from aggregator.trace import MAX_TRACE_BYTES, LineFile, Recorder, Stages
from aggregator.watches import Watches, reviewer
from aggregator.written import WrittenLog
from headway import metrics
from headway.options import version
from headway.readings import Readings

log = logging.getLogger(__name__)

SNAPSHOT_EVERY_S = 60.0
#: Everything is looked at again this often because time has passed, in slices, so that the loop never waits long.
SWEEP_EVERY_S = 5.0
SWEEP_SLICE = 64
#: Nodes whose verdict changes by time alone (a burst is over, a dwell ends) are looked at this soon after.
DUE_EVERY_S = 0.1
#: Nodes that could not be written because writing was not allowed are tried again this often.
HELD_BACK_EVERY_S = 0.5
LOOP_LAG_EVERY_S = 0.05
LOOP_LAG_WINDOW_S = 60.0
#: The agents connect once the nodes are known, or after this long without an answer from the API server.
NODES_FIRST_S = 10.0


class Aggregator:
    """One aggregator process: `run` until `stopping` is set."""

    def __init__(self, config: AggregatorConfig, client: KubeClient) -> None:
        self._config = config
        self._client = client
        self.names = config.names
        self.dry_run = config.dry_run
        self.stopping = asyncio.Event()
        self.epoch = secrets.token_hex(8)
        self.clock = Clock()
        self.readings = Readings("aggregator")
        self.readings.set(metrics.BUILD_INFO, 1, (version(), "aggregator"))
        stages = Stages()
        self._recorder = Recorder(config.record) if config.record else None
        self._trace = LineFile(config.trace, MAX_TRACE_BYTES) if config.trace else None
        self.core = Core(config.names, self.clock, self.readings, stages, self._recorder)
        self.policy = PolicySource(self.clock.now, self.readings, self._policy_loaded, self._policy_refused)
        self._refusal: str | None = None
        self.pods = Pods()
        self.ingest = IngestServer(
            self.core, self._authenticator(), self.pods, self.clock, self.readings, epoch=self.epoch
        )
        self.gate = Gate(Lease(client, config.namespace, config.identity), StopSwitch(client, config.namespace))
        self.written = WrittenLog(self.readings, stages, self._trace, config.dry_run)
        self.publisher = Publisher(
            client,
            config.names,
            desired=self._desired,
            reserve=self.core.reserve,
            release=self.core.release,
            gate=self.gate.may_write,
            now=self.clock.now,
            on_view=self._own_view,
            on_written=self.written.add,
            dry_run=config.dry_run,
        )
        self.core.on_dirty = self.publisher.mark
        self.core.on_reply = self.ingest.send
        self.watches = Watches(client, config, self)
        self.snapshot_at_s: float | None = None
        self.addresses: dict[str, tuple[str, int]] = {}
        self._restore()

    # --- what the parts tell each other ------------------------------------------------------------------------------
    def node_seen(self, view: NodeView) -> None:
        """From the watch. Whoever wrote, the node is planned again: somebody may have removed what is ours."""
        if self.publisher.saw(view):
            self._own_view(view)
            self.publisher.mark((view.name,))

    def _own_view(self, view: NodeView) -> None:
        self.core.feed((NodeSeen(self.clock.now(), view),))

    def node_gone(self, name: str, uid: str) -> None:
        self.publisher.gone(name, uid)
        self.core.feed((NodeGone(self.clock.now(), name, uid),))
        self.ingest.forget(name)

    def _desired(self, node: str) -> DesiredNode | None:
        """Without a policy nothing is known to be wanted, which is not the same as nothing wanted."""
        return self.core.desired(node) if self.policy.state.hash else None

    def _policy_loaded(self, loaded: PolicyLoaded) -> None:
        self._refusal = None
        self.core.feed((loaded,))
        self.publisher.mark_all()

    def _policy_refused(self, why: str) -> None:
        self._refusal = why

    def _authenticator(self) -> Authenticator:
        if self._config.insecure:
            log.warning("INSECURE: no TLS, no tokens. Any process on this machine can report any node. Demo only.")
            return Insecure()
        return Tokens(
            reviewer(self._client),
            self.pods,
            namespace=self._config.namespace,
            service_account=self._config.agent_service_account,
            count=lambda answer: self.readings.inc(metrics.TOKEN_REVIEWS, (answer,)),
        )

    @property
    def not_ready(self) -> list[str]:
        """What is missing before this process can do its work; empty = ready."""
        missing = self.watches.not_synced()
        if self.policy.state.hash is None:
            missing.append(f"no policy is in force: {self.policy.state.error or 'none was found yet'}")
        if "agents" not in self.addresses:
            missing.append("the agents' end point is not open yet")
        return missing

    # --- life --------------------------------------------------------------------------------------------------------
    async def run(self) -> None:
        """Raises OSError where an address cannot be listened on or a certificate cannot be read."""
        certificate = self._certificate()
        async with contextlib.AsyncExitStack() as stack:
            api_tls = certificate.context if certificate and self._config.api_tls else None
            api = Api(self, Scrape(self))
            await stack.enter_async_context(self._site("api", api.app(), self._config.api_listen, api_tls))
            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(part) for part in self._parts(certificate)]
                    await self._open_for_agents(stack, certificate)
                    await self.stopping.wait()
                    await self.ingest.stop()
                    for task in tasks:
                        task.cancel()
            finally:
                await self._close()

    def _parts(self, certificate: Certificate | None) -> Iterable[Any]:
        yield from self.watches.parts()
        yield self.publisher.run()
        yield self._sweep()
        yield self._housekeeping()
        yield self._retry_held_back()
        yield self._measure_loop()
        if not self._config.dry_run:
            yield self.gate.lease.run()
        if self._config.policy is not None:
            yield self.policy.poll_file(self._config.policy)
        if certificate is not None:
            yield certificate.watch()

    async def _open_for_agents(self, stack: contextlib.AsyncExitStack, certificate: Certificate | None) -> None:
        """After the first list of nodes, so that our clock is not behind what an earlier process published."""
        waits = {asyncio.create_task(self.watches.nodes.wait_synced()), asyncio.create_task(self.stopping.wait())}
        await asyncio.wait(waits, timeout=NODES_FIRST_S, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        context = certificate.context if certificate else None
        await stack.enter_async_context(self._site("agents", self.ingest.app(), self._config.listen, context))
        log.info("ready for agents=%s api=%s", *(f"{host}:{port}" for host, port in self._addresses()))

    def _addresses(self) -> tuple[tuple[str, int], tuple[str, int]]:
        return self.addresses["agents"], self.addresses["api"]

    def _certificate(self) -> Certificate | None:
        if self._config.tls_cert is None or self._config.tls_key is None:
            return None
        return Certificate(self._config.tls_cert, self._config.tls_key)

    @contextlib.asynccontextmanager
    async def _site(
        self, name: str, app: web.Application, listen: tuple[str, int], context: ssl.SSLContext | None
    ) -> AsyncIterator[None]:
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=2.0)
        await runner.setup()
        try:
            await web.TCPSite(runner, *listen, ssl_context=context, backlog=2048).start()
            host, port = runner.addresses[0][:2]
            self.addresses[name] = (host, port)
            yield
        finally:
            await runner.cleanup()

    async def _close(self) -> None:
        self.save()
        if not self._config.dry_run:
            await self.gate.lease.release()
        for file in (self._recorder, self._trace):
            if file is not None:
                file.close()

    # --- periodic ----------------------------------------------------------------------------------------------------
    async def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        swept_s = loop.time()
        while True:
            await asyncio.sleep(DUE_EVERY_S)
            names = self.core.due()
            if loop.time() - swept_s >= SWEEP_EVERY_S:
                swept_s, names = loop.time(), list(self.publisher.views)
            for start in range(0, len(names), SWEEP_SLICE):
                self.core.sweep(names[start : start + SWEEP_SLICE])
                await asyncio.sleep(0)

    async def _housekeeping(self) -> None:
        loop = asyncio.get_running_loop()
        saved_s = loop.time()
        while True:
            await asyncio.sleep(1.0)
            for file in (self._recorder, self._trace):
                if file is not None:
                    file.flush()
            await self._tell_refusal()
            if loop.time() - saved_s >= SNAPSHOT_EVERY_S:
                await self._save_aside()
                saved_s = loop.time()

    async def _tell_refusal(self) -> None:
        """An Event on the ConfigMap, once per refusal; the API server may be away, so until it was taken."""
        if self._refusal is None or self._config.policy is not None or self._config.dry_run:
            return
        why, self._refusal = self._refusal, None
        try:
            await policy_refused(self._client, self._config.namespace, why)
        except Unreachable:
            self._refusal = self._refusal or why
        except KubeError as error:
            log.warning("the refusal of the policy could not be told as an Event: %s", error)

    async def _retry_held_back(self) -> None:
        while True:
            await asyncio.sleep(HELD_BACK_EVERY_S)
            if self.publisher.held_back and await self.gate.may_write():
                self.publisher.mark(tuple(self.publisher.held_back))

    async def _measure_loop(self) -> None:
        loop = asyncio.get_running_loop()
        worst_s = before_s = 0.0
        window_s = loop.time()
        while True:
            due_s = loop.time() + LOOP_LAG_EVERY_S
            await asyncio.sleep(LOOP_LAG_EVERY_S)
            worst_s = max(worst_s, loop.time() - due_s)
            self.readings.set(metrics.LOOP_BLOCKED, max(worst_s, before_s))
            if loop.time() - window_s >= LOOP_LAG_WINDOW_S:
                window_s, before_s, worst_s = loop.time(), worst_s, 0.0

    # --- snapshot ----------------------------------------------------------------------------------------------------
    def _restore(self) -> None:
        snapshot = state.read(self._config.state_dir) if self._config.state_dir else None
        if snapshot is None or not self.core.restore(snapshot.engine):
            return
        self.clock.not_before(snapshot.at_s)
        self.ingest.memory.update(snapshot.memory)
        self.snapshot_at_s = snapshot.at_s
        if (policy := self.core.engine.policy) is not None:
            self.policy.restored(policy.hash, "snapshot")
        log.info("snapshot of %s restored, nodes=%d", snapshot.version, len(snapshot.memory))

    def _taken(self) -> bytes:
        """Engine and cursors in one step."""
        now_s = self.clock.now()
        snapshot = state.Snapshot(version(), now_s, self.core.engine.snapshot(), self.ingest.memory)
        return state.encode(snapshot)

    async def _save_aside(self) -> None:
        if self._config.state_dir is not None:
            at_s, data = self.clock.now(), self._taken()
            try:
                await asyncio.to_thread(state.write, self._config.state_dir, data)
                self.snapshot_at_s = at_s
            except OSError as error:
                log.error("snapshot not written: %s", error)

    def save(self) -> None:
        if self._config.state_dir is not None:
            try:
                state.write(self._config.state_dir, self._taken())
            except OSError as error:
                log.error("snapshot not written: %s", error)


def crash_on_write_errors(aggregator: Aggregator, loop: asyncio.AbstractEventLoop) -> list[BaseException]:
    """A programmer's error inside a write ends the process, instead of leaving one node unpublished for ever.

    The list returned holds the error that ended it.
    """
    errors: list[BaseException] = []

    def handler(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        loop.default_exception_handler(context)
        error, task = context.get("exception"), context.get("task")
        if isinstance(error, BaseException) and isinstance(task, asyncio.Task) and task.get_name().startswith("write "):
            errors.append(error)
            aggregator.stopping.set()

    loop.set_exception_handler(handler)
    return errors
