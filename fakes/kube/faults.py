"""What a test can make the server do wrong: be late, refuse, cut watches."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from fakes.kube.status import ApiStatus

MAX_DELAY_S = 60.0
MAX_FAILURES = 10_000


@dataclass
class Faults:
    """Changed in-process, or by an admin's `POST /faults` with fields of `set`, which this server alone has."""

    #: Every request waits this long before it is looked at.
    delay_s: float = 0.0
    #: The next requests that are answered with `status` before they are looked at.
    failing: int = 0
    status: int = 500
    retry_after_s: int = 1
    #: Only paths that contain this text are delayed or refused.
    path: str = ""
    _cut: set[asyncio.Event] = field(default_factory=set)

    def fail(self, requests: int, status: int = 500, *, path: str = "", retry_after_s: int = 1) -> None:
        """The next `requests` requests are refused: 429 with Retry-After, 500, or any other status."""
        self.failing, self.status, self.path, self.retry_after_s = requests, status, path, retry_after_s

    def drop_watches(self) -> None:
        """Ends every watch that is open now, by closing its connection without a last word."""
        for event in self._cut:
            event.set()

    def watched(self) -> asyncio.Event:
        """An event that `drop_watches` sets, for one watch; give it back with `unwatched`."""
        event = asyncio.Event()
        self._cut.add(event)
        return event

    def unwatched(self, event: asyncio.Event) -> None:
        self._cut.discard(event)

    async def before(self, path: str) -> None:
        """Raises ApiStatus where this request is to be refused."""
        if self.path not in path:
            return
        if self.delay_s:
            await asyncio.sleep(self.delay_s)
        if not self.failing:
            return
        self.failing -= 1
        if self.status == 429:
            raise ApiStatus(
                429,
                "Too many requests, please try again later.",
                details={"retryAfterSeconds": self.retry_after_s},
                headers={"Retry-After": str(self.retry_after_s)},
            )
        raise ApiStatus(self.status, "Internal error occurred: injected")

    def set(self, wish: Any) -> None:
        """`{"delay_s": 0.1, "fail": 3, "status": 429, "path": "/nodes", "drop_watches": true}`; ApiStatus 400."""
        known: dict[str, Any] = {"delay_s": (int, float), "fail": int, "status": int, "path": str, "drop_watches": bool}
        if not isinstance(wish, dict) or not wish.keys() <= known.keys():
            raise ApiStatus(400, f"faults: an object with some of {', '.join(known)}")
        for name, value in wish.items():
            if not isinstance(value, known[name]) or (isinstance(value, bool) != (known[name] is bool)):
                raise ApiStatus(400, f"faults: {name} is not of its type")
        if not 0 <= wish.get("delay_s", 0) <= MAX_DELAY_S or not 0 <= wish.get("fail", 0) <= MAX_FAILURES:
            raise ApiStatus(400, f"faults: delay_s is at most {MAX_DELAY_S:g}, fail at most {MAX_FAILURES}")
        self.delay_s = float(wish.get("delay_s", self.delay_s))
        self.path = wish.get("path", self.path)
        if "fail" in wish:
            self.fail(wish["fail"], wish.get("status", 500), path=self.path)
        if wish.get("drop_watches"):
            self.drop_watches()
