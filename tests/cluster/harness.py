"""A real Kubernetes control plane on loopback, for tests, benches and scripts.

    with ControlPlane() as plane:
        plane.create_node("n1", gpus=8)
        plane.request("GET", "/api/v1/nodes/n1")

etcd, kube-apiserver (RBAC, Node authorizer, NodeRestriction, audit log), kube-scheduler and kube-controller-manager,
in a temporary folder, on free ports of 127.0.0.1. Ready in about four seconds; the last stop leaves no process.
"""

from __future__ import annotations

import atexit
import json
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jwt
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from tests.cluster import audit as audit_log
from tests.cluster import build_kube, components, objects
from tests.cluster.client import STRATEGIC_MERGE_PATCH, ApiClient, ApiError
from tests.cluster.processes import Daemon, StartError, free_port, wait_until

START_DEADLINE_S = 60.0
WAIT_S = 15.0
SHOWN_CHARS = 4000
NOT_READY_TAINT = "node.kubernetes.io/not-ready"

# Users that exist from the start, since the token file is read once. The rights of "test-*" users come by `grant`.
TEST_USERS = tuple(f"test-{number}" for number in range(10))
KUBELET_NODES = tuple(f"kubelet-{number}" for number in range(4))


class NotBuilt(Exception):
    """Binaries are missing; the message says which and how to get them."""


@dataclass(frozen=True)
class _User:
    token: str
    groups: tuple[str, ...] = ()


def _users(more: Sequence[str]) -> dict[str, _User]:
    masters = ("system:masters",)
    users: dict[str, tuple[str, ...]] = {"admin": masters, "fake-kubelet": masters}
    users |= dict.fromkeys(("system:kube-scheduler", "system:kube-controller-manager"), ())
    users |= {f"system:node:{node}": ("system:nodes",) for node in KUBELET_NODES}
    users |= dict.fromkeys((*TEST_USERS, *more), ())
    return {name: _User(secrets.token_hex(16), groups) for name, groups in users.items()}


