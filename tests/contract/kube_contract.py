"""What headway relies on of a Kubernetes API server. The embedded one and the real one both have to pass it.

Subclasses give the fixture `kube`. Objects have names of their own, since the real server is shared with other tests.
"""

from __future__ import annotations

import http.client
import json
import secrets
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import jwt
import pytest

from tests.cluster.client import MERGE_PATCH, STRATEGIC_MERGE_PATCH, ApiClient, ApiError

NODES = "/api/v1/nodes"
REVIEWS = "/apis/authentication.k8s.io/v1/tokenreviews"
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
        """(status, reason) of a request that must be refused."""
        with pytest.raises(ApiError) as caught:
            self.request(method, path, body, content_type)
        answer = caught.value.body
        assert (answer["kind"], answer["status"], answer["code"]) == ("Status", "Failure", caught.value.status)
        assert answer["message"]
        return caught.value.status, answer["reason"]

    def watch(self, path: str, query: str, seconds: int = 2) -> list[dict[str, Any]]:
        """All that a watch says until the server ends it; an answer of 400 and above counts as one ERROR."""
        return list(self.watching(f"{path}?watch=1&timeoutSeconds={seconds}&{query}"))

    def watching(self, path: str) -> Iterator[dict[str, Any]]:
        tls = ssl.create_default_context(cafile=self.ca_file)
        connection = http.client.HTTPSConnection(urlsplit(self.server).netloc, context=tls, timeout=20)
        try:
            connection.request("GET", path, headers={"Authorization": f"Bearer {self.token}"})
            answer = connection.getresponse()
            if answer.status >= 400:
                yield {"type": "ERROR", "object": json.loads(answer.read())}
                return
            while line := answer.readline():
                yield json.loads(line)
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


