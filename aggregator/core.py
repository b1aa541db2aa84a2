"""The engine's host: every input goes through `feed`, every effect comes out of it. One event loop, one engine.

Between an input and its effects nothing is awaited, so whoever called knows that it is applied.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence

from aggregator.clock import Clock
from aggregator.engine.engine import Engine
from aggregator.engine.inputs import AgentEvent, DesiredNode, Dirty, Effect, Input, Record, Reply
from aggregator.ingest.session import SampleTaken
from aggregator.trace import Recorder, Stages
from headway import metrics
from headway.names import Names
from headway.readings import Readings
from headway.wire import Frame

log = logging.getLogger(__name__)


class Core:
    """`on_dirty` and `on_reply` are set by the root. `version` rises with each input: lists carry it."""

    def __init__(
        self, names: Names, clock: Clock, readings: Readings, stages: Stages, recorder: Recorder | None = None
    ) -> None:
        self.engine = Engine(names, clock.now())
        self.version = 0
        self.on_dirty: Callable[[Iterable[str]], None] = lambda nodes: None
        self.on_reply: Callable[[str, Frame], object] = lambda node, frame: None
        self._names = names
        self._clock = clock
        self._readings = readings
        self._stages = stages
        self._recorder = recorder

    def restore(self, data: bytes) -> bool:
        """Go on from an engine's snapshot. False where it cannot be used: then all begins anew."""
        try:
            self.engine = Engine.restored(self._names, self._clock.now(), data)
        except ValueError as error:
            log.warning("the engine's snapshot cannot be used, starting empty: %s", error)
            return False
        return True

    def feed(self, inputs: Sequence[Input]) -> None:
        """Apply all, then wake the publisher once."""
        received_s = time.time()
        dirty: set[str] = set()
        for item in inputs:
            if self._recorder is not None:
                self._recorder.record(item)
            self.version += 1
            if isinstance(item, AgentEvent):
                self._readings.inc(metrics.EVENTS, (item.event.kind,))
            touched = self._effects(self.engine.handle(item))
            if touched:
                self._stages.applied(item, received_s)
                dirty |= touched
        if dirty:
            self.on_dirty(dirty)

    def absorb(self, node: str, sample: SampleTaken) -> None:
        layout = sample.layout
        self.engine.absorb(node, layout.group, layout.rows, layout.columns, sample.data, sample.at_s)

    def desired(self, node: str) -> DesiredNode | None:
        self._stages.planning(node)
        return self.engine.desired(node, self._clock.now())

    def reserve(self, node: str) -> bool:
        return self.engine.reserve(node)

    def release(self, node: str) -> None:
        self._wake(self.engine.release(node))

    def sweep(self, nodes: Sequence[str]) -> None:
        """Look at these nodes again, because time has passed."""
        self._wake(self.engine.sweep(nodes, self._clock.now()))

    def due(self) -> list[str]:
        """Nodes whose verdict time alone may have changed."""
        return self.engine.due(self._clock.now())

    def _wake(self, effects: Iterable[Effect]) -> None:
        if dirty := self._effects(effects):
            self.on_dirty(dirty)

    def _effects(self, effects: Iterable[Effect]) -> set[str]:
        dirty: set[str] = set()
        for effect in effects:
            match effect:
                case Dirty():
                    dirty |= effect.nodes
                case Reply():
                    self.on_reply(effect.node, effect.frame)
                case Record():
                    log.info("%s node=%s part=%s %s", effect.what, effect.node, effect.part, effect.detail)
        return dirty