class ControlPlane:
    """One control plane, from `start` (or `with`) to `stop`. Methods block; call them from any thread.

    `users` adds names to the token file (see `token_of`); `extra` adds flags per component, e.g.
    `{"kube-apiserver": ["--feature-gates=X=true"]}`. Raises NotBuilt, StartError.
    """

    def __init__(
        self,
        version: str | None = None,
        *,
        users: Sequence[str] = (),
        extra: Mapping[str, Sequence[str]] | None = None,
        node_monitor_grace: str = "10h",
    ) -> None:
        found = build_kube.find(version)
        self.full_version = found.version
        self._binaries = found.paths
        for name in ("etcd", "kube-apiserver", "kube-scheduler", "kube-controller-manager"):
            self.binary(name)
        self.dir = Path()
        self.server = ""
        self.processes: dict[str, Daemon] = {}
        self._extra = extra or {}
        self._grace = node_monitor_grace
        self._users = _users(users)
        self._key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        self._client: ApiClient | None = None

    def binary(self, name: str) -> Path:
        """The executable of a component, "kubectl", "kubelet" or "fakecri". Raises NotBuilt."""
        if name not in self._binaries:
            raise NotBuilt(
                f"Kubernetes {self.full_version}: {name} is not built; run "
                f"`make kube VERSION={build_kube.minor_of(self.full_version)}`"
            )
        return self._binaries[name]

    # --- life ---------------------------------------------------------------------------------------------------------

    def start(self) -> ControlPlane:
        """Starts everything and returns when the default ServiceAccount exists."""
        if self.processes:
            raise StartError("this control plane has been started already")
        self.dir = Path(tempfile.mkdtemp(prefix="headway-kube-"))
        atexit.register(self.stop)
        try:
            self._write_files()
            self._start_api()
            self._start_controllers()
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Stops what runs, in order, and removes the folder. Safe to call twice."""
        atexit.unregister(self.stop)
        if self._client is not None:
            self._client.close()
        # etcd last: an API server without its etcd ignores SIGTERM for more than a minute.
        for name in ("kube-scheduler", "kube-controller-manager", "kube-apiserver", "etcd"):
            if name in self.processes:
                self.processes.pop(name).stop()
        if self.dir != Path():
            shutil.rmtree(self.dir, ignore_errors=True)

    def __enter__(self) -> ControlPlane:
        return self.start()

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def _write_files(self) -> None:
        pem = self._key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
        )
        (self.dir / components.KEY_FILE).write_bytes(pem)
        (self.dir / components.AUDIT_POLICY_FILE).write_text(audit_log.POLICY)
        rows = (f'{user.token},{name},{name},"{",".join(user.groups)}"\n' for name, user in self._users.items())
        (self.dir / components.TOKEN_FILE).write_text("".join(rows))

    def _spawn(self, name: str, flags: Sequence[str]) -> None:
        command: list[str | Path] = [self.binary(name), *flags, *self._extra.get(name, ())]
        self.processes[name] = Daemon(name, command, self.dir / f"{name}.log")

    def _start_api(self) -> None:
        etcd_url, peer_url = f"http://127.0.0.1:{free_port()}", f"http://127.0.0.1:{free_port()}"
        port = free_port()
        self.server = f"https://127.0.0.1:{port}"
        self._spawn("etcd", components.etcd(self.dir, etcd_url, peer_url))
        self._spawn("kube-apiserver", components.apiserver(self.dir, etcd_url, port))
        self._wait_start(lambda: Path(self.ca_file).exists(), "kube-apiserver wrote no certificate")
        self._client = ApiClient(self.server, self.ca_file, self.admin_token)
        self._wait_start(lambda: self._answers("/readyz"), "kube-apiserver is not ready")

    def _start_controllers(self) -> None:
        scheduler = self.kubeconfig_for(self.token_of("system:kube-scheduler"))
        self._spawn("kube-scheduler", components.scheduler(self.dir, scheduler))
        manager = self.kubeconfig_for(self.token_of("system:kube-controller-manager"))
        self._spawn("kube-controller-manager", components.controller_manager(self.dir, manager, self._grace))
        path = "/api/v1/namespaces/default/serviceaccounts/default"
        self._wait_start(lambda: self._answers(path), "the default ServiceAccount was not created")

    def _wait_start(self, probe: Callable[[], bool], what: str) -> None:
        def checked() -> bool:
            for daemon in self.processes.values():
                daemon.check()
            return probe()

        try:
            wait_until(checked, START_DEADLINE_S, what)
        except TimeoutError as error:
            tails = "\n".join(f"--- {daemon.name}\n{daemon.tail()}" for daemon in self.processes.values())
            raise StartError(f"{error}\n{tails}") from error

    def _answers(self, path: str) -> bool:
        try:
            self.request("GET", path)
        except (ApiError, OSError):
            return False
        return True

    # --- access -------------------------------------------------------------------------------------------------------

    @property
    def ca_file(self) -> str:
        """The file of the certificate that the server shows, to be trusted as CA."""
        return str(self.dir / components.CA_FILE)

    @property
    def admin_token(self) -> str:
        """The token of user "admin" (system:masters)."""
        return self.token_of("admin")

    @property
    def kubeconfig(self) -> str:
        """The path of a kubeconfig file for user "admin"."""
        return str(self.kubeconfig_for(self.admin_token))

    @property
    def version(self) -> str:
        """What /version says, e.g. "v1.37.2"."""
        return str(self.request("GET", "/version")["gitVersion"])

    def token_of(self, user: str) -> str:
        """The static token of a user: "admin", "test-0" to "test-9", "system:node:kubelet-0", those of `users`."""
        return self._users[user].token

    def kubeconfig_for(self, token: str, namespace: str = "default") -> Path:
        """Writes a kubeconfig file for any bearer token (one file per token) and gives its path."""
        path = self.dir / f"kubeconfig-{token[-16:]}"
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [{"name": "test", "cluster": {"server": self.server, "certificate-authority": self.ca_file}}],
            "users": [{"name": "test", "user": {"token": token}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test", "namespace": namespace}}],
        }
        path.write_text(json.dumps(config))  # JSON is YAML
        return path

    def request(
        self, method: str, path: str, body: Any = None, token: str | None = None, content_type: str | None = None
    ) -> dict[str, Any]:
        """One API request, as admin unless `token` is given; see ApiClient.request. Raises ApiError."""
        if self._client is None:
            raise StartError("the control plane has not been started")
        return self._client.request(method, path, body, token, content_type)

    def wait_for(
        self, path: str, predicate: Callable[[dict[str, Any]], object], what: str, deadline_s: float = WAIT_S
    ) -> dict[str, Any]:
        """GETs `path` until `predicate(object, or {} while there is none)` holds; gives that object.

        Raises TimeoutError, which names `what` was not so and shows the object.
        """
        last: dict[str, Any] = {}

        def probe() -> bool:
            nonlocal last
            try:
                last = self.request("GET", path)
            except ApiError as error:
                if error.status != 404:
                    raise
                last = {}
            return bool(predicate(last))

        try:
            wait_until(probe, deadline_s, what)
        except TimeoutError as error:
            raise TimeoutError(f"{error}; {path} is {json.dumps(last)[:SHOWN_CHARS]}") from None
        return last

    # --- audit log ----------------------------------------------------------------------------------------------------

    @property
    def audit_path(self) -> Path:
        """The audit log: JSON lines, one per finished request."""
        return self.dir / components.AUDIT_LOG_FILE

    def audit_mark(self) -> int:
        """The present end of the audit log, to be given as `since` later."""
        return self.audit_path.stat().st_size if self.audit_path.exists() else 0

    def audit(self, since: int = 0) -> Iterator[audit_log.AuditEntry]:
        """The entries after a mark. A client may have its answer some ms before its line is here."""
        return audit_log.read(self.audit_path, since)

    def wait_audit(
        self, predicate: Callable[[audit_log.AuditEntry], bool], since: int = 0, deadline_s: float = WAIT_S
    ) -> audit_log.AuditEntry:
        """The first entry after `since` that fits; waits for it. Raises TimeoutError."""
        return wait_until(lambda: next(filter(predicate, self.audit(since)), None), deadline_s, "no such audit entry")

    # --- identities ---------------------------------------------------------------------------------------------------

    def sign_token(self, claims: Mapping[str, Any]) -> str:
        """Signs any claims with the control plane's ServiceAccount key; see `pod_claims` for a complete set."""
        return jwt.encode(dict(claims), self._key, algorithm="RS256")

    def pod_claims(
        self,
        pod: Mapping[str, Any],
        audience: str,
        *,
        expires_in_s: float = 3600.0,
        node: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """The claims the API server itself would put in a token bound to this pod (and, if given, its Node object)."""
        namespace, account = pod["metadata"]["namespace"], pod["spec"]["serviceAccountName"]
        found = self.request("GET", f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}")
        bound: dict[str, Any] = {"namespace": namespace, "serviceaccount": _name_and_uid(found)}
        bound["pod"] = _name_and_uid(pod)
        if node is not None:
            bound["node"] = _name_and_uid(node)
        issued = int(time.time()) - 7200
        return {
            "iss": components.ISSUER,
            "sub": f"system:serviceaccount:{namespace}:{account}",
            "aud": [audience],
            "iat": issued,
            "nbf": issued,
            "exp": int(time.time() + expires_in_s),
            "jti": secrets.token_hex(16),
            "kubernetes.io": bound,
        }

    def service_account_token(
        self,
        namespace: str,
        account: str,
        audience: str | None = None,
        pod: Mapping[str, Any] | None = None,
        expires_in_s: int = 3600,
    ) -> str:
        """A token by TokenRequest: for the API itself (no audience) or for one audience; bound to a pod if given."""
        spec: dict[str, Any] = {"expirationSeconds": expires_in_s}
        if audience is not None:
            spec["audiences"] = [audience]
        if pod is not None:
            spec["boundObjectRef"] = {"apiVersion": "v1", "kind": "Pod", **_name_and_uid(pod)}
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token"
        return str(self.request("POST", path, body)["status"]["token"])

    def review_token(self, token: str, audience: str | None = None, reviewer: str | None = None) -> dict[str, Any]:
        """The status of a TokenReview, asked as admin or with the reviewer's token."""
        spec: dict[str, Any] = {"token": token} | ({"audiences": [audience]} if audience else {})
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": spec}
        return dict(self.request("POST", "/apis/authentication.k8s.io/v1/tokenreviews", body, reviewer)["status"])

    def grant(self, user: str, rules: Sequence[Mapping[str, Any]]) -> None:
        """Gives a user ("test-0", or "system:serviceaccount:NS:NAME") a ClusterRole of these rules."""
        name = f"test-{secrets.token_hex(4)}"
        group = "rbac.authorization.k8s.io"
        api = {"apiVersion": f"{group}/v1", "metadata": {"name": name}}
        role = {**api, "kind": "ClusterRole", "rules": list(rules)}
        reference = {"apiGroup": group, "kind": "ClusterRole", "name": name}
        subjects = [{"apiGroup": group, "kind": "User", "name": user}]
        binding = {**api, "kind": "ClusterRoleBinding", "roleRef": reference, "subjects": subjects}
        self.request("POST", f"/apis/{group}/v1/clusterroles", role)
        self.request("POST", f"/apis/{group}/v1/clusterrolebindings", binding)

    # --- objects ------------------------------------------------------------------------------------------------------

    def create_node(
        self,
        name: str,
        labels: Mapping[str, str] | None = None,
        gpus: int = 8,
        taints: Sequence[Mapping[str, Any]] = (),
        ready: bool = True,
    ) -> dict[str, Any]:
        """A fake node, Ready and with its not-ready taint gone; gives the Node. FakeKubelet runs pods on it."""
        return self.create_nodes([name], labels, gpus, taints, ready)[0]

    def create_nodes(
        self,
        names: Sequence[str],
        labels: Mapping[str, str] | None = None,
        gpus: int = 8,
        taints: Sequence[Mapping[str, Any]] = (),
        ready: bool = True,
    ) -> list[dict[str, Any]]:
        """Many at once: posts all, then waits for all."""
        for name in names:
            self.request("POST", "/api/v1/nodes", objects.node_object(name, labels, taints))
            status = {"status": objects.node_status(name, self.full_version, gpus, ready)}
            self.request("PATCH", f"/api/v1/nodes/{name}/status", status, content_type=STRATEGIC_MERGE_PATCH)
        return [self._settled(name, ready) for name in names]

    def _settled(self, name: str, ready: bool) -> dict[str, Any]:
        def settled(node: dict[str, Any]) -> bool:
            keys = {taint["key"] for taint in node.get("spec", {}).get("taints", [])}
            return bool(node) and (NOT_READY_TAINT not in keys or not ready)

        return self.wait_for(f"/api/v1/nodes/{name}", settled, f"node {name} keeps its not-ready taint")

    def create_namespace(self, name: str) -> str:
        """A namespace whose default ServiceAccount exists; gives its name."""
        body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
        self.request("POST", "/api/v1/namespaces", body)
        path = f"/api/v1/namespaces/{name}/serviceaccounts/default"
        self.wait_for(path, bool, f"namespace {name} got no default ServiceAccount")
        return name

    def create_service_account(self, namespace: str, name: str) -> None:
        """A ServiceAccount without rights; see `grant`."""
        body = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name}}
        self.request("POST", f"/api/v1/namespaces/{namespace}/serviceaccounts", body)

    def create_pod(self, namespace: str, name: str, **options: Any) -> dict[str, Any]:
        """Posts `objects.pod_object(name, **options)` and gives the Pod as stored."""
        return self.request("POST", f"/api/v1/namespaces/{namespace}/pods", objects.pod_object(name, **options))

    def wait_running(self, pod: Mapping[str, Any], deadline_s: float = WAIT_S) -> dict[str, Any]:
        """The pod as it is once it is Running and Ready."""
        return self.wait_for(objects.path_of(pod), objects.is_running, "the pod is not running", deadline_s)

    def wait_unschedulable(self, pod: Mapping[str, Any], deadline_s: float = WAIT_S) -> str:
        """The scheduler's message about a pod that it could not place."""

        def refused(now: dict[str, Any]) -> bool:
            return objects.condition(now, "PodScheduled").get("status") == "False"

        found = self.wait_for(objects.path_of(pod), refused, "the scheduler has not refused the pod", deadline_s)
        return str(objects.condition(found, "PodScheduled")["message"])

    def delete(self, path: str, grace_s: int | None = None) -> None:
        """DELETE; an object that is gone already is no error."""
        query = "" if grace_s is None else f"?gracePeriodSeconds={grace_s}"
        try:
            self.request("DELETE", path + query)
        except ApiError as error:
            if error.status != 404:
                raise


def _name_and_uid(obj: Mapping[str, Any]) -> dict[str, str]:
    return {"name": obj["metadata"]["name"], "uid": obj["metadata"]["uid"]}
