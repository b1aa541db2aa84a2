"""A small synchronous JSON client for a Kubernetes API server: standard library, own CA, connections kept alive.

The tests look at the control plane through this and not through the client that headway itself uses, so that a mistake
there cannot hide itself.
"""

from __future__ import annotations

import http.client
import json
import ssl
import threading
from typing import Any
from urllib.parse import urlsplit

REQUEST_TIMEOUT_S = 30.0
MAX_IDLE = 16

MERGE_PATCH = "application/merge-patch+json"
STRATEGIC_MERGE_PATCH = "application/strategic-merge-patch+json"
JSON_PATCH = "application/json-patch+json"


class ApiError(Exception):
    """An answer with status 400 or above. `status` is the HTTP code, `body` the decoded Status object."""

    def __init__(self, method: str, path: str, status: int, body: dict[str, Any]) -> None:
        super().__init__(f"{method} {path}: {status} {body.get('reason', '')}: {body.get('message', body)}")
        self.status = status
        self.body = body


class ApiClient:
    """Requests to one server. Usable from several threads at once; `close` ends the idle connections."""

    def __init__(self, server: str, ca_file: str, token: str) -> None:
        self._address = urlsplit(server).netloc
        # Explicit: REQUESTS_CA_BUNDLE or SSL_CERT_FILE in the environment must not decide about a loopback server.
        self._tls = ssl.create_default_context(cafile=ca_file)
        self._token = token
        self._idle: list[http.client.HTTPSConnection] = []
        self._lock = threading.Lock()

    def request(
        self, method: str, path: str, body: Any = None, token: str | None = None, content_type: str | None = None
    ) -> dict[str, Any]:
        """One request, answered with the decoded JSON object (empty if there is none).

        `content_type` defaults to JSON, for PATCH to a merge patch. Raises ApiError for 400 and above, OSError or
        http.client.HTTPException when the server cannot be reached. Nothing is repeated, except where a kept
        connection turns out to be closed before a byte of the answer came.
        """
        payload = None if body is None else json.dumps(body).encode()
        default = MERGE_PATCH if method == "PATCH" else "application/json"
        headers = {
            "Authorization": f"Bearer {token or self._token}",
            "Accept": "application/json",
            "Content-Type": content_type or default,
        }
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        if connection is not None:
            try:
                return self._exchange(connection, method, path, payload, headers)
            except (http.client.RemoteDisconnected, ConnectionError, ssl.SSLEOFError):
                connection.close()
        return self._exchange(self._connection(), method, path, payload, headers)

    def _connection(self) -> http.client.HTTPSConnection:
        return http.client.HTTPSConnection(self._address, context=self._tls, timeout=REQUEST_TIMEOUT_S)

    def _exchange(
        self,
        connection: http.client.HTTPSConnection,
        method: str,
        path: str,
        payload: bytes | None,
        headers: dict[str, str],
    ) -> dict[str, Any]:
        try:
            connection.request(method, path, payload, headers)
            answer = connection.getresponse()
            raw = answer.read()
        except BaseException:
            connection.close()
            raise
        with self._lock:
            keep = not answer.will_close and len(self._idle) < MAX_IDLE
            if keep:
                self._idle.append(connection)
        if not keep:
            connection.close()
        try:
            decoded = json.loads(raw) if raw else {}
        except ValueError:
            decoded = {"message": raw.decode(errors="replace")}
        if answer.status >= 400:
            raise ApiError(method, path, answer.status, decoded)
        return decoded if isinstance(decoded, dict) else {"items": decoded}

    def close(self) -> None:
        """Closes the idle connections; a later request opens a new one."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()
