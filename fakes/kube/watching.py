"""One watch: what was there, then every change, until its time is over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from fakes.kube.resources import Resource
from fakes.kube.selectors import Predicate
from fakes.kube.status import ApiStatus, Obj
from fakes.kube.store import Change, Store

DEFAULT_TIMEOUT_S = 1800.0
INITIAL_END = "k8s.io/initial-events-end"
#: A watch that asked for bookmarks gets the last one so long before its end, and goes on from there next time.
LAST_BOOKMARK_S = 2.0


@dataclass(frozen=True)
class Wish:
    """What a watch request asks for. `version` None = begin with what is there now."""

    version: int | None
    bookmarks: bool
    timeout_s: float

    @classmethod
    def of(cls, query: Mapping[str, str]) -> Wish:
        """Raises ApiStatus for values that are none."""
        text = query.get("resourceVersion", "")
        if text and not text.isdigit():
            why = f'Invalid value: "{text}": strconv.ParseUint: parsing "{text}": invalid syntax'
            raise ApiStatus(500, f"resourceVersion: {why}", reason="")
        initial = text in ("", "0") or query.get("sendInitialEvents") == "true"
        seconds = query.get("timeoutSeconds", "")
        timeout_s = min(float(seconds), DEFAULT_TIMEOUT_S) if seconds.isdigit() and int(seconds) else DEFAULT_TIMEOUT_S
        bookmarks = query.get("allowWatchBookmarks") in ("true", "1")
        return cls(None if initial else int(text), bookmarks, timeout_s)


class Watch:
    """`ends`: events, any of which ends the watch. `show` makes of a stored object what this client is sent."""

    def __init__(
        self,
        store: Store,
        resource: Resource,
        matches: Predicate,
        show: Callable[[Obj], Obj],
        bookmark_s: float,
        ends: tuple[asyncio.Event, ...],
    ) -> None:
        self._store = store
        self._resource = resource
        self._matches = matches
        self._show = show
        self._bookmark_s = bookmark_s
        self._ends = ends

    async def chunks(self, wish: Wish) -> AsyncIterator[bytes]:
        """Whole lines, several at a time where several changes came together."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + wish.timeout_s
        changed = self._store.listen()
        try:
            version = self._store.version if wish.version is None else wish.version
            if wish.version is None and (first := self._initial(wish)):
                yield first
            bookmark_at_s = self._next_bookmark_s(loop.time(), deadline_s)
            while not any(end.is_set() for end in self._ends) and loop.time() < deadline_s:
                changed.clear()
                try:
                    changes = self._store.since(self._resource, version)
                except ApiStatus as gone:
                    yield _line("ERROR", gone.body())
                    return
                lines = b"".join(filter(None, map(self._change, changes)))
                version = max(version, self._store.version)
                if lines:
                    yield lines
                if loop.time() >= bookmark_at_s:
                    bookmark_at_s = self._next_bookmark_s(loop.time(), deadline_s)
                    if wish.bookmarks:
                        yield self._bookmark(version)
                await self._wait(changed, min(deadline_s, bookmark_at_s) - loop.time())
        finally:
            self._store.unlisten(changed)

    def _next_bookmark_s(self, now_s: float, deadline_s: float) -> float:
        usual_s, last_s = now_s + self._bookmark_s, deadline_s - LAST_BOOKMARK_S
        return last_s if now_s < last_s < usual_s else usual_s

    async def _wait(self, changed: asyncio.Event, seconds: float) -> None:
        waits = [asyncio.ensure_future(event.wait()) for event in (changed, *self._ends)]
        try:
            await asyncio.wait(waits, timeout=max(0.0, seconds), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in waits:
                one.cancel()

    def _initial(self, wish: Wish) -> bytes:
        there = [obj for obj in self._store.all(self._resource) if self._matches(obj)]
        lines = b"".join(_line("ADDED", self._show(obj)) for obj in there)
        return lines + (self._bookmark(self._store.version, {INITIAL_END: "true"}) if wish.bookmarks else b"")

    def _bookmark(self, version: int, annotations: Mapping[str, str] | None = None) -> bytes:
        meta: Obj = {"resourceVersion": str(version)}
        meta |= {"annotations": dict(annotations)} if annotations else {}
        kind, api_version = self._resource.kind, self._resource.api_version
        return _line("BOOKMARK", {"kind": kind, "apiVersion": api_version, "metadata": meta})

    def _change(self, change: Change) -> bytes | None:
        """An object that begins to match is ADDED, one that ceases to is DELETED."""
        before = change.old is not None and self._matches(change.old)
        after = change.type != "DELETED" and self._matches(change.new)
        if not before and not after:
            return None
        word = "ADDED" if not before else "MODIFIED" if after else "DELETED"
        return _line(word, self._show(change.new))


def _line(word: str, obj: Any) -> bytes:
    return msgspec.json.encode({"type": word, "object": obj}) + b"\n"
