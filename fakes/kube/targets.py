"""What a request's path and method name: a resource, an object, a verb."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fakes.kube import resources
from fakes.kube.resources import Resource
from fakes.kube.status import ApiStatus, Obj, forbidden, method_not_allowed, no_such_path
from fakes.kube.tokens import ANONYMOUS

_VERBS: Mapping[tuple[str, bool], str] = {
    ("GET", True): "get",
    ("GET", False): "list",
    ("POST", False): "create",
    ("PUT", True): "update",
    ("PATCH", True): "patch",
    ("DELETE", True): "delete",
    ("DELETE", False): "deletecollection",
}


@dataclass(frozen=True)
class Target:
    """What a path names. `namespace` None = all of them, or a kind without."""

    resource: Resource
    namespace: str | None
    name: str
    sub: str
    verb: str

    def as_object(self) -> Obj:
        parts = {
            "resource": self.resource.plural,
            "namespace": self.namespace or "",
            "name": self.name,
            "apiGroup": self.resource.group,
            "apiVersion": self.resource.version,
            "subresource": self.sub,
        }
        return {key: value for key, value in parts.items() if value}


def target_of(method: str, path: str, watch: bool) -> Target | None:
    """None for a path that names no resource. Raises ApiStatus for one that is not served so."""
    parts = [part for part in path.split("/") if part]
    if parts[:1] == ["api"]:
        group, rest = "", parts[1:]
    elif parts[:1] == ["apis"] and len(parts) > 2:
        group, rest = parts[1], parts[2:]
    else:
        return None
    if len(rest) < 2:
        return None
    version, rest = rest[0], rest[1:]
    namespace: str | None = None
    if rest[0] == "namespaces" and len(rest) > 2 and rest[2] not in ("status", "finalize"):
        namespace, rest = rest[1], rest[2:]
    plural, name, sub, *more = [*rest, "", ""][: max(3, len(rest))]
    resource = resources.BY_PATH.get((group, version, plural))
    known_sub = resource is not None and (not sub or any(one.name == sub for one in resource.subresources))
    if resource is None or more or not known_sub or (namespace is not None and not resource.namespaced):
        raise no_such_path()
    verb = _VERBS.get((method, bool(name)), "")
    if sub and sub != "status":
        verb = "create" if method == "POST" else ""
    if verb == "list" and watch:
        verb = "watch"
    unplaced = resource.namespaced and namespace is None and verb not in ("list", "watch")
    if not verb or (verb not in resource.verbs and not sub) or unplaced:
        raise method_not_allowed()
    return Target(resource, namespace, name, sub, verb)


def not_for_anonymous(method: str, path: str, target: Target | None) -> ApiStatus:
    who = f'User "{ANONYMOUS.name}" cannot'
    if target is None:
        return ApiStatus(403, f'forbidden: {who} {method.lower()} path "{path}"', details={})
    resource = target.resource
    place = f'in the namespace "{target.namespace}"' if target.namespace else "at the cluster scope"
    why = f'{who} {target.verb} resource "{resource.plural}" in API group "{resource.group}" {place}'
    return forbidden(resource.group, resource.plural, target.name, why)
