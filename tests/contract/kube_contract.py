"""What headway relies on of a Kubernetes API server. The embedded one and the real one both have to pass it.

Subclasses run where there are the fixtures `kube` and `forgetful` (a server, and a version that it has forgotten).
Objects have names of their own, since the real server is shared with other tests.
"""

from __future__ import annotations

import json
import threading
import time

import pytest

from tests.cluster.client import MERGE_PATCH, STRATEGIC_MERGE_PATCH, ApiError
from tests.contract.kube import NODES, STAMP, Kube, condition, make_node, patch_status, unique
from tests.contract.kube_contract_kinds import KindsContract


class KubeContract(KindsContract):
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
        assert kube.request("DELETE", f"{NODES}/{name}")["status"] == "Success"
        for method, body in (("GET", None), ("DELETE", None), ("PATCH", {"metadata": {"labels": {"x": "y"}}})):
            assert kube.refused(method, f"{NODES}/{name}", body) == (404, "NotFound")

    def test_what_is_not_found_is_named(self, kube: Kube) -> None:
        name = unique("none")
        with pytest.raises(ApiError) as caught:
            kube.request("GET", f"{NODES}/{name}")
        assert caught.value.body == {
            "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "reason": "NotFound",
            "message": f'nodes "{name}" not found', "details": {"name": name, "kind": "nodes"}, "code": 404,
        }  # fmt: skip

    def test_who_shows_a_wrong_token_is_unauthorized(self, kube: Kube) -> None:
        for token in ("nobody", "a.b.c"):
            status, answer = kube.raw("GET", NODES, {"Authorization": f"Bearer {token}"})
            assert (status, answer["kind"], answer["reason"]) == (401, "Status", "Unauthorized")

    def test_who_shows_no_token_may_see_no_nodes(self, kube: Kube) -> None:
        for headers in ({}, {"Authorization": "Bearer "}, {"Authorization": "Basic YTpi"}):
            status, answer = kube.raw("GET", NODES, headers)
            assert (status, answer["reason"]) == (403, "Forbidden")
            assert "system:anonymous" in answer["message"]

    @pytest.mark.parametrize("name", ["", "UPPER", "a_b", "-a"])
    def test_a_name_that_is_none_is_refused(self, kube: Kube, name: str) -> None:
        body = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}}
        assert kube.refused("POST", NODES, body) == (422, "Invalid")

    # --- list and watch ----------------------------------------------------------------------------------------------
    def test_pages_are_of_one_moment_and_a_watch_goes_on_from_it(self, kube: Kube) -> None:
        label = unique("pages")
        names = sorted(make_node(kube, labels={"set": label})["metadata"]["name"] for _ in range(3))
        selector = f"labelSelector=set%3D{label}"
        first = kube.request("GET", f"{NODES}?{selector}&limit=2")
        assert (first["kind"], len(first["items"])) == ("NodeList", 2)
        late = make_node(kube, labels={"set": label})["metadata"]["name"]
        rest = kube.request("GET", f"{NODES}?{selector}&limit=2&continue={first['metadata']['continue']}")
        assert not rest["metadata"].get("continue")
        assert [one["metadata"]["name"] for one in first["items"] + rest["items"]] == names
        said = kube.watch(NODES, f"{selector}&resourceVersion={rest['metadata']['resourceVersion']}")
        assert [one["object"]["metadata"]["name"] for one in said if one["type"] == "ADDED"] == [late]

    def test_a_watch_says_all_that_came_after_its_version_in_order(self, kube: Kube) -> None:
        version = int(kube.request("GET", NODES)["metadata"]["resourceVersion"])
        first = make_node(kube)["metadata"]
        path = f"{NODES}/{first['name']}"
        kube.request("PATCH", path, {"metadata": {"labels": {"a": "3"}}}, MERGE_PATCH)
        kube.request("DELETE", path)
        second = make_node(kube, name=first["name"])["metadata"]
        said = kube.watch(NODES, f"resourceVersion={version}&fieldSelector=metadata.name%3D{first['name']}")
        # The real server's controllers change nodes too, so that there may be more MODIFIED than our one.
        words = [one["type"] for one in said]
        gone = words.index("DELETED")
        assert (words[0], set(words[1:gone]), words[gone + 1]) == ("ADDED", {"MODIFIED"}, "ADDED")
        assert {one["object"]["metadata"]["uid"] for one in said[: gone + 1]} == {first["uid"]}
        assert {one["object"]["metadata"]["uid"] for one in said[gone + 1 :]} == {second["uid"]}
        assert said[gone - 1]["object"]["metadata"]["labels"]["a"] == "3"
        versions = [version, *(int(one["object"]["metadata"]["resourceVersion"]) for one in said)]
        assert versions == sorted(set(versions)), "each later than the one before, the deletion too"

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

    def test_bookmarks_bring_newer_versions_to_who_asks(self, kube: Kube, space: str) -> None:
        """Else a watch of a kind that does not change ends with a version that the server has forgotten."""
        mine, others = (f"/api/v1/namespaces/{place}/configmaps" for place in (space, "default"))
        for asked in (True, False):
            version = kube.request("GET", mine)["metadata"]["resourceVersion"]
            name = unique("contract")
            body = {"kind": "ConfigMap", "metadata": {"name": name}}
            # Once the watch has begun: the real server marks no version that it had when the watch began.
            timer = threading.Timer(1.0, kube.request, ("POST", others, body))
            timer.start()
            query = f"fieldSelector=metadata.name%3Dnone&resourceVersion={version}"
            said = kube.watch(mine, f"{query}&allowWatchBookmarks={str(asked).lower()}", seconds=6)
            timer.join()
            made = kube.request("GET", f"{others}/{name}")["metadata"]["resourceVersion"]
            assert bool(said) is asked
            for one in said:
                assert (one["type"], one["object"]["kind"]) == ("BOOKMARK", "ConfigMap")
                assert not one["object"]["metadata"].get("name")
            assert not asked or int(said[-1]["object"]["metadata"]["resourceVersion"]) >= int(made)

    def test_a_version_that_is_too_old_is_gone(self, forgetful: tuple[Kube, str]) -> None:
        """410, after which a watcher lists again."""
        server, version = forgetful
        said = server.watch(NODES, f"resourceVersion={version}")
        assert [(one["type"], one["object"]["code"], one["object"]["reason"]) for one in said] == [
            ("ERROR", 410, "Expired")
        ]

    @pytest.mark.parametrize("version", ["abc", "-1", "1.5"])
    def test_a_version_that_is_none_is_refused(self, kube: Kube, version: str) -> None:
        assert kube.refused("GET", f"{NODES}?resourceVersion={version}") == (400, "BadRequest")
        said = kube.watch(NODES, f"resourceVersion={version}")
        assert [(one["type"], one["object"]["code"]) for one in said] == [("ERROR", 500)]

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

    def test_a_node_made_again_under_its_name_refuses_what_was_meant_for_the_first(self, kube: Kube) -> None:
        """422 and not 409, which the writer tells apart; 409 where the patch carries the first one's version."""
        first = make_node(kube)["metadata"]
        path = f"{NODES}/{first['name']}"
        kube.request("DELETE", path)
        make_node(kube, name=first["name"])
        meta = {"uid": first["uid"], "labels": {"a": "9"}}
        assert kube.refused("PATCH", path, {"metadata": meta}, MERGE_PATCH) == (422, "Invalid")
        status = {"metadata": {"uid": first["uid"]}, "status": {"conditions": [condition("x/One", "True")]}}
        assert kube.refused("PATCH", f"{path}/status", status, STRATEGIC_MERGE_PATCH) == (422, "Invalid")
        fence = {
            "metadata": {**meta, "resourceVersion": first["resourceVersion"]},
            "spec": {"taints": [{"key": "x/a", "effect": "NoSchedule"}]},
        }
        assert kube.refused("PATCH", path, fence, MERGE_PATCH) == (409, "Conflict")
        now = kube.request("GET", path)
        assert now["metadata"]["labels"]["a"] == "1"
        assert "x/" not in json.dumps([now["spec"], now.get("status")])

    @pytest.mark.parametrize(
        ("body", "status"),
        [
            ({"metadata": {"labels": {"x/a": "not ok"}}}, 422),
            ({"metadata": {"labels": {"x/a": "y" * 64}}}, 422),
            ({"metadata": {"labels": {"x/a": 1}}}, 422),
            ({"metadata": {"annotations": {"x y": "1"}}}, 422),
            ({"metadata": {"annotations": {"x/a": "y" * 262_144}}}, 422),
            ({"spec": {"taints": "x/a"}}, 422),
            ([], 400),
        ],
    )
    def test_a_patch_that_makes_no_node_is_refused(self, kube: Kube, body: object, status: int) -> None:
        path = f"{NODES}/{make_node(kube)['metadata']['name']}"
        assert kube.refused("PATCH", path, body, MERGE_PATCH)[0] == status

    def test_conditions_merge_by_type(self, kube: Kube) -> None:
        node = make_node(kube)["metadata"]
        name = node["name"]
        patch_status(kube, name, condition("x/One", "True"), condition("x/Two", "False"), uid=node["uid"])
        after = patch_status(kube, name, condition("x/Two", "True", "new"))["status"]["conditions"]
        mine = {one["type"]: (one["status"], one["message"]) for one in after if one["type"].startswith("x/")}
        assert mine == {"x/One": ("True", "m"), "x/Two": ("True", "new")}
        after = patch_status(kube, name, {"type": "x/One", "$patch": "delete"})["status"]["conditions"]
        assert [one["type"] for one in after if one["type"].startswith("x/")] == ["x/Two"]
        again = patch_status(kube, name, {"type": "x/One", "$patch": "delete"})["status"]["conditions"]
        assert [one["type"] for one in again if one["type"].startswith("x/")] == ["x/Two"]

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
        assert "unschedulable" not in kube.request("PATCH", path, both, MERGE_PATCH)["spec"]

    def test_a_patch_of_no_known_kind_is_refused(self, kube: Kube) -> None:
        path = f"{NODES}/{make_node(kube)['metadata']['name']}"
        assert kube.refused("PATCH", path, {"metadata": {}}, "application/json")[0] == 415
