"""List, then watch, for ever: one kind of object kept in step with the API server.

Resumes from the last resourceVersion (bookmarks keep it young); a 410 or an ERROR event means list again; what a new
list no longer holds is reported as gone. Nothing is ever guessed while the server is away: `synced` turns false only
before the first list, and `last_contact_s` says how old the picture is.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Mapping
from typing import Generic, Protocol, TypeVar

import msgspec

from aggregator.kube.client import KubeClient, KubeError, Unreachable
from aggregator.kube.objects import Meta

log = logging.getLogger(__name__)

PAGE = 500
WATCH_TIMEOUT_S = 290
#: Bookmarks come about once a minute; a watch that is silent for this long is dead.
IDLE_S = 300.0
BACKOFF_MAX_S = 10.0


class HasMeta(Protocol):
    @property
    def metadata(self) -> Meta: ...


T = TypeVar("T", bound=HasMeta)


class _ListMeta(msgspec.Struct, frozen=True, rename="camel"):
    resource_version: str = ""
    continue_: str = msgspec.field(default="", name="continue")


class _List(msgspec.Struct, frozen=True):
    metadata: _ListMeta
    items: list[msgspec.Raw] | None = None


class _WatchEvent(msgspec.Struct, frozen=True):
    type: str
    object: msgspec.Raw


class _OnlyMeta(msgspec.Struct, frozen=True):
    metadata: Meta


class _Expired(Exception):
    """The resourceVersion is too old: list again."""


_decode_list = msgspec.json.Decoder(_List).decode
_decode_event = msgspec.json.Decoder(_WatchEvent).decode
_decode_meta = msgspec.json.Decoder(_OnlyMeta).decode


class Watch(Generic[T]):
    """`on_change(object)` for each object new or changed, `on_gone(metadata)` for each that went, in order."""

    def __init__(
        self,
        client: KubeClient,
        path: str,
        kind: type[T],
        *,
        on_change: Callable[[T], None],
        on_gone: Callable[[Meta], None],
        query: Mapping[str, str] | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self._client = client
        self._path = path
        self._decode = msgspec.json.Decoder(kind).decode
        self._on_change = on_change
        self._on_gone = on_gone
        self._query = dict(query or {})
        self._rng = rng or random.Random()
        self._known: dict[str, Meta] = {}
        self._version = ""
        self._synced = asyncio.Event()
        #: Times in a row that a version was too old, without a change heard in between.
        self._expired = 0
        self.last_contact_s = 0.0
        self.relists = 0
        self.failing_since_s: float | None = None

    @property
    def synced(self) -> bool:
        return self._synced.is_set()

    async def wait_synced(self) -> None:
        await self._synced.wait()

    async def run(self) -> None:
        """Until cancelled."""
        failures = 0
        while True:
            try:
                if not self._version:
                    await self._list()
                self._contact()
                failures = 0
                await self._watch()
            except _Expired:
                await self._start_over()
            except (KubeError, Unreachable, msgspec.DecodeError) as error:
                if isinstance(error, KubeError) and error.status == 410:
                    await self._start_over()
                    continue
                failures += 1
                self._failed(error)
                delay_s = self._delay_s(failures)
                if isinstance(error, KubeError) and error.retry_after_s:
                    delay_s = max(delay_s, min(error.retry_after_s, BACKOFF_MAX_S))
                await asyncio.sleep(delay_s)

    async def _start_over(self) -> None:
        """List again: at once, but not in a loop where each new version is told to be too old as well."""
        self._version = ""
        self._expired += 1
        if self._expired > 1:
            await asyncio.sleep(self._delay_s(self._expired))

    def _delay_s(self, failures: int) -> float:
        return self._rng.uniform(0.05, min(BACKOFF_MAX_S, 0.2 * 2 ** min(failures, 8)))

    def _contact(self) -> None:
        self.last_contact_s = asyncio.get_running_loop().time()
        if self.failing_since_s is not None:
            log.info("watch recovered path=%s after_s=%.1f", self._path, self.last_contact_s - self.failing_since_s)
            self.failing_since_s = None

    def _failed(self, error: Exception) -> None:
        if self.failing_since_s is None:
            self.failing_since_s = asyncio.get_running_loop().time()
            log.warning("watch failing path=%s error=%s", self._path, error)

    async def _list(self) -> None:
        found: dict[str, Meta] = {}
        objects: list[T] = []
        token = ""
        while True:
            query = {**self._query, "limit": str(PAGE), **({"continue": token} if token else {})}
            page = _decode_list(await self._client.request("GET", self._path, query=query, timeout_s=60.0))
            for raw in page.items or ():
                item = self._decode(bytes(raw))
                objects.append(item)
                found[_key(item.metadata)] = item.metadata
            token = page.metadata.continue_
            if not token:
                break
        self.relists += 1
        for key, meta in self._known.items():
            if key not in found or found[key].uid != meta.uid:
                self._on_gone(meta)
        before, self._known = self._known, found
        for item in objects:
            old = before.get(_key(item.metadata))
            if old is None or old.resource_version != item.metadata.resource_version:
                self._on_change(item)
        self._version = page.metadata.resource_version
        self._synced.set()

    async def _watch(self) -> None:
        query = {
            **self._query,
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": self._version,
            "timeoutSeconds": str(WATCH_TIMEOUT_S),
        }
        async for line in self._client.lines(self._path, query, IDLE_S):
            event = _decode_event(line)
            self._contact()
            if event.type == "ERROR":
                raise _Expired
            self._expired = 0
            meta = _decode_meta(bytes(event.object)).metadata
            self._version = meta.resource_version
            if event.type == "BOOKMARK":
                continue
            key = _key(meta)
            if event.type == "DELETED":
                self._known.pop(key, None)
                self._on_gone(meta)
                continue
            old = self._known.get(key)
            if old is not None and old.uid != meta.uid:
                self._on_gone(old)
            self._known[key] = meta
            self._on_change(self._decode(bytes(event.object)))


def _key(meta: Meta) -> str:
    return f"{meta.namespace}/{meta.name}"
