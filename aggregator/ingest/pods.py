"""The agents' pods as the pod watch of our namespace shows them: alive, gone, or not seen yet. No I/O."""

from __future__ import annotations

from collections.abc import Callable

#: Pods that are gone and remembered as such: their tokens may still pass a review for about 10 s.
MAX_GONE = 16_384


class Pods:
    """`on_gone(uid)` is called once for each pod that goes; `synced` once the watch has listed them all."""

    def __init__(self) -> None:
        self._created_s: dict[str, float | None] = {}
        self._gone: dict[str, None] = {}
        self.synced = False
        self.on_gone: Callable[[str], None] | None = None

    def saw(self, uid: str, created_s: float | None) -> None:
        """`created_s` = creationTimestamp, seconds since 1970; None where it could not be read."""
        self._created_s[uid] = created_s

    def gone(self, uid: str) -> None:
        self._created_s.pop(uid, None)
        self._gone[uid] = None
        while len(self._gone) > MAX_GONE:
            del self._gone[next(iter(self._gone))]
        if self.on_gone:
            self.on_gone(uid)

    def alive(self, uid: str) -> bool | None:
        """None = the watch has not shown this pod (yet)."""
        if uid in self._created_s:
            return True
        return False if uid in self._gone else None

    def created_s(self, uid: str) -> float | None:
        return self._created_s.get(uid)
