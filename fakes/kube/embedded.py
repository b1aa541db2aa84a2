"""The server with its files: certificates, kubeconfig, audit log."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import ssl
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import trustme
from aiohttp import web

from fakes.kube.api import Api, Options
from fakes.kube.audit import AuditLog
from fakes.kube.cluster import Cluster
from fakes.kube.faults import Faults
from fakes.kube.resources import ACCOUNTS, NAMESPACES, PODS
from fakes.kube.server import Server
from fakes.kube.store import HISTORY, Store
from fakes.kube.tokens import DEFAULT_EXPIRY_S, Tokens

HOST = "127.0.0.1"
FIRST_NAMESPACES = ("default", "kube-system", "kube-public", "kube-node-lease")
SHUTDOWN_S = 2.0


class EmbeddedKube:
    """One API server on loopback, from `start` (or `async with`) to `stop`.

    Writes ca.crt, kubeconfig and audit.log into `folder`. `port` 0 = any free one. `schedule` runs a trivial
    scheduler and kubelet. `history` = changes per kind that a watch can go back; `bookmark_s` = between bookmarks.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        port: int = 0,
        schedule: bool = False,
        history: int = HISTORY,
        bookmark_s: float = 60.0,
    ) -> None:
        self.dir = Path(folder)
        self.store = Store(history)
        self.api = Api(self.store)
        self.tokens = Tokens(self.store)
        self.faults = Faults()
        self._port = port
        self._bookmark_s = bookmark_s
        self._cluster = Cluster(self.api, schedule)
        self.store.on_change = self._cluster.saw
        for name in FIRST_NAMESPACES:
            self.api.create(NAMESPACES, "", {"metadata": {"name": name}}, Options())
        self._runner: web.AppRunner | None = None
        self._task: asyncio.Task[None] | None = None
        self._server: Server | None = None
        self._audit: AuditLog | None = None
        self.url = ""

    async def start(self) -> EmbeddedKube:
        """Returns when the server answers. Raises OSError, where the port is taken."""
        self.dir.mkdir(parents=True, exist_ok=True)
        tls = self._certificates()
        self._audit = AuditLog(self.audit_path)
        self._server = Server(self.api, self.tokens, self.faults, self._audit, self._bookmark_s)
        self._runner = web.AppRunner(self._server.application(), access_log=None, shutdown_timeout=SHUTDOWN_S)
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, HOST, self._port, ssl_context=tls).start()
        except OSError:
            await self.stop()
            raise
        self.url = f"https://{HOST}:{self._runner.addresses[0][1]}"
        _write_private(Path(self.kubeconfig), json.dumps(self._kubeconfig_object(self.admin_token), indent=1))
        self._task = asyncio.create_task(self._cluster.run())
        self._task.add_done_callback(_crash_loudly)
        return self

    async def stop(self) -> None:
        """Ends watches, then the server. Safe to call twice."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        if self._server is not None:
            self._server.stopping.set()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
        if self._audit is not None:
            self._audit.close()
            self._audit = None

    async def __aenter__(self) -> EmbeddedKube:
        return await self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    # --- access -------------------------------------------------------------------------------------------------------

    @property
    def ca_file(self) -> str:
        return str(self.dir / "ca.crt")

    @property
    def kubeconfig(self) -> str:
        """A kubeconfig of user "admin"; certificate and token are in it."""
        return str(self.dir / "kubeconfig")

    @property
    def audit_path(self) -> Path:
        return self.dir / "audit.log"

    @property
    def admin_token(self) -> str:
        return self.tokens.admin

    def user_token(self, name: str) -> str:
        """A static token of a person or component with this user name."""
        return self.tokens.of_user(name)

    def kubeconfig_for(self, token: str, namespace: str = "default") -> Path:
        """Writes a kubeconfig for any bearer token and gives its path."""
        path = self.dir / f"kubeconfig-{token[-16:]}"
        _write_private(path, json.dumps(self._kubeconfig_object(token, namespace), indent=1))
        return path

    def token(
        self,
        namespace: str,
        account: str = "default",
        *,
        audience: str | None = None,
        pod: str | None = None,
        expires_in_s: float = DEFAULT_EXPIRY_S,
    ) -> str:
        """A ServiceAccount token as TokenRequest issues it, bound to the pod of that name; may have any life, even a
        negative one. Raises ApiStatus where account or pod is not there."""
        bound = self.api.get(PODS, namespace, pod) if pod else None
        found = self.api.get(ACCOUNTS, namespace, account)
        return self.tokens.issue(found, [audience] if audience else None, bound, expires_in_s)[0]

    def sign_token(self, claims: Mapping[str, Any]) -> str:
        """Any claims, signed with the key this server trusts."""
        return self.tokens.sign(claims)

    # --- files --------------------------------------------------------------------------------------------------------

    def _certificates(self) -> ssl.SSLContext:
        authority = trustme.CA(organization_name="headway embedded Kubernetes")
        authority.cert_pem.write_to_path(self.ca_file)
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        authority.issue_cert(HOST, "localhost").configure_cert(context)
        return context

    def _kubeconfig_object(self, token: str, namespace: str = "default") -> dict[str, Any]:
        authority = base64.b64encode(Path(self.ca_file).read_bytes()).decode()
        cluster = {"server": self.url, "certificate-authority-data": authority}
        return {  # JSON is YAML
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "embedded",
            "clusters": [{"name": "embedded", "cluster": cluster}],
            "users": [{"name": "embedded", "user": {"token": token}}],
            "contexts": [
                {"name": "embedded", "context": {"cluster": "embedded", "user": "embedded", "namespace": namespace}}
            ],
        }


def _write_private(path: Path, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)


def _crash_loudly(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        asyncio.get_running_loop().call_exception_handler({"message": "embedded cluster died", "exception": error})
