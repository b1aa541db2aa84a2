"""Where the policy comes from: a ConfigMap that is watched, or a file that is looked at once a second.

A policy that is refused changes nothing: the last good one stays in force, and the error is told with file and line on
log, API, metric, and as an Event on the ConfigMap. Without any policy nothing is published.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from aggregator.engine.inputs import PolicyLoaded
from aggregator.engine.policy_load import PolicyError, load_policy
from aggregator.kube.objects import ConfigMap
from headway import metrics
from headway.names import POLICY_KEY
from headway.readings import Readings

log = logging.getLogger(__name__)

POLL_S = 1.0
#: The API server takes ConfigMaps of 1 MiB in all.
MAX_POLICY_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class PolicyState:
    """What is in force (`hash` None = nothing yet), and the last refusal, until a policy is taken again."""

    hash: str | None = None
    source: str = ""
    loaded_at_s: float | None = None
    error: str | None = None
    error_at_s: float | None = None


class PolicySource:
    """`offer` takes a text or refuses it; `on_loaded` gets the input for the engine; `on_refused` tells people."""

    def __init__(
        self,
        now: Callable[[], float],
        readings: Readings,
        on_loaded: Callable[[PolicyLoaded], None],
        on_refused: Callable[[str], None],
    ) -> None:
        self.state = PolicyState()
        self._now = now
        self._readings = readings
        self._on_loaded = on_loaded
        self._on_refused = on_refused
        self._last: tuple[str, str] | None = None

    def restored(self, hash_: str, source: str) -> None:
        """A snapshot brought the last good policy along."""
        self.state = PolicyState(hash=hash_, source=source)
        self._readings.replace(metrics.POLICY_INFO, {(hash_,): 1.0})

    def offer(self, text: str, source: str) -> bool:
        """Whether the policy was taken. The same text again is not looked at again."""
        if self._last == (text, source):
            return self.state.error is None
        self._last = (text, source)
        try:
            policy = load_policy(text, source)
        except PolicyError as error:
            self.refuse(str(error))
            return False
        self.state = PolicyState(policy.hash, source, self._now())
        self._readings.replace(metrics.POLICY_INFO, {(policy.hash,): 1.0})
        log.info("policy loaded hash=%s source=%s", policy.hash, source)
        self._on_loaded(PolicyLoaded(self._now(), text, source))
        return True

    def refuse(self, why: str) -> None:
        before = self.state
        self.state = PolicyState(before.hash, before.source, before.loaded_at_s, why, self._now())
        if before.error != why:
            self._readings.inc(metrics.POLICY_REFUSED)
            log.error("policy refused, %s: %s", f"{before.hash} stays" if before.hash else "none in force", why)
            self._on_refused(why)

    def configmap(self, configmap: ConfigMap) -> None:
        """The ConfigMap as the watch shows it."""
        where = f"configmap {configmap.metadata.namespace}/{configmap.metadata.name}"
        text = (configmap.data or {}).get(POLICY_KEY)
        if text is None:
            self._last = None
            self.refuse(f"{where}: there is no key {POLICY_KEY}; put the policy there")
        else:
            self.offer(text, f"{where}/{POLICY_KEY}")

    def configmap_gone(self, name: str) -> None:
        self._last = None
        self.refuse(f"configmap {name} was deleted; make it again, until then the policy stays as it is")

    def read_file(self, path: Path) -> None:
        try:
            data = path.read_bytes()
            if len(data) > MAX_POLICY_BYTES:
                raise ValueError(f"{len(data)} bytes, at most {MAX_POLICY_BYTES}")
            text = data.decode()
        except (OSError, ValueError) as error:
            self._last = None
            self.refuse(f"{path}: {error}")
        else:
            self.offer(text, str(path))

    async def poll_file(self, path: Path, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        """Until cancelled: read the file whenever its time, size or inode changes."""
        seen: tuple[int, int, int] | None = None
        first = True
        while True:
            mark = _mark(path)
            if mark != seen or first:
                self.read_file(path)
            first, seen = False, mark
            await sleep(POLL_S)


def _mark(path: Path) -> tuple[int, int, int] | None:
    """Changes whenever the file does; None: it cannot be looked at."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino
