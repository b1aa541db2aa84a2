"""What headway relies on of ConfigMaps, Leases, Events and the tokens of agents."""

from __future__ import annotations

import time
from typing import Any

import jwt
import pytest

from tests.cluster.client import MERGE_PATCH, ApiError
from tests.contract.kube import NODES, STAMP, Kube, make_node, unique

REVIEWS = "/apis/authentication.k8s.io/v1/tokenreviews"
#: What kubectl 1.37.2 was seen to send for `create namespace PLACE`, and for `-n PLACE create configmap headway-stop
#: --save-config --from-literal=who=me --from-literal=why= --from-file=bin` with ff 00 61 in the file.
PLACE = b"contract-00000000"
NAMESPACE_BY_KUBECTL = bytes.fromhex(
    "6b3873000a0f0a02763112094e616d65737061636512290a210a11636f6e74726163742d303030303030303012001a0022002a0032003800"
    "420012001a020a001a002200"
)
CONFIGMAP_BY_KUBECTL = bytes.fromhex(
    "6b3873000a0f0a0276311209436f6e6669674d617012ab020a88020a0c686561647761792d73746f7012001a11636f6e74726163742d3030"
    "30303030303022002a0032003800420062d8010a306b75626563746c2e6b756265726e657465732e696f2f6c6173742d6170706c6965642d"
    "636f6e66696775726174696f6e12a3017b226b696e64223a22436f6e6669674d6170222c2261706956657273696f6e223a227631222c226d"
    "65746164617461223a7b226e616d65223a22686561647761792d73746f70222c226e616d657370616365223a22636f6e74726163742d3030"
    "303030303030227d2c2264617461223a7b2277686f223a226d65222c22776879223a22227d2c2262696e61727944617461223a7b2262696e"
    "223a222f774268227d7d0a12090a0377686f12026d6512070a0377687912001a0a0a0362696e1203ff00611a002200"
)


def lease(spec: dict[str, Any], version: str | None = None) -> dict[str, Any]:
    meta = {"name": "l"} | ({"resourceVersion": version} if version else {})
    return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": meta, "spec": spec}


def event(name: str, namespace: str, about: dict[str, str]) -> dict[str, Any]:
    return {
        "kind": "Event", "metadata": {"name": name, "namespace": namespace}, "involvedObject": about,
        "reason": "GPUFailed", "message": "m", "type": "Warning", "source": {"component": "contract"},
        "firstTimestamp": STAMP, "lastTimestamp": STAMP, "count": 1,
    }  # fmt: skip


