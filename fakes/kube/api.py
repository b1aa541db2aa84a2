"""The verbs on the store: create, update, patch, delete, and the subresources of pods and ServiceAccounts.

All are plain functions that finish before anything else runs, so that each is atomic.
"""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from fakes.kube import events, schema, validate
from fakes.kube.patch import json_patch, merge_patch, strategic_merge_patch
from fakes.kube.resources import ACCOUNTS, NAMESPACES, PODS, Resource, storage_of
from fakes.kube.selectors import Predicate
from fakes.kube.status import (
    ApiStatus,
    Cause,
    Obj,
    already_exists,
    bad_request,
    conflict,
    forbidden,
    invalid,
    invalid_value,
    not_found,
    success,
    unsupported_media_type,
)
from fakes.kube.store import Store

#: Alphabet and length of the suffix that generateName adds.
_SUFFIX_LETTERS = "bcdfghjklmnpqrstvwxz2456789"
_SUFFIX_LENGTH = 5
_FINISHED = ("Succeeded", "Failed")
CREATED_BY_PUT = frozenset({"leases", "events"})


@dataclass(frozen=True)
class Options:
    """Query parameters of a write."""

    dry_run: bool = False
    strict: bool = False

    @classmethod
    def of(cls, query: Mapping[str, str]) -> Options:
        return cls(query.get("dryRun") == "All", query.get("fieldValidation") == "Strict")


def stamp(moment: datetime | None = None) -> str:
    """metav1.Time of a moment (default: now)."""
    return (moment or datetime.now(UTC)).strftime("%Y-%m-%dT%H:%M:%SZ")


def shown(resource: Resource, obj: Obj) -> Obj:
    """A stored object as the resource's group shows it."""
    return events.as_new(obj) if resource.group == "events.k8s.io" else obj


