"""One Kubernetes API server as the contract sees it: plain HTTPS requests, and objects to begin with."""

from __future__ import annotations

import http.client
import json
import secrets
import ssl
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.cluster.client import STRATEGIC_MERGE_PATCH, ApiClient, ApiError

NODES = "/api/v1/nodes"

TIMEOUT_S = 30.0
STAMP = "2026-12-01T00:00:00Z"


@dataclass
class Kube:
    """One API server: an admin's client, and its service-account key behind `sign`."""

    server: str
    ca_file: str
    token: str
    client: ApiClient
    sign: Callable[[dict[str, Any]], str]

    def request(self, method: str, path: str, body: Any = None, content_type: str | None = None) -> dict[str, Any]:
        return self.client.request(method, path, body, None, content_type)

    def refused(self, method: str, path: str, body: Any = None, content_type: str | None = None) -> tuple[int, str]:
        """(status, reason) of a request that must be refused, in words; reason "" where the server gives none."""
        with pytest.raises(ApiError) as caught:
            self.request(method, path, body, content_type)
        answer = caught.value.body
        assert (answer["kind"], answer["status"], answer["code"]) == ("Status", "Failure", caught.value.status)
        assert answer["message"]
        return caught.value.status, answer.get("reason", "")

    def raw(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes | None = None
    ) -> tuple[int, dict[str, Any]]:
        """(status, answer) of a request that carries these headers and no others."""
        with self._connected() as connection:
            connection.request(method, path, body, dict(headers))
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())

    def watch(self, path: str, query: str, seconds: int = 2) -> list[dict[str, Any]]:
        """All that a watch says until the server ends it; an answer of 400 and above counts as one ERROR."""
        with self._connected() as connection:
            url = f"{path}?watch=1&timeoutSeconds={seconds}&{query}"
            connection.request("GET", url, headers={"Authorization": f"Bearer {self.token}"})
            answer = connection.getresponse()
            if answer.status >= 400:
                return [{"type": "ERROR", "object": json.loads(answer.read())}]
            return [json.loads(line) for line in answer]

    @contextmanager
    def _connected(self) -> Iterator[http.client.HTTPSConnection]:
        tls = ssl.create_default_context(cafile=self.ca_file)
        connection = http.client.HTTPSConnection(urlsplit(self.server).netloc, context=tls, timeout=TIMEOUT_S)
        try:
            yield connection
        finally:
            connection.close()


def unique(prefix: str) -> str:
    return f"{prefix}-{secrets.token_hex(4)}"


def make_node(kube: Kube, **metadata: Any) -> dict[str, Any]:
    meta = {"name": unique("contract"), "labels": {"a": "1", "b": "2"}, **metadata}
    return kube.request("POST", NODES, {"apiVersion": "v1", "kind": "Node", "metadata": meta})


def condition(kind: str, status: str, message: str = "m") -> dict[str, str]:
    return {
        "type": kind, "status": status, "reason": "Because", "message": message,
        "lastTransitionTime": STAMP, "lastHeartbeatTime": STAMP,
    }  # fmt: skip


def patch_status(kube: Kube, name: str, *conditions: dict[str, str], **metadata: str) -> dict[str, Any]:
    body = {"metadata": metadata, "status": {"conditions": list(conditions)}}
    return kube.request("PATCH", f"{NODES}/{name}/status", body, STRATEGIC_MERGE_PATCH)
