"""The server's TLS context, from files that are read again when they change: certificates are rotated under us."""

from __future__ import annotations

import asyncio
import logging
import ssl
from pathlib import Path

log = logging.getLogger(__name__)

CHECK_S = 10.0


class Certificate:
    """`context` serves new connections with the newest pair that could be loaded. The first load raises OSError."""

    def __init__(self, cert: Path, key: Path) -> None:
        self._cert = cert
        self._key = key
        self._mark = self._stat()
        self._failing = ""
        self.context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self.context.load_cert_chain(cert, key)

    def _stat(self) -> tuple[tuple[int, int], ...]:
        try:
            return tuple((stat.st_mtime_ns, stat.st_ino) for stat in (self._cert.stat(), self._key.stat()))
        except OSError:
            return ()

    def refresh(self) -> bool:
        """Load the files again if they changed. A pair that does not load leaves the old one in use and is tried again,
        since not everybody replaces both files in one step."""
        mark = self._stat()
        if mark == self._mark or not mark:
            return False
        try:
            # Loaded aside first: a pair that does not match must not spoil the context in use.
            ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(self._cert, self._key)
            self.context.load_cert_chain(self._cert, self._key)
        except OSError as error:
            if str(error) != self._failing:
                log.warning("certificate not reloaded, the old one stays: %s", error)
                self._failing = str(error)
            return False
        self._mark, self._failing = mark, ""
        log.info("certificate reloaded cert=%s", self._cert)
        return True

    async def watch(self, every_s: float = CHECK_S) -> None:
        while True:
            await asyncio.sleep(every_s)
            self.refresh()