class KindsContract:
    @pytest.fixture
    def space(self, kube: Kube) -> str:
        name = unique("contract")
        kube.request("POST", "/api/v1/namespaces", {"kind": "Namespace", "metadata": {"name": name}})
        return name

    def test_config_maps(self, kube: Kube, space: str) -> None:
        path = f"/api/v1/namespaces/{space}/configmaps"
        body = {"kind": "ConfigMap", "metadata": {"name": "one"}, "data": {"k": "v"}}
        made = kube.request("POST", path, body)
        assert kube.refused("POST", path, body) == (409, "AlreadyExists")
        assert kube.request("PATCH", f"{path}/one", {"data": {"k": "w"}}, MERGE_PATCH)["data"] == {"k": "w"}
        assert kube.refused("PUT", f"{path}/one", made) == (409, "Conflict")
        replaced = kube.request("PUT", f"{path}/one", {**body, "data": {"other": ""}})
        assert replaced["data"] == {"other": ""}
        same = kube.request("PATCH", f"{path}/one", {"data": {"other": ""}}, MERGE_PATCH)
        assert same["metadata"]["resourceVersion"] == replaced["metadata"]["resourceVersion"], "nothing was written"
        assert kube.refused("PATCH", f"{path}/one", {"data": {"k": 1}}, MERGE_PATCH)[0] == 422
        assert kube.request("DELETE", f"{path}/one")["status"] == "Success"
        assert kube.refused("GET", f"{path}/one") == (404, "NotFound")

    def test_one_config_map_can_be_watched(self, kube: Kube, space: str) -> None:
        path = f"/api/v1/namespaces/{space}/configmaps"
        version = kube.request("GET", path)["metadata"]["resourceVersion"]
        for name in ("one", "two"):
            kube.request("POST", path, {"kind": "ConfigMap", "metadata": {"name": name}})
        kube.request("DELETE", f"{path}/one")
        one = "fieldSelector=metadata.name%3Done"
        said = kube.watch(path, f"{one}&resourceVersion={version}", seconds=1)
        assert [(one["type"], one["object"]["metadata"]["name"]) for one in said] == [
            ("ADDED", "one"),
            ("DELETED", "one"),
        ]
        assert [one["metadata"]["name"] for one in kube.request("GET", f"{path}?{one}")["items"]] == []

    def test_a_namespace_that_is_not_there_holds_nothing_and_takes_nothing(self, kube: Kube, space: str) -> None:
        nowhere = f"/api/v1/namespaces/{unique('nowhere')}/configmaps"
        assert kube.request("GET", f"{nowhere}?limit=500")["items"] == []
        assert kube.refused("GET", f"{nowhere}/x") == (404, "NotFound")
        assert kube.refused("POST", nowhere, {"kind": "ConfigMap", "metadata": {"name": "x"}}) == (404, "NotFound")
        again = {"kind": "Namespace", "metadata": {"name": space}}
        assert kube.refused("POST", "/api/v1/namespaces", again) == (409, "AlreadyExists")

    def test_what_kubectl_creates_in_protobuf(self, kube: Kube) -> None:
        """The stop by hand: `kubectl -n headway create configmap headway-stop`, kubectl 1.32 and later."""
        name = unique("contract")
        headers = {
            "Authorization": f"Bearer {kube.token}", "Accept": "application/json",
            "Content-Type": "application/vnd.kubernetes.protobuf",
        }  # fmt: skip
        as_sent = [body.replace(PLACE, name.encode()) for body in (NAMESPACE_BY_KUBECTL, CONFIGMAP_BY_KUBECTL)]
        assert kube.raw("POST", "/api/v1/namespaces", headers, as_sent[0])[0] == 201
        path = f"/api/v1/namespaces/{name}/configmaps"
        assert kube.raw("POST", path, headers, as_sent[1])[0] == 201
        made = kube.request("GET", f"{path}/headway-stop")
        assert made["data"] == {"who": "me", "why": ""}
        assert made["binaryData"] == {"bin": "/wBh"}
        assert list(made["metadata"]["annotations"]) == ["kubectl.kubernetes.io/last-applied-configuration"]
        for broken in (as_sent[1][:-3], b"{}"):
            assert kube.raw("POST", path, headers, broken)[0] == 400

    # --- the writers' Lease ------------------------------------------------------------------------------------------
    def test_a_lease_is_taken_once_and_let_go(self, kube: Kube, space: str) -> None:
        path = f"/apis/coordination.k8s.io/v1/namespaces/{space}/leases"
        assert kube.refused("GET", f"{path}/l") == (404, "NotFound")
        spec = {
            "holderIdentity": "a", "leaseDurationSeconds": 15, "leaseTransitions": 0,
            "acquireTime": "2026-12-01T00:00:00.000000Z", "renewTime": "2026-12-01T00:00:00.123456Z",
        }  # fmt: skip
        made = kube.request("POST", path, lease(spec))
        assert made["spec"] == spec
        assert kube.refused("POST", path, lease(spec)) == (409, "AlreadyExists")
        version = made["metadata"]["resourceVersion"]
        taken = kube.request("PUT", f"{path}/l", lease({**spec, "holderIdentity": "b"}, version))
        assert taken["spec"]["holderIdentity"] == "b"
        assert taken["metadata"]["uid"] == made["metadata"]["uid"]
        assert kube.refused("PUT", f"{path}/l", lease(spec, version)) == (409, "Conflict")
        assert kube.refused("PUT", f"{path}/l", lease(spec)) == (422, "Invalid")
        free = {**spec, "holderIdentity": "", "leaseDurationSeconds": 1}
        let_go = kube.request("PUT", f"{path}/l", lease(free, taken["metadata"]["resourceVersion"]))
        assert let_go["spec"] == free

    def test_a_lease_that_was_deleted_is_made_again_by_its_renewal(self, kube: Kube, space: str) -> None:
        path = f"/apis/coordination.k8s.io/v1/namespaces/{space}/leases"
        made = kube.request("POST", path, lease({"holderIdentity": "a"}))
        kube.request("DELETE", f"{path}/l")
        again = kube.request("PUT", f"{path}/l", lease({"holderIdentity": "a"}, made["metadata"]["resourceVersion"]))
        assert again["metadata"]["uid"] != made["metadata"]["uid"]

    @pytest.mark.parametrize(
        ("spec", "status"),
        [
            ({"leaseDurationSeconds": 0}, 422),
            ({"leaseTransitions": -1}, 422),
            ({"renewTime": "2026-12-01T00:00:00Z"}, 400),
            ({"renewTime": "yesterday"}, 400),
        ],
    )
    def test_a_lease_that_is_none_is_refused(self, kube: Kube, space: str, spec: dict[str, Any], status: int) -> None:
        path = f"/apis/coordination.k8s.io/v1/namespaces/{space}/leases"
        assert kube.refused("POST", path, lease(spec))[0] == status

    # --- Events ------------------------------------------------------------------------------------------------------
    def test_an_event_is_told_once(self, kube: Kube) -> None:
        name, path = unique("n"), "/api/v1/namespaces/default/events"
        about = {"apiVersion": "v1", "kind": "Node", "name": name, "uid": "u"}
        made = kube.request("POST", path, event(name, "default", about))
        assert (made["message"], made["count"], made["involvedObject"]) == ("m", 1, about)
        assert kube.refused("POST", path, event(name, "default", about)) == (409, "AlreadyExists")
        found = kube.request("GET", f"{path}?fieldSelector=involvedObject.name%3D{name}")["items"]
        assert [one["metadata"]["uid"] for one in found] == [made["metadata"]["uid"]]

    def test_an_event_lives_where_its_object_does(self, kube: Kube, space: str) -> None:
        """That of a Node in "default"."""
        node = {"apiVersion": "v1", "kind": "Node", "name": "n"}
        config = {"apiVersion": "v1", "kind": "ConfigMap", "name": "c", "namespace": space}
        kube.request("POST", f"/api/v1/namespaces/{space}/events", event(unique("e"), space, config))
        for about, place in ((node, space), (config, "default")):
            path = f"/api/v1/namespaces/{place}/events"
            assert kube.refused("POST", path, event(unique("e"), place, about)) == (422, "Invalid")

    # --- tokens ------------------------------------------------------------------------------------------------------
    @pytest.fixture
    def pod(self, kube: Kube, space: str) -> dict[str, Any]:
        """A pod of ServiceAccount "agent" on a node."""
        accounts = f"/api/v1/namespaces/{space}/serviceaccounts"
        kube.request("POST", accounts, {"kind": "ServiceAccount", "metadata": {"name": "agent"}})
        return self.make_pod(kube, space, "agent-pod", {"nodeName": make_node(kube)["metadata"]["name"]})

    def make_pod(self, kube: Kube, space: str, name: str, more: dict[str, Any]) -> dict[str, Any]:
        spec = {
            "serviceAccountName": "agent",
            "containers": [{"name": "c", "image": "i"}],
            "terminationGracePeriodSeconds": 0,
        }
        body = {"kind": "Pod", "metadata": {"name": name}, "spec": {**spec, **more}}
        return kube.request("POST", f"/api/v1/namespaces/{space}/pods", body)

    def request_token(self, kube: Kube, space: str, pod: str, uid: str, *audiences: str, expiry_s: int = 3600) -> str:
        bound = {"apiVersion": "v1", "kind": "Pod", "name": pod, "uid": uid}
        body = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {"audiences": audiences, "expirationSeconds": expiry_s, "boundObjectRef": bound},
        }
        path = f"/api/v1/namespaces/{space}/serviceaccounts/agent/token"
        return str(kube.request("POST", path, body)["status"]["token"])

    def token(self, kube: Kube, pod: dict[str, Any], *audiences: str) -> str:
        meta = pod["metadata"]
        return self.request_token(kube, meta["namespace"], meta["name"], meta["uid"], *(audiences or ("headway",)))

    def review(self, kube: Kube, token: str) -> dict[str, Any]:
        spec = {"token": token, "audiences": ["headway"]}
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": spec}
        status: dict[str, Any] = kube.request("POST", REVIEWS, body)["status"]
        return status

    def test_a_token_names_pod_and_node(self, kube: Kube, pod: dict[str, Any]) -> None:
        status = self.review(kube, self.token(kube, pod, "somebody-else", "headway"))
        assert status["authenticated"] is True
        assert status["audiences"] == ["headway"]
        assert status["user"]["username"] == f"system:serviceaccount:{pod['metadata']['namespace']}:agent"
        extra = {key.rpartition("/")[2]: values for key, values in status["user"]["extra"].items()}
        node = kube.request("GET", f"{NODES}/{pod['spec']['nodeName']}")["metadata"]
        assert (extra["pod-name"], extra["pod-uid"]) == (["agent-pod"], [pod["metadata"]["uid"]])
        assert (extra["node-name"], extra["node-uid"]) == ([node["name"]], [node["uid"]])
        assert all(key.startswith("authentication.kubernetes.io/") for key in status["user"]["extra"])

    def test_a_token_of_a_pod_that_no_node_has_names_none(self, kube: Kube, pod: dict[str, Any]) -> None:
        waiting = self.make_pod(kube, pod["metadata"]["namespace"], "waiting", {"nodeSelector": {"no": "where"}})
        status = self.review(kube, self.token(kube, waiting))
        assert status["authenticated"] is True
        assert not [key for key in status["user"]["extra"] if "node" in key.rpartition("/")[2]]

    def test_tokens_that_are_not_good(self, kube: Kube, pod: dict[str, Any]) -> None:
        good = self.token(kube, pod)
        claims = jwt.decode(good, options={"verify_signature": False})
        now = int(time.time())
        expired = kube.sign({**claims, "iat": now - 7200, "nbf": now - 7200, "exp": now - 60})
        head, body, signature = good.split(".")
        forged = f"{head}.{body}.{signature[:-8]}AAAAAAAA"
        elsewhere = self.token(kube, pod, "somebody-else")
        for bad, why in ((elsewhere, "audience"), (expired, "expired"), (forged, "invalid"), ("nonsense", "invalid")):
            status = self.review(kube, bad)
            assert not status.get("authenticated")
            assert not status.get("user")
            assert why in status["error"]
        assert self.review(kube, kube.sign(claims))["authenticated"] is True, "signed anew it is the same token"

    def test_a_token_opens_no_other_door(self, kube: Kube, pod: dict[str, Any]) -> None:
        """The API itself is another audience."""
        headers = {"Authorization": f"Bearer {self.token(kube, pod)}"}
        assert kube.raw("GET", NODES, headers)[0] == 401

    def test_a_review_of_no_token_is_refused(self, kube: Kube) -> None:
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": {"token": ""}}
        assert kube.refused("POST", REVIEWS, body) == (400, "BadRequest")

    def test_a_token_is_given_only_for_a_pod_that_is_there(self, kube: Kube, pod: dict[str, Any]) -> None:
        space, uid = pod["metadata"]["namespace"], pod["metadata"]["uid"]
        cases = (("none", uid, 3600, 404), ("agent-pod", "another", 3600, 409), ("agent-pod", uid, 10, 422))
        for name, given, expiry_s, status in cases:
            with pytest.raises(ApiError) as caught:
                self.request_token(kube, space, name, given, "headway", expiry_s=expiry_s)
            assert caught.value.status == status

    def test_a_token_ends_with_its_pod(self, kube: Kube, pod: dict[str, Any]) -> None:
        """The real server caches good answers for about ten seconds."""
        token = self.token(kube, pod)
        assert self.review(kube, token)["authenticated"] is True
        path = f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/agent-pod"
        kube.request("DELETE", path, {"gracePeriodSeconds": 0})
        assert kube.refused("GET", path) == (404, "NotFound")
        deadline_s = time.monotonic() + 30.0
        while self.review(kube, token).get("authenticated"):
            assert time.monotonic() < deadline_s
            time.sleep(0.5)