class KubeContract:
    # --- objects -----------------------------------------------------------------------------------------------------
    def test_create_get_delete(self, kube: Kube) -> None:
        made = make_node(kube)
        name = made["metadata"]["name"]
        assert made["metadata"]["uid"]
        assert made["metadata"]["creationTimestamp"]
        assert int(made["metadata"]["resourceVersion"]) > 0
        assert kube.request("GET", f"{NODES}/{name}")["metadata"]["uid"] == made["metadata"]["uid"]
        again = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}}
        assert kube.refused("POST", NODES, again) == (409, "AlreadyExists")
        kube.request("DELETE", f"{NODES}/{name}")
        assert kube.refused("GET", f"{NODES}/{name}") == (404, "NotFound")
        assert kube.refused("DELETE", f"{NODES}/{name}") == (404, "NotFound")
        assert kube.refused("PATCH", f"{NODES}/{name}", {"metadata": {"labels": {"x": "y"}}}) == (404, "NotFound")

    def test_who_shows_no_token_or_a_wrong_one_is_unauthorized(self, kube: Kube) -> None:
        for token in ("nobody", "a.b.c"):
            with pytest.raises(ApiError) as caught:
                kube.client.request("GET", NODES, token=token)
            assert caught.value.status == 401

    @pytest.mark.parametrize("name", ["", "UPPER", "a_b", "-a"])
    def test_a_name_that_is_none_is_refused(self, kube: Kube, name: str) -> None:
        body = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}}
        assert kube.refused("POST", NODES, body)[0] == 422

    # --- list and watch ----------------------------------------------------------------------------------------------
    def test_list_in_pages(self, kube: Kube) -> None:
        label = unique("pages")
        names = sorted(make_node(kube, labels={"set": label})["metadata"]["name"] for _ in range(3))
        query = f"?labelSelector=set%3D{label}&limit=2"
        first = kube.request("GET", NODES + query)
        assert (first["kind"], len(first["items"])) == ("NodeList", 2)
        assert first["metadata"]["continue"]
        rest = kube.request("GET", f"{NODES}{query}&continue={first['metadata']['continue']}")
        assert not rest["metadata"].get("continue")
        assert [one["metadata"]["name"] for one in first["items"] + rest["items"]] == names

    def test_a_watch_begins_after_the_version_it_is_given(self, kube: Kube) -> None:
        node = make_node(kube)
        name, version = node["metadata"]["name"], node["metadata"]["resourceVersion"]
        kube.request("PATCH", f"{NODES}/{name}", {"metadata": {"labels": {"a": "3"}}})
        kube.request("DELETE", f"{NODES}/{name}")
        said = [one for one in kube.watch(NODES, f"resourceVersion={version}") if one["type"] != "BOOKMARK"]
        mine = [one for one in said if one["object"]["metadata"]["name"] == name]
        # The real server adds taints and the like of its own accord: at least these, in this order.
        assert {one["type"] for one in mine[:-1]} == {"MODIFIED"}
        assert mine[-1]["type"] == "DELETED"
        versions = [int(one["object"]["metadata"]["resourceVersion"]) for one in mine]
        assert versions == sorted(versions)
        assert versions[0] > int(version)

    def test_a_watch_hears_of_what_comes_later(self, kube: Kube) -> None:
        version = kube.request("GET", NODES)["metadata"]["resourceVersion"]
        name = unique("later")
        body = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}}
        timer = threading.Timer(0.5, kube.request, ("POST", NODES, body))
        timer.start()
        said = kube.watch(NODES, f"resourceVersion={version}", seconds=3)
        timer.join()
        assert "ADDED" in [one["type"] for one in said if one["object"]["metadata"].get("name") == name]

    def test_the_server_ends_a_watch_in_time(self, kube: Kube) -> None:
        version = kube.request("GET", NODES)["metadata"]["resourceVersion"]
        began_s = time.monotonic()
        kube.watch(NODES, f"resourceVersion={version}&allowWatchBookmarks=true", seconds=1)
        assert 0.5 < time.monotonic() - began_s < 10.0

    # --- patches -----------------------------------------------------------------------------------------------------
    def test_a_merge_patch_changes_its_keys_and_null_removes(self, kube: Kube) -> None:
        node = make_node(kube, annotations={"keep": "1", "drop": "2"})  # controllers add others
        path = f"{NODES}/{node['metadata']['name']}"
        body = {"metadata": {"uid": node["metadata"]["uid"], "annotations": {"drop": None, "new": "3"}}}
        after = kube.request("PATCH", path, body, MERGE_PATCH)["metadata"]
        assert {"keep": "1", "new": "3"}.items() <= after["annotations"].items()
        assert "drop" not in after["annotations"]
        assert after["labels"]["a"] == "1"
        assert int(after["resourceVersion"]) > int(node["metadata"]["resourceVersion"])
        none = kube.request("PATCH", path, {"metadata": {"annotations": {"not-there": None}}}, MERGE_PATCH)
        assert "not-there" not in none["metadata"]["annotations"]

    def test_taints_are_one_list(self, kube: Kube) -> None:
        node = make_node(kube)
        path = f"{NODES}/{node['metadata']['name']}"
        one = {"key": "x/one", "value": "1", "effect": "NoSchedule", "timeAdded": STAMP}
        two = {"key": "x/two", "effect": "PreferNoSchedule"}
        kube.request("PATCH", path, {"spec": {"taints": [one, two]}}, MERGE_PATCH)
        assert kube.request("GET", path)["spec"]["taints"] == [one, two]
        kube.request("PATCH", path, {"spec": {"taints": [two]}}, MERGE_PATCH)
        assert kube.request("GET", path)["spec"]["taints"] == [two]
        kube.request("PATCH", path, {"spec": {"taints": None}}, MERGE_PATCH)
        assert "taints" not in kube.request("GET", path)["spec"]

    @pytest.mark.parametrize(
        "taints",
        [
            [{"key": "x/a", "effect": "Never"}],
            [{"key": "x/a", "effect": ""}],
            [{"key": "x y", "effect": "NoSchedule"}],
            [{"key": "x/a", "value": "a b", "effect": "NoSchedule"}],
            [{"key": "x/a", "effect": "NoSchedule"}, {"key": "x/a", "value": "2", "effect": "NoSchedule"}],
        ],
    )
    def test_a_taint_that_is_none_is_refused(self, kube: Kube, taints: list[dict[str, str]]) -> None:
        path = f"{NODES}/{make_node(kube)['metadata']['name']}"
        assert kube.refused("PATCH", path, {"spec": {"taints": taints}}, MERGE_PATCH) == (422, "Invalid")

    def test_one_key_may_have_two_effects(self, kube: Kube) -> None:
        path = f"{NODES}/{make_node(kube)['metadata']['name']}"
        both = [{"key": "x/a", "effect": effect} for effect in ("NoSchedule", "PreferNoSchedule")]
        assert kube.request("PATCH", path, {"spec": {"taints": both}}, MERGE_PATCH)["spec"]["taints"] == both

    def test_an_old_version_conflicts(self, kube: Kube) -> None:
        node = make_node(kube)
        path = f"{NODES}/{node['metadata']['name']}"
        kube.request("PATCH", path, {"metadata": {"labels": {"a": "9"}}}, MERGE_PATCH)
        body = {
            "metadata": {"resourceVersion": node["metadata"]["resourceVersion"]},
            "spec": {"taints": [{"key": "x/a", "effect": "NoSchedule"}]},
        }
        assert kube.refused("PATCH", path, body, MERGE_PATCH) == (409, "Conflict")
        assert "x/a" not in json.dumps(kube.request("GET", path)["spec"])

    def test_another_uid_is_refused(self, kube: Kube) -> None:
        path = f"{NODES}/{make_node(kube)['metadata']['name']}"
        body = {"metadata": {"uid": "00000000-0000-0000-0000-000000000000", "labels": {"a": "9"}}}
        status, _ = kube.refused("PATCH", path, body, MERGE_PATCH)
        assert status in (409, 422)
        assert kube.refused("PATCH", f"{path}/status", body, STRATEGIC_MERGE_PATCH)[0] in (409, 422)
        assert kube.request("GET", path)["metadata"]["labels"]["a"] == "1"

    def test_another_uid_is_refused_as_invalid_by_a_merge_patch(self, kube: Kube) -> None:
        """Measured: 422 and not 409, which the writer tells apart."""
        path = f"{NODES}/{make_node(kube)['metadata']['name']}"
        body = {"metadata": {"uid": "00000000-0000-0000-0000-000000000000", "labels": {"a": "9"}}}
        assert kube.refused("PATCH", path, body, MERGE_PATCH)[0] == 422

    def test_conditions_merge_by_type(self, kube: Kube) -> None:
        name = make_node(kube)["metadata"]["name"]
        patch_status(kube, name, condition("x/One", "True"), condition("x/Two", "False"))
        after = patch_status(kube, name, condition("x/Two", "True", "new"))["status"]["conditions"]
        mine = {one["type"]: (one["status"], one["message"]) for one in after if one["type"].startswith("x/")}
        assert mine == {"x/One": ("True", "m"), "x/Two": ("True", "new")}
        after = patch_status(kube, name, {"type": "x/One", "$patch": "delete"})["status"]["conditions"]
        assert [one["type"] for one in after if one["type"].startswith("x/")] == ["x/Two"]

    def test_status_and_the_rest_are_changed_apart(self, kube: Kube) -> None:
        path = f"{NODES}/{make_node(kube)['metadata']['name']}"
        both = {
            "metadata": {"labels": {"a": "9"}},
            "spec": {"unschedulable": True},
            "status": {"conditions": [condition("x/One", "True")]},
        }
        after = kube.request("PATCH", path, both, MERGE_PATCH)
        assert (after["spec"]["unschedulable"], after["metadata"]["labels"]["a"]) == (True, "9")
        assert "x/One" not in json.dumps(after.get("status", {}))
        both["spec"] = {"unschedulable": False}
        after = kube.request("PATCH", f"{path}/status", both, STRATEGIC_MERGE_PATCH)
        assert after["spec"]["unschedulable"] is True
        assert "x/One" in json.dumps(after["status"])

    def test_a_patch_of_no_known_kind_is_refused(self, kube: Kube) -> None:
        path = f"{NODES}/{make_node(kube)['metadata']['name']}"
        assert kube.refused("PATCH", path, {"metadata": {}}, "application/json")[0] == 415

    # --- the other kinds ---------------------------------------------------------------------------------------------
    @pytest.fixture
    def space(self, kube: Kube) -> str:
        name = unique("contract")
        kube.request("POST", "/api/v1/namespaces", {"kind": "Namespace", "metadata": {"name": name}})
        return name

    def test_config_maps(self, kube: Kube, space: str) -> None:
        path = f"/api/v1/namespaces/{space}/configmaps"
        made = kube.request("POST", path, {"kind": "ConfigMap", "metadata": {"name": "one"}, "data": {"k": "v"}})
        assert kube.request("PATCH", f"{path}/one", {"data": {"k": "w"}}, MERGE_PATCH)["data"] == {"k": "w"}
        query = f"fieldSelector=metadata.name%3Done&resourceVersion={made['metadata']['resourceVersion']}"
        kube.request("POST", path, {"kind": "ConfigMap", "metadata": {"name": "two"}})
        names = {one["object"]["metadata"].get("name") for one in kube.watch(path, query, seconds=1)}
        assert names == {"one"}
        body = {"kind": "ConfigMap", "metadata": {"name": "x"}}
        nowhere = f"/api/v1/namespaces/{unique('nowhere')}/configmaps"
        assert kube.refused("POST", nowhere, body) == (404, "NotFound")

    def test_a_lease_is_taken_once(self, kube: Kube, space: str) -> None:
        path = f"/apis/coordination.k8s.io/v1/namespaces/{space}/leases"
        spec = {"holderIdentity": "a", "leaseDurationSeconds": 15, "renewTime": "2026-12-01T00:00:00.000000Z"}
        lease = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": "l"}, "spec": spec}
        made = kube.request("POST", path, lease)
        assert kube.refused("POST", path, lease) == (409, "AlreadyExists")
        renewed = kube.request("PUT", f"{path}/l", {**made, "spec": {**spec, "holderIdentity": "b"}})
        assert renewed["spec"]["holderIdentity"] == "b"
        assert kube.refused("PUT", f"{path}/l", made) == (409, "Conflict")

    def test_an_event_is_told_once(self, kube: Kube) -> None:
        about = {"apiVersion": "v1", "kind": "Node", "name": "n", "uid": "u"}
        body = {
            "kind": "Event", "metadata": {"name": unique("n"), "namespace": "default"}, "involvedObject": about,
            "reason": "GPUFailed", "message": "m", "type": "Warning", "source": {"component": "contract"},
            "firstTimestamp": STAMP, "lastTimestamp": STAMP, "count": 1,
        }  # fmt: skip
        path = "/api/v1/namespaces/default/events"
        assert kube.request("POST", path, body)["message"] == "m"
        assert kube.refused("POST", path, body) == (409, "AlreadyExists")

    # --- tokens ------------------------------------------------------------------------------------------------------
    @pytest.fixture
    def pod(self, kube: Kube, space: str) -> dict[str, Any]:
        accounts = f"/api/v1/namespaces/{space}/serviceaccounts"
        kube.request("POST", accounts, {"kind": "ServiceAccount", "metadata": {"name": "agent"}})
        spec = {
            "serviceAccountName": "agent",
            "nodeName": make_node(kube)["metadata"]["name"],
            "containers": [{"name": "c", "image": "i"}],
            "terminationGracePeriodSeconds": 0,
        }
        body = {"kind": "Pod", "metadata": {"name": "agent-pod"}, "spec": spec}
        return kube.request("POST", f"/api/v1/namespaces/{space}/pods", body)

    def token(self, kube: Kube, pod: dict[str, Any], audience: str = "headway") -> str:
        meta = pod["metadata"]
        bound = {"apiVersion": "v1", "kind": "Pod", "name": meta["name"], "uid": meta["uid"]}
        body = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {"audiences": [audience], "expirationSeconds": 3600, "boundObjectRef": bound},
        }
        path = f"/api/v1/namespaces/{meta['namespace']}/serviceaccounts/agent/token"
        return str(kube.request("POST", path, body)["status"]["token"])

    def review(self, kube: Kube, token: str, audience: str = "headway") -> dict[str, Any]:
        spec = {"token": token, "audiences": [audience]}
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": spec}
        status: dict[str, Any] = kube.request("POST", REVIEWS, body)["status"]
        return status

    def test_a_token_names_pod_and_node(self, kube: Kube, pod: dict[str, Any]) -> None:
        status = self.review(kube, self.token(kube, pod))
        assert status["authenticated"] is True
        assert status["audiences"] == ["headway"]
        assert status["user"]["username"] == f"system:serviceaccount:{pod['metadata']['namespace']}:agent"
        extra = status["user"]["extra"]
        assert extra["authentication.kubernetes.io/pod-name"] == ["agent-pod"]
        assert extra["authentication.kubernetes.io/pod-uid"] == [pod["metadata"]["uid"]]
        assert extra["authentication.kubernetes.io/node-name"] == [pod["spec"]["nodeName"]]

    def test_tokens_that_are_not_good(self, kube: Kube, pod: dict[str, Any]) -> None:
        good = self.token(kube, pod)
        claims = jwt.decode(good, options={"verify_signature": False})
        now = int(time.time())
        expired = kube.sign({**claims, "iat": now - 7200, "nbf": now - 7200, "exp": now - 60})
        head, body, signature = good.split(".")
        forged = f"{head}.{body}.{signature[:-4]}AAAA"
        for bad in (self.token(kube, pod, "somebody-else"), expired, forged, "nonsense"):
            status = self.review(kube, bad)
            assert not status.get("authenticated")
            assert status.get("error") or not status.get("user", {}).get("username")
        assert self.review(kube, kube.sign(claims))["authenticated"] is True, "signed anew it is the same token"

    def test_a_token_ends_with_its_pod(self, kube: Kube, pod: dict[str, Any]) -> None:
        """The real server caches good answers for about ten seconds, so a token not reviewed before is asked about."""
        token = self.token(kube, pod)
        path = f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/agent-pod"
        kube.request("DELETE", path, {"gracePeriodSeconds": 0})
        deadline_s = time.monotonic() + 15.0
        while self.review(kube, token).get("authenticated"):
            assert time.monotonic() < deadline_s
            time.sleep(0.5)