class Api:
    """A pod deleted with a grace period waits for a kubelet, or for a second deletion without one."""

    def __init__(self, store: Store) -> None:
        self.store = store

    # --- reading ------------------------------------------------------------------------------------------------------

    def get(self, resource: Resource, namespace: str, name: str) -> Obj:
        obj = self.store.get(resource, namespace, name)
        if obj is None:
            raise not_found(resource.group, resource.plural, name)
        return obj

    def list(self, resource: Resource, matches: Predicate) -> list[Obj]:
        return [obj for obj in self.store.all(resource) if matches(obj)]

    # --- writing ------------------------------------------------------------------------------------------------------

    def create(self, resource: Resource, namespace: str, body: Obj, options: Options) -> Obj:
        obj = self._decoded(resource, body, options, 400)
        meta = dict(obj["metadata"])
        if meta.get("resourceVersion"):
            raise ApiStatus(500, "resourceVersion should not be set on objects to be created", reason="")
        self._place(resource, namespace, meta)
        if not meta.get("name") and meta.get("generateName"):
            meta["name"] = meta["generateName"] + "".join(
                secrets.choice(_SUFFIX_LETTERS) for _ in range(_SUFFIX_LENGTH)
            )
        for managed in ("deletionTimestamp", "deletionGracePeriodSeconds", "selfLink", "generation"):
            meta.pop(managed, None)
        if resource.counts_generation:
            meta["generation"] = 1
        meta |= {"uid": str(uuid.uuid4()), "creationTimestamp": stamp()}
        stored_kind = storage_of(resource)
        obj = validate.with_defaults(stored_kind, obj | {"metadata": meta}, stamp())
        validate.check(stored_kind, obj, None)
        if resource is PODS:
            self._check_account(obj)
        if self.store.get(resource, namespace, meta["name"]) is not None:
            raise already_exists(resource.group, resource.plural, meta["name"])
        if options.dry_run:
            return obj
        stored = self.store.put(stored_kind, obj)
        if resource is NAMESPACES:
            account = {"metadata": {"name": "default"}}
            self.create(ACCOUNTS, meta["name"], account, Options())
        return stored

    def update(self, resource: Resource, namespace: str, name: str, sub: str, body: Obj, options: Options) -> Obj:
        """PUT of an object or its status."""
        new = self._decoded(resource, body, options, 400)
        self._check_name(new, name)
        current = self.store.get(resource, namespace, name)
        if current is None:
            if resource.plural in CREATED_BY_PUT:  # whatever version the writer had read
                unread = {key: value for key, value in (body.get("metadata") or {}).items() if key != "resourceVersion"}
                return self.create(resource, namespace, body | {"metadata": unread}, options)
            raise not_found(resource.group, resource.plural, name)
        given = new["metadata"]
        if not given.get("resourceVersion") and not resource.unconditional_update:
            cause = Cause("metadata.resourceVersion", "Invalid value: 0: must be specified for an update")
            error = invalid(resource.group, resource.plural, name, [cause])
            raise error
        uid = current["metadata"]["uid"]
        if given.get("uid") not in (None, uid) and given.get("resourceVersion") in (
            None,
            current["metadata"]["resourceVersion"],
        ):
            why = f"Precondition failed: UID in precondition: {given['uid']}, UID in object meta: {uid}"
            raise conflict(resource.group, resource.plural, name, f"StorageError: invalid object, {why}")
        return self._replace(resource, current, new, sub, options)

    def patch(
        self, resource: Resource, namespace: str, name: str, sub: str, patch: Any, media: str, options: Options
    ) -> Obj:
        """`media` is the Content-Type, which says how `patch` is to be read."""
        current = self.get(resource, namespace, name)
        base = shown(resource, current)
        if media == "application/json-patch+json":
            patched = json_patch(base, patch)
        elif not isinstance(patch, dict):
            raise bad_request("error decoding patch: json: cannot unmarshal into Go value of type map")
        elif media == "application/merge-patch+json":
            patched = merge_patch(base, patch)
        elif media == "application/strategic-merge-patch+json":
            patched = strategic_merge_patch(base, patch)
        else:
            raise unsupported_media_type()
        if not isinstance(patched, dict) or not isinstance(patched.get("metadata"), dict):
            raise ApiStatus(422, "the server rejected our request due to an error in our request", details={})
        new = self._decoded(resource, patched, options, 422)
        self._check_name(new, name)
        return self._replace(resource, current, new, sub, options)

    def _replace(self, resource: Resource, current: Obj, new: Obj, sub: str, options: Options) -> Obj:
        old_meta, meta = current["metadata"], dict(new["metadata"])
        name = old_meta["name"]
        version = meta.get("resourceVersion") or old_meta["resourceVersion"]
        if not str(version).isdigit():
            raise ApiStatus(500, f'strconv.ParseUint: parsing "{version}": invalid syntax', reason="")
        if version != old_meta["resourceVersion"]:
            raise conflict(resource.group, resource.plural, name)
        for kept in ("uid", "creationTimestamp", "deletionTimestamp", "deletionGracePeriodSeconds"):
            if kept not in meta and kept in old_meta:
                meta[kept] = old_meta[kept]
        for managed in ("generation", "namespace", "generateName"):
            meta.pop(managed, None)
            if managed in old_meta:
                meta[managed] = old_meta[managed]
        meta["resourceVersion"] = old_meta["resourceVersion"]
        if sub == "status":
            if resource is PODS:  # a status update may not give a pod other owners
                meta.pop("ownerReferences", None)
                meta |= {key: old_meta[key] for key in ("ownerReferences",) if key in old_meta}
            new = {**current, "metadata": meta, "status": new.get("status", {})}
        else:
            new = {**new, "metadata": meta}
            if resource.has_status:
                new.pop("status", None)
                new |= {key: current[key] for key in ("status",) if key in current}
        new = {"apiVersion": current["apiVersion"], "kind": current["kind"], **_without_type(new)}
        if resource.kind == "DeviceTaintRule":
            new = _taint_time(new, current)
        validate.check(storage_of(resource), new, current)
        if new == current:
            return current  # nothing to write: no new version, no watch event
        if resource.counts_generation and new.get("spec") != current.get("spec"):
            new["metadata"] = meta | {"generation": old_meta.get("generation", 1) + 1}
        if options.dry_run:
            return new
        if "deletionTimestamp" in meta and not meta.get("finalizers") and not self._has_grace(new):
            return self.store.remove(storage_of(resource), new)
        return self.store.put(storage_of(resource), new)

    def _has_grace(self, obj: Obj) -> bool:
        return obj["kind"] == "Namespace" or bool(obj["metadata"].get("deletionGracePeriodSeconds"))

    def delete(self, resource: Resource, namespace: str, name: str, wish: Obj, options: Options) -> Obj:
        """`wish` = DeleteOptions, fields of the query among them."""
        current = self.get(resource, namespace, name)
        self._check_preconditions(resource, current, wish.get("preconditions") or {})
        meta = current["metadata"]
        if options.dry_run:
            return success(_deleted(resource, meta))
        if resource is NAMESPACES:
            return self._delete_namespace(current)
        grace = self._grace(current, wish) if resource is PODS else 0
        if grace or meta.get("finalizers"):
            if resource is PODS and meta.get("deletionGracePeriodSeconds", grace + 1) <= grace:
                return current  # being deleted already, and not later than now asked
            ends = stamp(datetime.now(UTC) + timedelta(seconds=grace))
            marked = meta | {"deletionTimestamp": ends, "deletionGracePeriodSeconds": grace}
            if resource.counts_generation:
                marked["generation"] = meta.get("generation", 1) + 1
            return self.store.put(storage_of(resource), current | {"metadata": marked})
        if resource is PODS:
            marked = meta | {"deletionTimestamp": stamp(), "deletionGracePeriodSeconds": 0}
            return self.store.remove(resource, current | {"metadata": marked})
        self.store.remove(storage_of(resource), current)
        return success(_deleted(resource, meta))

    def _grace(self, pod: Obj, wish: Obj) -> int:
        asked = wish.get("gracePeriodSeconds")
        spec = pod["spec"]
        if asked is not None and (not isinstance(asked, int) or asked < 0):
            cause = invalid_value("gracePeriodSeconds", str(asked), "must be greater than or equal to 0")
            raise invalid("meta.k8s.io", "DeleteOptions", "", [cause])
        if not spec.get("nodeName") or pod["status"].get("phase") in _FINISHED:
            return 0  # nothing runs that would need time to stop
        return int(spec["terminationGracePeriodSeconds"] if asked is None else asked)

    def _delete_namespace(self, namespace: Obj) -> Obj:
        if "deletionTimestamp" in namespace["metadata"]:
            return namespace
        meta = namespace["metadata"] | {"deletionTimestamp": stamp()}
        return self.store.put(NAMESPACES, namespace | {"metadata": meta, "status": {"phase": "Terminating"}})

    def delete_all(self, resource: Resource, matches: Predicate, wish: Obj, options: Options) -> Sequence[Obj]:
        found = self.list(resource, matches)
        for obj in found:
            self.delete(resource, obj["metadata"].get("namespace", ""), obj["metadata"]["name"], wish, options)
        return found

    def _check_preconditions(self, resource: Resource, obj: Obj, wanted: Obj) -> None:
        meta = obj["metadata"]
        texts = (
            ("uid", "UID", "been deleted and then recreated"),
            ("resourceVersion", "ResourceVersion", "been modified"),
        )
        for field, word, fate in texts:
            if wanted.get(field) not in (None, meta[field]):
                why = (
                    f"the {word} in the precondition ({wanted[field]}) does not match the {word} in record "
                    f"({meta[field]}). The object might have {fate}"
                )
                raise conflict(resource.group, obj["kind"], meta["name"], why)

    # --- pods ---------------------------------------------------------------------------------------------------------

    def evict(self, namespace: str, name: str, body: Obj, options: Options) -> Obj:
        """pods/eviction; there are no disruption budgets here to refuse it."""
        if body.get("metadata", {}).get("name", name) != name:
            raise bad_request("name in URL does not match name in Eviction object")
        self.delete(PODS, namespace, name, body.get("deleteOptions") or {}, options)
        return success(code=201)

    def bind(self, namespace: str, name: str, body: Obj) -> Obj:
        """pods/binding, as a scheduler does it."""
        pod = self.get(PODS, namespace, name)
        node = str((body.get("target") or {}).get("name", ""))
        if not node:
            raise invalid("", "Binding", name, [Cause("target.name", "Required value", "FieldValueRequired")])
        if bound := pod["spec"].get("nodeName"):
            raise conflict("", "pods/binding", name, f'pod {name} is already assigned to node "{bound}"')
        conditions = [one for one in pod["status"].get("conditions", []) if one["type"] != "PodScheduled"]
        scheduled = {"type": "PodScheduled", "status": "True", "lastProbeTime": None, "lastTransitionTime": stamp()}
        status = pod["status"] | {"conditions": [*conditions, scheduled]}
        self.store.put(PODS, pod | {"spec": pod["spec"] | {"nodeName": node}, "status": status})
        return success(code=201)

    def _check_account(self, pod: Obj) -> None:
        namespace, account = pod["metadata"]["namespace"], pod["spec"]["serviceAccountName"]
        if self.store.get(ACCOUNTS, namespace, account) is None:
            why = f'error looking up service account {namespace}/{account}: serviceaccount "{account}" not found'
            raise forbidden("", "pods", pod["metadata"]["name"], why)

    # --- what is sent -------------------------------------------------------------------------------------------------

    def _decoded(self, resource: Resource, body: Obj, options: Options, wrong_type_code: int) -> Obj:
        kind, version = body.get("kind") or resource.kind, body.get("apiVersion") or resource.api_version
        if (kind, version) != (resource.kind, resource.api_version):
            raise bad_request(f'{kind} in version "{version}" cannot be handled as a {resource.kind}')
        if not isinstance(body.get("metadata") or {}, dict):
            raise bad_request("metadata is not an object")
        typed = body | {"apiVersion": resource.api_version, "kind": kind}
        try:
            core = events.as_core(typed) if resource.group == "events.k8s.io" else typed
            return schema.decoded(resource.kind, core, options.strict)
        except (schema.WrongType, schema.UnknownField) as error:
            strict = "strict decoding error: " if isinstance(error, schema.UnknownField) else ""
            if wrong_type_code == 422:
                raise ApiStatus(422, f' "" is invalid: patch: Invalid value: {strict}{error}', details={}) from None
            text = f'{kind} in version "{resource.version}" cannot be handled as a {kind}: {strict}{error}'
            raise bad_request(text) from None

    def _check_name(self, new: Obj, name: str) -> None:
        given = new["metadata"].get("name", "")
        if given != name:
            raise bad_request(f"the name of the object ({given}) does not match the name on the URL ({name})")

    def _place(self, resource: Resource, namespace: str, meta: Obj) -> None:
        if not resource.namespaced:
            meta.pop("namespace", None)
            return
        if meta.get("namespace", namespace) != namespace:
            raise bad_request("the namespace of the provided object does not match the namespace sent on the request")
        meta["namespace"] = namespace
        found = self.store.get(NAMESPACES, "", namespace)
        if found is None:
            raise not_found("", "namespaces", namespace)
        if "deletionTimestamp" in found["metadata"]:
            why = f"unable to create new content in namespace {namespace} because it is being terminated"
            text = f"namespace {namespace} is being terminated"
            cause = Cause("metadata.namespace", text, "NamespaceTerminating").as_object()
            raise forbidden(resource.group, resource.plural, str(meta.get("name", "")), why, [cause])


def _without_type(obj: Obj) -> Obj:
    return {key: value for key, value in obj.items() if key not in ("apiVersion", "kind")}


def _deleted(resource: Resource, meta: Obj) -> Obj:
    details = {"name": meta["name"], "group": resource.group, "kind": resource.plural, "uid": meta["uid"]}
    return {key: value for key, value in details.items() if value}


def _taint_time(new: Obj, current: Obj) -> Obj:
    """A rule's timeAdded is renewed where it is left out, or kept while the effect changes."""
    taint = dict((new.get("spec") or {}).get("taint") or {})
    old = current["spec"]["taint"]
    if not taint.get("timeAdded") or (taint.get("effect") != old["effect"] and taint["timeAdded"] == old["timeAdded"]):
        taint["timeAdded"] = stamp()
    return new | {"spec": (new.get("spec") or {}) | {"taint": taint}}
