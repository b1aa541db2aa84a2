"""ServiceAccount tokens: issued by TokenRequest, judged by TokenReview and as credentials of the API itself."""

from __future__ import annotations

import base64
import hashlib
import secrets
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import jwt
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from fakes.kube.resources import ACCOUNTS, NODES, PODS
from fakes.kube.status import ApiStatus, Cause, Obj, bad_request, conflict, invalid, not_found
from fakes.kube.store import Store

ISSUER = "https://kubernetes.default.svc"
DEFAULT_EXPIRY_S = 3600
MIN_EXPIRY_S = 600
MAX_EXPIRY_S = 1 << 32
#: A token outlives the deletion time of its pod by this, so that a pod may use it while it ends.
DELETION_LEEWAY_S = 60
_EXTRA = "authentication.kubernetes.io/"


@dataclass(frozen=True)
class User:
    """Who makes a request. `extra` as TokenReview shows it."""

    name: str
    uid: str
    groups: tuple[str, ...]
    extra: Mapping[str, tuple[str, ...]]

    def as_object(self) -> Obj:
        user: Obj = {"username": self.name, "uid": self.uid, "groups": list(self.groups)}
        return user | ({"extra": {key: list(values) for key, values in self.extra.items()}} if self.extra else {})


#: Who shows no credentials. Nothing is granted to them but version and health.
ANONYMOUS = User("system:anonymous", "", ("system:unauthenticated",), {})


class Refused(Exception):
    """A token that names nobody; the text is the reason, empty where it is no token of ours at all."""


