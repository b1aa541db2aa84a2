"""The audit log: one JSON line per finished request, in the fields of audit.k8s.io/v1 that its readers use."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from fakes.kube.status import Obj
from fakes.kube.tokens import ANONYMOUS, User

#: At this size the file becomes `<name>.1`, over the one before it.
MAX_BYTES = 256 * 1024 * 1024


def _micro(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%dT%H:%M:%S.%fZ")


@dataclass
class Request:
    """What is known of a request while it is served."""

    audit_id: str
    received: datetime
    uri: str
    source: str
    agent: str
    verb: str = ""
    user: User | None = None
    target: Obj = field(default_factory=dict)
    body: Any = None  # only for writes to nodes


class AuditLog:
    """Appends to one file; every line is in the file before its request ends."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: BinaryIO = path.open("ab", buffering=0)

    def write(self, request: Request, code: int) -> None:
        entry: Obj = {
            "kind": "Event",
            "apiVersion": "audit.k8s.io/v1",
            "level": "Metadata" if request.body is None else "Request",
            "auditID": request.audit_id,
            "stage": "ResponseComplete",
            "requestURI": request.uri,
            "verb": request.verb,
            "user": (request.user or ANONYMOUS).as_object(),
            "sourceIPs": [request.source],
            "userAgent": request.agent,
            "responseStatus": {"metadata": {}, "code": code},
            "requestReceivedTimestamp": _micro(request.received),
            "stageTimestamp": _micro(datetime.now(UTC)),
        }
        if request.target:
            entry["objectRef"] = request.target
        if request.body is not None:
            entry["requestObject"] = request.body
        self._file.write(msgspec.json.encode(entry) + b"\n")
        if self._file.tell() > MAX_BYTES:
            self._file.close()
            os.replace(self.path, f"{self.path}.1")
            self._file = self.path.open("ab", buffering=0)

    def close(self) -> None:
        self._file.close()
