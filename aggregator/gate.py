"""May we write? Asked before every single write: the Lease is held, and nobody has said stop."""

from __future__ import annotations

import logging

from aggregator.kube.client import KubeError, Unreachable
from aggregator.kube.lease import Lease
from aggregator.kube.stop import StopSwitch

log = logging.getLogger(__name__)


class Gate:
    """`stopped` and `why_not` are what was last seen; None = may write."""

    def __init__(self, lease: Lease, stop: StopSwitch) -> None:
        self.lease = lease
        self._stop = stop
        self.why_not: str | None = "not asked yet"

    @property
    def stopped(self) -> bool | None:
        """None = not known yet."""
        return self._stop.stopped

    async def may_write(self) -> bool:
        why_not = await self._ask()
        if why_not != self.why_not:
            log.info("writing: %s", why_not or "allowed")
        self.why_not = why_not
        return why_not is None

    async def _ask(self) -> str | None:
        if not self.lease.held:
            return f"the Lease is held by {self.lease.holder or 'nobody yet'}"
        try:
            stopped = await self._stop.check()
        except (KubeError, Unreachable):
            # Not knowing whether people have said stop is a reason not to write.
            return "cannot ask whether writing is stopped"
        if stopped:
            return "the ConfigMap headway-stop exists"
        return None if self.lease.held else "the Lease was lost"
