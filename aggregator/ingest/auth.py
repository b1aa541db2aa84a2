"""Who is at the other end of a connection: a projected ServiceAccount token, reviewed by the API server.

One TokenReview per session and token life. An answer is remembered until the token ends, and is used again only while
the pod watch says that the pod lives; so thousands of reconnects cost no reviews, and a deleted pod is refused at once.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from aggregator.ingest.pods import Pods
from aggregator.kube.review import Denied, Reviewed

MAX_TOKEN_BYTES = 16 * 1024
#: Answers remembered; the oldest go first.
MAX_REMEMBERED = 16_384
#: A token that was denied is not asked for again within this time.
DENIED_S = 5.0
#: A session whose token states no end is reviewed again after this.
NO_EXPIRY_S = 3600.0

LOOPBACK = ("127.0.0.1", "::1")


class ReviewFailed(Exception):
    """The question could not be put: not knowing is neither a yes nor a no."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Who connects. `node` None = the hello may name any (insecure); `lasts_s` = seconds that the token still has."""

    node: str | None
    pod: str
    pod_uid: str
    lasts_s: float | None


class Authenticator(Protocol):
    async def identify(self, authorization: str | None, peer: str) -> Identity | Denied:
        """From the Authorization header and the peer's address. Raises ReviewFailed."""


class Insecure:
    """No token, loopback only, the hello's word is taken for the node. For `headway demo` on one machine."""

    async def identify(self, authorization: str | None, peer: str) -> Identity | Denied:
        if peer not in LOOPBACK:
            return Denied(f"without tokens only this machine may connect, not {peer}")
        return Identity(None, "", "", None)


class Tokens:
    """Tokens of one ServiceAccount: any pod of the cluster may ask for our audience, so the account is checked too."""

    def __init__(
        self,
        review: Callable[[str], Awaitable[Reviewed | Denied]],
        pods: Pods,
        *,
        namespace: str,
        service_account: str,
        count: Callable[[str], None],
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._review = review
        self._pods = pods
        self._namespace = namespace
        self._service_account = service_account
        self._count = count
        self._wall = wall
        self._remembered: dict[bytes, tuple[float, Reviewed | Denied]] = {}

    async def identify(self, authorization: str | None, peer: str) -> Identity | Denied:
        scheme, _, token = (authorization or "").partition(" ")
        token = token.strip()
        if scheme.lower() != "bearer" or not token or len(token) > MAX_TOKEN_BYTES:
            return Denied("give the pod's projected token as 'Authorization: Bearer TOKEN'")
        key = hashlib.sha256(token.encode()).digest()
        answer = self._recall(key)
        if answer is None:
            answer = await self._ask(token)
            self._remember(key, answer)
        return self._judge(answer)

    async def _ask(self, token: str) -> Reviewed | Denied:
        try:
            answer = await self._review(token)
        except ReviewFailed:
            self._count("failed")
            raise
        self._count("accepted" if isinstance(answer, Reviewed) else "denied")
        return answer

    def _judge(self, answer: Reviewed | Denied) -> Identity | Denied:
        if isinstance(answer, Denied):
            return answer
        if (answer.namespace, answer.service_account) != (self._namespace, self._service_account):
            return Denied(f"{answer.namespace}/{answer.service_account} is not the agents' ServiceAccount")
        if not answer.node or not answer.pod_uid:
            return Denied("the token is not bound to a pod on a node")
        if self._pods.alive(answer.pod_uid) is False:
            return Denied(f"pod {answer.pod} ({answer.pod_uid}) is gone")
        lasts_s = answer.expires_s - self._wall() if answer.expires_s else NO_EXPIRY_S
        if lasts_s <= 0:
            return Denied("the token has expired")
        return Identity(answer.node, answer.pod, answer.pod_uid, lasts_s)

    def _recall(self, key: bytes) -> Reviewed | Denied | None:
        """A remembered answer that still holds."""
        if key not in self._remembered:
            return None
        until_s, answer = self._remembered[key]
        holds = self._wall() < until_s
        if isinstance(answer, Reviewed) and holds:
            holds = self._pods.alive(answer.pod_uid) is True
        if not holds:
            del self._remembered[key]
            return None
        return answer

    def _remember(self, key: bytes, answer: Reviewed | Denied) -> None:
        until_s = self._wall() + DENIED_S
        if isinstance(answer, Reviewed):
            until_s = answer.expires_s or self._wall() + NO_EXPIRY_S
        self._remembered[key] = (until_s, answer)
        while len(self._remembered) > MAX_REMEMBERED:
            del self._remembered[next(iter(self._remembered))]
