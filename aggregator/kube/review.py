"""TokenReview: who is this agent, and on which node does it run?

Behaviour relied on (measured, Kubernetes 1.36 and 1.37): a token for another audience is not authenticated; the answer
carries the node's and the pod's name and UID as extra fields; a pod not yet bound to a node has no node name, which is
a refusal here. A review costs the API server work, so the caller makes one per session and token life and otherwise
lets the pod watch say whether the pod still lives.
"""

from __future__ import annotations

import base64
import binascii
import json
from dataclasses import dataclass

from aggregator.kube.client import KubeClient
from aggregator.kube.objects import decode_token_review
from headway.names import TOKEN_AUDIENCE

PATH = "/apis/authentication.k8s.io/v1/tokenreviews"
MAX_TOKEN_BYTES = 16 * 1024
_EXTRA = "authentication.kubernetes.io/"


@dataclass(frozen=True, slots=True)
class Reviewed:
    """`expires_s` = wall time at which the token ends."""

    node: str
    node_uid: str
    pod: str
    pod_uid: str
    namespace: str
    service_account: str
    expires_s: float


@dataclass(frozen=True, slots=True)
class Denied:
    why: str


async def review(client: KubeClient, token: str, audience: str = TOKEN_AUDIENCE) -> Reviewed | Denied:
    """One TokenReview. Raises KubeError and Unreachable: not knowing is neither a yes nor a no."""
    if not token or len(token) > MAX_TOKEN_BYTES:
        return Denied("no token, or one that is too long")
    body = {
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenReview",
        "spec": {"token": token, "audiences": [audience]},
    }
    status = decode_token_review(await client.request("POST", PATH, body=body)).status
    if not status.authenticated:
        return Denied(status.error or "not authenticated")
    if audience not in (status.audiences or ()):
        return Denied(f"the token is not for audience {audience!r}")
    extra = {key.removeprefix(_EXTRA): values[0] for key, values in (status.user.extra or {}).items() if values}
    parts = status.user.username.split(":")
    if len(parts) != 4 or parts[:2] != ["system", "serviceaccount"]:
        return Denied(f"{status.user.username!r} is not a ServiceAccount")
    if not extra.get("node-name") or not extra.get("pod-uid"):
        return Denied("the token is not bound to a pod on a node")
    return Reviewed(
        node=extra["node-name"],
        node_uid=extra.get("node-uid", ""),
        pod=extra.get("pod-name", ""),
        pod_uid=extra["pod-uid"],
        namespace=parts[2],
        service_account=parts[3],
        expires_s=token_expiry_s(token),
    )


def token_expiry_s(token: str) -> float:
    """The `exp` of a token that the API server has just verified; 0 where it carries none."""
    try:
        payload = token.split(".")[1]
        claims = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
        return float(claims["exp"])
    except (IndexError, KeyError, TypeError, ValueError, binascii.Error):
        return 0.0
