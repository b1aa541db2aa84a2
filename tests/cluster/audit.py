"""The API server's audit log, read as the judge of what was written, by whom and when."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

WRITE_VERBS = frozenset({"create", "update", "patch", "delete", "deletecollection"})

# One line per finished request. Nodes with their bodies, since tests count what was put on them; reads and renewals of
# the control plane's own parts are left out, being most of the lines and the subject of no test.
POLICY = """\
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived, ResponseStarted]
rules:
- level: None
  users: ["system:apiserver", "system:kube-scheduler", "system:kube-controller-manager"]
  verbs: [get, list, watch]
- level: None
  userGroups: ["system:serviceaccounts:kube-system"]
  verbs: [get, list, watch]
- level: None
  users: ["system:apiserver", "fake-kubelet"]
  resources: [{group: coordination.k8s.io, resources: [leases]}]
- level: RequestResponse
  verbs: [create, update, patch, delete]
  resources: [{group: "", resources: [nodes, nodes/status]}]
- level: Metadata
"""


def _seconds(stamp: str) -> float:
    return datetime.fromisoformat(stamp).timestamp()


@dataclass(frozen=True)
class AuditEntry:
    """One finished request (stage ResponseComplete).

    `received_s` and `completed_s` are Unix seconds with microsecond digits: when the server had the request, and when
    its answer was complete, which is after the object was stored. `end` is the byte offset after this line.
    """

    user: str
    verb: str
    resource: str
    subresource: str
    namespace: str
    name: str
    code: int
    received_s: float
    completed_s: float
    end: int
    raw: dict[str, Any] = field(repr=False)

    @property
    def writes(self) -> bool:
        """Whether the verb is one that changes an object."""
        return self.verb in WRITE_VERBS


def _entry(line: bytes, end: int) -> AuditEntry:
    raw = json.loads(line)
    target = raw.get("objectRef", {})
    return AuditEntry(
        user=raw["user"]["username"],
        verb=raw["verb"],
        resource=target.get("resource", ""),
        subresource=target.get("subresource", ""),
        namespace=target.get("namespace", ""),
        name=target.get("name", ""),
        code=raw.get("responseStatus", {}).get("code", 0),
        received_s=_seconds(raw["requestReceivedTimestamp"]),
        completed_s=_seconds(raw["stageTimestamp"]),
        end=end,
        raw=raw,
    )


def read(path: Path, since: int = 0) -> Iterator[AuditEntry]:
    """The entries after byte offset `since`, in the order the requests finished; a line still being written is left."""
    if not path.exists():
        return
    with path.open("rb") as file:
        file.seek(since)
        end = since
        for line in file:
            if not line.endswith(b"\n"):
                return
            end += len(line)
            yield _entry(line, end)
