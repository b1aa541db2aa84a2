"""What is served, and the discovery documents that say so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fakes.kube.status import Obj

VERBS = ("create", "delete", "deletecollection", "get", "list", "patch", "update", "watch")
STATUS_VERBS = ("get", "patch", "update")


@dataclass(frozen=True)
class Subresource:
    """`name` below an object, e.g. pods/eviction; `api_version` where the kind is of another group."""

    name: str
    kind: str
    verbs: tuple[str, ...]
    api_version: str = ""


@dataclass(frozen=True)
class Resource:
    """One kind of object. `counts_generation`: metadata.generation grows when the spec changes."""

    group: str
    version: str
    plural: str
    kind: str
    namespaced: bool
    short: tuple[str, ...] = ()
    subresources: tuple[Subresource, ...] = ()
    counts_generation: bool = False
    verbs: tuple[str, ...] = VERBS
    #: Fields, beyond metadata.name and metadata.namespace, that field selectors may name.
    selectable: tuple[str, ...] = ()
    unconditional_update: bool = True

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def key(self) -> str:
        return f"{self.group}/{self.plural}"

    @property
    def has_status(self) -> bool:
        return any(sub.name == "status" for sub in self.subresources)


def _status(kind: str) -> Subresource:
    return Subresource("status", kind, STATUS_VERBS)


_POD_FIELDS = (
    "spec.nodeName",
    "spec.restartPolicy",
    "spec.schedulerName",
    "spec.serviceAccountName",
    "status.phase",
    "status.podIP",
    "status.nominatedNodeName",
)
_EVENT_FIELDS = (
    *(f"involvedObject.{name}" for name in ("kind", "namespace", "name", "uid", "apiVersion", "fieldPath")),
    "reason",
    "reportingComponent",
    "source",
    "type",
)
_TOKEN = Subresource("token", "TokenRequest", ("create",), "authentication.k8s.io/v1")
_POD_SUBRESOURCES = (
    _status("Pod"),
    Subresource("binding", "Binding", ("create",)),
    Subresource("eviction", "Eviction", ("create",), "policy/v1"),
)

RESOURCES: tuple[Resource, ...] = (
    Resource(
        "",
        "v1",
        "namespaces",
        "Namespace",
        False,
        ("ns",),
        (_status("Namespace"),),
        verbs=tuple(verb for verb in VERBS if verb != "deletecollection"),
        selectable=("status.phase",),
    ),
    Resource("", "v1", "nodes", "Node", False, ("no",), (_status("Node"),), selectable=("spec.unschedulable",)),
    Resource("", "v1", "pods", "Pod", True, ("po",), _POD_SUBRESOURCES, True, selectable=_POD_FIELDS),
    Resource("", "v1", "events", "Event", True, ("ev",), selectable=_EVENT_FIELDS),
    Resource("", "v1", "configmaps", "ConfigMap", True, ("cm",)),
    Resource("", "v1", "serviceaccounts", "ServiceAccount", True, ("sa",), (_TOKEN,)),
    Resource("coordination.k8s.io", "v1", "leases", "Lease", True, unconditional_update=False),
    Resource("events.k8s.io", "v1", "events", "Event", True, ("ev",), selectable=_EVENT_FIELDS),
    Resource("resource.k8s.io", "v1", "deviceclasses", "DeviceClass", False, counts_generation=True),
    Resource(
        "resource.k8s.io",
        "v1",
        "devicetaintrules",
        "DeviceTaintRule",
        False,
        (),
        (_status("DeviceTaintRule"),),
        True,
    ),
    Resource("resource.k8s.io", "v1", "resourceclaims", "ResourceClaim", True, (), (_status("ResourceClaim"),)),
    Resource(
        "resource.k8s.io",
        "v1",
        "resourceslices",
        "ResourceSlice",
        False,
        counts_generation=True,
        selectable=("spec.driver", "spec.nodeName"),
    ),
)
#: Kinds that are asked, not stored.
REVIEWS: tuple[Resource, ...] = (
    Resource("authentication.k8s.io", "v1", "tokenreviews", "TokenReview", False, verbs=("create",)),
    Resource("authentication.k8s.io", "v1", "selfsubjectreviews", "SelfSubjectReview", False, verbs=("create",)),
)
ALL = RESOURCES + REVIEWS
BY_PATH: Mapping[tuple[str, str, str], Resource] = {(one.group, one.version, one.plural): one for one in ALL}
BY_KIND: Mapping[tuple[str, str], Resource] = {(one.api_version, one.kind): one for one in ALL}
EVENTS = BY_PATH["", "v1", "events"]
NODES = BY_PATH["", "v1", "nodes"]
PODS = BY_PATH["", "v1", "pods"]
NAMESPACES = BY_PATH["", "v1", "namespaces"]
ACCOUNTS = BY_PATH["", "v1", "serviceaccounts"]
GROUPS = sorted({one.group for one in ALL if one.group})


def storage_of(resource: Resource) -> Resource:
    """Events of both groups are the same objects, stored as those of the core group."""
    return EVENTS if resource.plural == "events" else resource


def api_versions() -> Obj:
    return {"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []}


def _group(name: str) -> Obj:
    version = {"groupVersion": f"{name}/v1", "version": "v1"}
    return {"name": name, "versions": [version], "preferredVersion": version}


def group_list() -> Obj:
    return {"kind": "APIGroupList", "apiVersion": "v1", "groups": [_group(name) for name in GROUPS]}


def group(name: str) -> Obj | None:
    return {"kind": "APIGroup", "apiVersion": "v1", **_group(name)} if name in GROUPS else None


def _entry(resource: Resource) -> Obj:
    entry: Obj = {"name": resource.plural, "singularName": resource.kind.lower(), "namespaced": resource.namespaced}
    entry |= {"kind": resource.kind, "verbs": list(resource.verbs)}
    return entry | ({"shortNames": list(resource.short)} if resource.short else {})


def _sub_entry(resource: Resource, sub: Subresource) -> Obj:
    entry: Obj = {"name": f"{resource.plural}/{sub.name}", "singularName": "", "namespaced": resource.namespaced}
    if sub.api_version:
        group_name, _, version = sub.api_version.rpartition("/")
        entry |= {"group": group_name, "version": version}
    return entry | {"kind": sub.kind, "verbs": list(sub.verbs)}


def resource_list(group_name: str) -> Obj | None:
    """The resources of one group ("" = core), version v1; None for a group that is not served."""
    served = [one for one in ALL if one.group == group_name]
    if not served:
        return None
    entries: list[Obj] = []
    for one in served:
        entries.append(_entry(one))
        entries += [_sub_entry(one, sub) for sub in one.subresources]
    version = f"{group_name}/v1" if group_name else "v1"
    kind: Obj = {"kind": "APIResourceList"}
    return kind | ({"apiVersion": "v1"} if group_name else {}) | {"groupVersion": version, "resources": entries}


def openapi_index() -> Obj:
    """Enough of OpenAPI v3 for kubectl to learn that the server itself validates fields."""
    paths = ["api/v1", *(f"apis/{name}/v1" for name in GROUPS)]
    return {"paths": {path: {"serverRelativeURL": f"/openapi/v3/{path}"} for path in paths}}


def openapi(path: str) -> Obj | None:
    group_name = "" if path == "api/v1" else path.removeprefix("apis/").removesuffix("/v1")
    served = [one for one in RESOURCES if one.group == group_name]
    if not served:
        return None
    paths: Obj = {}
    for one in served:
        scope = "namespaces/{namespace}/" if one.namespaced else ""
        kind = {"group": one.group, "version": one.version, "kind": one.kind}
        parameters = [
            {"name": name, "in": "query", "schema": {"type": "string", "uniqueItems": True}}
            for name in ("dryRun", "fieldManager", "fieldValidation")
        ]
        operation: Obj = {"parameters": parameters, "x-kubernetes-group-version-kind": kind}
        paths[f"/{path}/{scope}{one.plural}/{{name}}"] = {
            "patch": operation | {"x-kubernetes-action": "patch", "responses": {}},
        }
    return {"openapi": "3.0.0", "info": {"title": "Kubernetes", "version": "v1.37.2"}, "paths": paths}
