"""Objects, their versions, and the history that watches read.

Stored objects are never changed in place: an update stores a new one. One counter numbers all writes, so a
resourceVersion orders them over all kinds. History is bounded; who asks for what is no longer in it is told to list
again (410 Expired), as a real server does.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from fakes.kube.resources import RESOURCES, Resource, storage_of
from fakes.kube.status import Obj, bad_request, expired

FIRST_VERSION = 100
HISTORY = 1000
MAX_CONTINUES = 64

Key = tuple[str, str]  # namespace ("" for kinds without), name


@dataclass(frozen=True, slots=True)
class Change:
    """`old` is the object before, None for a new one; for DELETED `new` is the last state at the deletion's version."""

    version: int
    type: Literal["ADDED", "MODIFIED", "DELETED"]
    new: Obj
    old: Obj | None


@dataclass
class _Shelf:
    objects: dict[Key, Obj] = field(default_factory=dict)
    history: deque[Change] = field(default_factory=deque)
    #: Version of the newest change that is no longer in the history.
    forgotten: int = 0


@dataclass(frozen=True, slots=True)
class _Rest:
    """The pages of a list still to be given: a snapshot, so that pages fit together."""

    version: int
    resource: str
    items: list[Obj]


class Store:
    """`on_change` is called after every write, with the kind and the change."""

    def __init__(self, history: int = HISTORY) -> None:
        self._history = history
        self._shelves = {one.key: _Shelf() for one in RESOURCES if storage_of(one) is one}
        self._waiting: set[asyncio.Event] = set()
        self._rests: OrderedDict[str, _Rest] = OrderedDict()
        self._tickets = itertools.count(1)
        self.version = FIRST_VERSION
        self.on_change: Callable[[Resource, Change], None] | None = None

    def get(self, resource: Resource, namespace: str, name: str) -> Obj | None:
        return self._shelf(resource).objects.get((namespace, name))

    def all(self, resource: Resource) -> list[Obj]:
        """In the order of a real server: by namespace, then name."""
        objects = self._shelf(resource).objects
        return [objects[key] for key in sorted(objects)]

    def by_uid(self, uid: str) -> tuple[Resource, Obj] | None:
        for resource, obj in self.everything():
            if obj["metadata"]["uid"] == uid:
                return resource, obj
        return None

    def everything(self) -> Iterator[tuple[Resource, Obj]]:
        for resource in RESOURCES:
            if storage_of(resource) is resource:
                for obj in list(self._shelf(resource).objects.values()):
                    yield resource, obj

    def put(self, resource: Resource, obj: Obj) -> Obj:
        """Stores a new object or a new state of one; gives it with its resourceVersion."""
        shelf = self._shelf(resource)
        meta = obj["metadata"]
        key = (meta.get("namespace", ""), meta["name"])
        old = shelf.objects.get(key)
        stored = self._numbered(obj)
        shelf.objects[key] = stored
        self._record(resource, Change(self.version, "MODIFIED" if old else "ADDED", stored, old))
        return stored

    def remove(self, resource: Resource, obj: Obj) -> Obj:
        meta = obj["metadata"]
        old = self._shelf(resource).objects.pop((meta.get("namespace", ""), meta["name"]))
        last = self._numbered(obj)
        self._record(resource, Change(self.version, "DELETED", last, old))
        return last

    def _shelf(self, resource: Resource) -> _Shelf:
        return self._shelves[storage_of(resource).key]

    def _numbered(self, obj: Obj) -> Obj:
        self.version += 1
        return obj | {"metadata": obj["metadata"] | {"resourceVersion": str(self.version)}}

    def _record(self, resource: Resource, change: Change) -> None:
        shelf = self._shelf(resource)
        shelf.history.append(change)
        while len(shelf.history) > self._history:
            shelf.forgotten = shelf.history.popleft().version
        for event in self._waiting:
            event.set()
        if self.on_change is not None:
            self.on_change(resource, change)

    def forget_history(self) -> None:
        """As a compaction: no version before the present one can be watched from, no page list goes on."""
        self._rests.clear()
        for shelf in self._shelves.values():
            shelf.history.clear()
            shelf.forgotten = self.version

    # --- watches ------------------------------------------------------------------------------------------------------

    def since(self, resource: Resource, version: int) -> list[Change]:
        """The changes after `version`. Raises ApiStatus 410 where the history does not reach back so far."""
        shelf = self._shelf(resource)
        if version < shelf.forgotten:
            raise expired(f"too old resource version: {version} ({shelf.forgotten})")
        newer: list[Change] = []
        for change in reversed(shelf.history):
            if change.version <= version:
                break
            newer.append(change)
        return newer[::-1]

    def listen(self) -> asyncio.Event:
        """An event that every write sets; give it back with `unlisten`."""
        event = asyncio.Event()
        self._waiting.add(event)
        return event

    def unlisten(self, event: asyncio.Event) -> None:
        self._waiting.discard(event)

    # --- pages --------------------------------------------------------------------------------------------------------

    def page(self, resource: Resource, items: list[Obj], limit: int) -> tuple[list[Obj], Obj]:
        """The first `limit` items (0 = all), and the list's metadata with a token for the rest."""
        return self._page(_Rest(self.version, resource.key, items), limit)

    def next_page(self, resource: Resource, token: str, limit: int) -> tuple[list[Obj], Obj]:
        """Raises ApiStatus: 400 for a token that is none, 410 for one that is too old."""
        prefix, _, number = token.partition("-")
        if prefix != "page" or not number.isdigit():
            raise bad_request("invalid continue token: continue key is not valid: not a token of this server")
        rest = self._rests.get(token)
        if rest is None or rest.resource != resource.key:
            raise expired(
                "The provided continue parameter is too old to display a consistent list result. You must start a new "
                "list without the continue parameter."
            )
        return self._page(rest, limit)

    def _page(self, rest: _Rest, limit: int) -> tuple[list[Obj], Obj]:
        meta: Obj = {"resourceVersion": str(rest.version)}
        if not limit or len(rest.items) <= limit:
            return rest.items, meta
        token = f"page-{next(self._tickets)}"
        self._rests[token] = _Rest(rest.version, rest.resource, rest.items[limit:])
        while len(self._rests) > MAX_CONTINUES:
            self._rests.popitem(last=False)
        return rest.items[:limit], meta | {"continue": token, "remainingItemCount": len(rest.items) - limit}