class Tokens:
    """Static tokens of people, and signed ones of ServiceAccounts."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        public = self._key.public_key().public_bytes(
            serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        self._kid = base64.urlsafe_b64encode(hashlib.sha256(public).digest()).decode().rstrip("=")
        self._people: dict[str, User] = {}
        self.admin = self.of_user("admin", ("system:masters",))

    def of_user(self, name: str, groups: tuple[str, ...] = ()) -> str:
        """A static token under which requests are `name`'s; the same one each time."""
        for token, user in self._people.items():
            if user.name == name:
                return token
        token = secrets.token_hex(16)
        self._people[token] = User(name, name, (*groups, "system:authenticated"), {})
        return token

    def sign(self, claims: Mapping[str, Any]) -> str:
        """Any claims, signed with the key that this server trusts."""
        return jwt.encode(dict(claims), self._key, algorithm="RS256", headers={"kid": self._kid, "typ": None})

    def issue(
        self, account: Obj, audiences: list[str] | None, pod: Obj | None, expires_in_s: float
    ) -> tuple[str, float]:
        """A token with the claims a real server puts in; and when it ends (Unix seconds)."""
        meta = account["metadata"]
        issued = int(time.time())
        bound: Obj = {"namespace": meta["namespace"]}
        if pod is not None:
            node = self._node_of(pod)
            if node:
                bound["node"] = node
            bound["pod"] = {"name": pod["metadata"]["name"], "uid": pod["metadata"]["uid"]}
        bound["serviceaccount"] = {"name": meta["name"], "uid": meta["uid"]}
        claims = {
            "aud": audiences or [ISSUER],
            "exp": issued + int(expires_in_s),
            "iat": issued,
            "iss": ISSUER,
            "jti": str(uuid.uuid4()),
            "kubernetes.io": bound,
            "nbf": issued,
            "sub": f"system:serviceaccount:{meta['namespace']}:{meta['name']}",
        }
        return self.sign(claims), float(str(claims["exp"]))

    def _node_of(self, pod: Obj) -> Obj | None:
        name = pod["spec"].get("nodeName")
        if not name:
            return None
        found = self._store.get(NODES, "", name)
        # A node that is gone is named all the same, without its UID.
        return {"name": name} | ({"uid": found["metadata"]["uid"]} if found else {})

    # --- who is it ----------------------------------------------------------------------------------------------------

    def authenticate(self, token: str, audiences: list[str] | None = None) -> tuple[User, list[str]]:
        """The user and those of `audiences` (default: the API's own) the token is for. Raises Refused."""
        wanted = audiences or [ISSUER]
        person = self._people.get(token)
        if person is not None:
            if ISSUER not in wanted:
                raise Refused
            return person, [ISSUER]
        claims = self._claims(token)
        held = claims.get("aud")
        held = [held] if isinstance(held, str) else list(held or [])
        common = [one for one in wanted if one in held]
        if not common:
            quoted = ["[" + " ".join(f'"{one}"' for one in side) + "]" for side in (held, wanted)]
            raise Refused(f"token audiences {quoted[0]} is invalid for the target audiences {quoted[1]}")
        return self._account_of(claims), common

    def _claims(self, token: str) -> Obj:
        options = {"verify_aud": False, "require": ["exp", "iss"]}
        try:
            if jwt.decode(token, options={"verify_signature": False}).get("iss") != ISSUER:
                raise Refused
            return dict(
                jwt.decode(token, self._key.public_key(), algorithms=["RS256"], issuer=ISSUER, options=options)  # type: ignore[arg-type]
            )
        except jwt.ExpiredSignatureError:
            raise Refused("service account token has expired") from None
        except jwt.InvalidSignatureError:
            raise Refused("go-jose/go-jose: error in cryptographic primitive") from None
        except jwt.InvalidTokenError:
            raise Refused from None

    def _account_of(self, claims: Obj) -> User:
        bound = claims.get("kubernetes.io")
        if not isinstance(bound, dict) or "serviceaccount" not in bound:
            raise Refused("service account claims are missing")
        namespace, account = str(bound.get("namespace", "")), bound["serviceaccount"]
        found = self._store.get(ACCOUNTS, namespace, account["name"])
        if found is None or found["metadata"]["uid"] != account["uid"]:
            raise Refused("service account token has been invalidated")
        extra: dict[str, tuple[str, ...]] = {}
        if "jti" in claims:
            extra[f"{_EXTRA}credential-id"] = (f"JTI={claims['jti']}",)
        pod = bound.get("pod")
        if pod is not None:
            self._check_pod(namespace, pod)
            node = bound.get("node") or {}
            extra |= {f"{_EXTRA}node-{part}": (node[part],) for part in ("name", "uid") if node.get(part)}
            extra |= {f"{_EXTRA}pod-{part}": (pod[part],) for part in ("name", "uid")}
        groups = ("system:serviceaccounts", f"system:serviceaccounts:{namespace}", "system:authenticated")
        return User(f"system:serviceaccount:{namespace}:{account['name']}", account["uid"], groups, extra)

    def _check_pod(self, namespace: str, pod: Obj) -> None:
        found = self._store.get(PODS, namespace, pod["name"])
        gone = found is None or found["metadata"]["uid"] != pod["uid"]
        if found is not None and (deleted := found["metadata"].get("deletionTimestamp")):
            gone = gone or datetime.fromisoformat(deleted).timestamp() + DELETION_LEEWAY_S < time.time()
        if gone:
            raise Refused("service account token has been invalidated")

    # --- the two resources --------------------------------------------------------------------------------------------

    def request(self, namespace: str, name: str, body: Obj) -> Obj:
        """A TokenRequest, answered. Raises ApiStatus."""
        account = self._store.get(ACCOUNTS, namespace, name)
        if account is None:
            raise not_found("", "serviceaccounts", name)
        spec = dict(body.get("spec") or {})
        expiry = spec.get("expirationSeconds")
        expiry = DEFAULT_EXPIRY_S if expiry is None else expiry
        if not isinstance(expiry, int) or not MIN_EXPIRY_S <= expiry <= MAX_EXPIRY_S:
            least = "may not specify a duration less than 10 minutes"
            text = least if isinstance(expiry, int) and expiry < MIN_EXPIRY_S else "may not be larger than 2^32 seconds"
            cause = Cause("spec.expirationSeconds", f"Invalid value: {expiry}: {text}")
            raise invalid("authentication.k8s.io", "TokenRequest", "", [cause])
        pod = self._bound_pod(namespace, spec.get("boundObjectRef"))
        audiences = spec.get("audiences") or [ISSUER]
        token, ends = self.issue(account, audiences, pod, expiry)
        stamp = datetime.fromtimestamp(ends, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        reference = spec.get("boundObjectRef")
        answer: Obj = {"kind": "TokenRequest", "apiVersion": "authentication.k8s.io/v1"}
        meta = {key: account["metadata"][key] for key in ("name", "namespace", "uid", "creationTimestamp")}
        answer |= {"metadata": meta, "spec": {"audiences": audiences, "expirationSeconds": expiry}}
        answer["spec"]["boundObjectRef"] = reference
        return answer | {"status": {"token": token, "expirationTimestamp": stamp}}

    def _bound_pod(self, namespace: str, reference: Obj | None) -> Obj | None:
        if not reference:
            return None
        kind, name = str(reference.get("kind", "")), str(reference.get("name", ""))
        if kind != "Pod":
            raise bad_request(f"this server binds tokens to pods only, not to {kind or 'an object without kind'}")
        pod = self._store.get(PODS, namespace, name)
        if pod is None:
            raise not_found("", "pods", name)
        uid = reference.get("uid")
        if uid and uid != pod["metadata"]["uid"]:
            why = (
                f"the UID in the bound object reference ({uid}) does not match the UID in record. The object might "
                f"have been deleted and then recreated"
            )
            raise conflict("", "Pod", name, why)
        return pod

    def review(self, body: Obj) -> Obj:
        """A TokenReview, answered. Raises ApiStatus."""
        spec = dict(body.get("spec") or {})
        token, audiences = spec.get("token"), spec.get("audiences")
        if not isinstance(token, str) or not token:
            raise ApiStatus(400, "token is required for TokenReview in authentication")
        answer: Obj = {"kind": "TokenReview", "apiVersion": "authentication.k8s.io/v1", "metadata": {}, "spec": spec}
        try:
            user, common = self.authenticate(token, audiences)
        except Refused as refused:
            why = f"[invalid bearer token, {refused}]" if str(refused) else "invalid bearer token"
            return answer | {"status": {"user": {}, "error": why}}
        return answer | {"status": {"authenticated": True, "user": user.as_object(), "audiences": common}}
