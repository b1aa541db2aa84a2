"""Transport to one Kubernetes API server: the `kubernetes` package's asyncio half connects and authenticates; bodies
are bytes here and are decoded by msgspec into structs of only the fields we read (a GPU node of 18.9 KB takes 106 KiB
as client models)."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import urlencode

import aiohttp
from kubernetes.aio import client as kube_client
from kubernetes.aio import config as kube_config

MERGE_PATCH = "application/merge-patch+json"
STRATEGIC_MERGE_PATCH = "application/strategic-merge-patch+json"
JSON = "application/json"

REQUEST_TIMEOUT_S = 10.0
#: The largest body that we take; a list page of 500 GPU nodes is about 10 MB.
MAX_BODY_BYTES = 64 * 1024 * 1024


class KubeError(Exception):
    """The API server refused. `status` is the HTTP status, `reason` and `message` are the server's own words."""

    def __init__(self, status: int, reason: str, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(f"{status} {reason}: {message}")
        self.status = status
        self.reason = reason
        self.message = message
        self.retry_after_s = retry_after_s


class Unreachable(Exception):
    """No answer came: connection refused or cut, TLS failure, or the deadline passed."""


class KubeConfigError(Exception):
    """There is no usable way to the API server; the text says what to do."""


def _error(status: int, body: bytes, headers: Mapping[str, str]) -> KubeError:
    reason, message = "Unknown", body[:300].decode(errors="replace")
    try:
        answer = json.loads(body)
        reason, message = str(answer.get("reason") or reason), str(answer.get("message") or message)
    except (ValueError, AttributeError):
        pass  # a proxy's page, not the API server's Status object: its own text is the best message there is
    after = headers.get("Retry-After", "")
    return KubeError(status, reason, message, float(after) if after.isdigit() else None)


def in_pod() -> bool:
    return Path("/var/run/secrets/kubernetes.io/serviceaccount/token").exists()


class KubeClient:
    """One connection pool to one API server. Use `await KubeClient.connect(...)`, and close it."""

    def __init__(self, api: Any) -> None:
        self._api = api

    @classmethod
    async def connect(cls, kubeconfig: str | None = None, context: str | None = None) -> KubeClient:
        """From `kubeconfig`, else from inside a pod, else from the usual kubeconfig. Raises KubeConfigError."""
        settings = kube_client.Configuration()
        try:
            if kubeconfig is None and in_pod():
                kube_config.load_incluster_config(client_configuration=settings)  # type: ignore[no-untyped-call]
            else:
                await kube_config.load_kube_config(  # type: ignore[no-untyped-call]
                    kubeconfig, context, client_configuration=settings
                )
        except (kube_config.ConfigException, OSError) as error:
            where = kubeconfig or "the default kubeconfig"
            raise KubeConfigError(f"{where}: {error}; give --kubeconfig FILE") from error
        settings.retries = None
        settings.connection_pool_maxsize = 64
        try:
            return cls(kube_client.ApiClient(settings))
        except (OSError, ssl.SSLError) as error:
            raise KubeConfigError(f"{kubeconfig or 'kubeconfig'}: cannot use its certificates: {error}") from error

    @property
    def server(self) -> str:
        return str(self._api.configuration.host)

    async def close(self) -> None:
        await self._api.close()
        # aiohttp closes TLS transports in the next turn of the loop.
        await asyncio.sleep(0)

    async def __aenter__(self) -> KubeClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _send(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None,
        body: object | None,
        content_type: str,
        limits: aiohttp.ClientTimeout,
    ) -> aiohttp.ClientResponse:
        headers = {"Accept": JSON, "Content-Type": content_type, "User-Agent": "headway-aggregator"}
        await self._api.update_params_for_auth(headers, None, ["BearerToken"], path, method, None)
        url = f"{self.server}{path}" + (f"?{urlencode(query)}" if query else "")
        answer = await self._api.rest_client.request(method, url, headers=headers, body=body, _request_timeout=limits)
        response: aiohttp.ClientResponse = answer.response
        return response

    async def request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: object | None = None,
        content_type: str = JSON,
        timeout_s: float = REQUEST_TIMEOUT_S,
    ) -> bytes:
        """One request; the body of a 2xx answer. Raises KubeError and Unreachable."""
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            response = await self._send(method, path, query, body, content_type, timeout)
            async with response:
                if response.content_length is not None and response.content_length > MAX_BODY_BYTES:
                    raise Unreachable(f"{method} {path}: answer of {response.content_length} bytes is too large")
                data = await response.read()
                if response.status >= 300:
                    raise _error(response.status, data, response.headers)
                return data
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise Unreachable(f"{method} {path}: {error or type(error).__name__}") from error

    async def lines(self, path: str, query: Mapping[str, str], idle_s: float) -> AsyncIterator[bytes]:
        """The lines of a watch until the server ends it, or until nothing came for `idle_s`.

        Raises KubeError and Unreachable.
        """
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=REQUEST_TIMEOUT_S, sock_read=idle_s)
        try:
            response = await self._send("GET", path, query, None, JSON, timeout)
            async with response:
                if response.status >= 300:
                    raise _error(response.status, await response.read(), response.headers)
                buffer = bytearray()
                async for chunk in response.content.iter_any():
                    buffer += chunk
                    if len(buffer) > MAX_BODY_BYTES:
                        raise Unreachable(f"watch {path}: a line above {MAX_BODY_BYTES} bytes")
                    *whole, rest = buffer.split(b"\n")
                    buffer = bytearray(rest)
                    for line in whole:
                        if line:
                            yield bytes(line)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise Unreachable(f"watch {path}: {error or type(error).__name__}") from error
