"""What an API server refuses of the objects that headway writes or reads, and what it fills in."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from fakes.kube.resources import Resource
from fakes.kube.status import Cause, Obj, invalid, invalid_value, required

MAX_LABEL_BYTES = 63
MAX_ANNOTATIONS_BYTES = 256 * 1024
MAX_CONFIGMAP_BYTES = 1024 * 1024
MAX_EVENT_NOTE_BYTES = 1024
TAINT_EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")
NOT_READY_TAINT = "node.kubernetes.io/not-ready"

_NAME_PART = re.compile(r"([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]")
_LABEL_VALUE = re.compile(r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?")
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_CONFIG_KEY = re.compile(r"[-._a-zA-Z0-9]+")

_NAME_PART_TEXT = (
    "name part must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric "
    "character (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for validation is "
    "'([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]')"
)
_LABEL_VALUE_TEXT = (
    "a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.', and must start and "
    "end with an alphanumeric character (e.g. 'MyValue',  or 'my_value',  or '12345', regex used for validation is "
    "'(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?')"
)
_SUBDOMAIN_TEXT = (
    "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start and "
    "end with an alphanumeric character (e.g. 'example.com', regex used for validation is "
    "'[a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')"
)
_DNS_LABEL_TEXT = (
    "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must start and end with "
    "an alphanumeric character (e.g. 'my-name',  or '123-abc', regex used for validation is "
    "'[a-z0-9]([-a-z0-9]*[a-z0-9])?')"
)
_CONFIG_KEY_TEXT = (
    "a valid config key must consist of alphanumeric characters, '-', '_' or '.' (e.g. 'key.name',  or 'KEY_NAME',  or "
    "'key-name', regex used for validation is '[-._a-zA-Z0-9]+')"
)
_POD_SPEC_TEXT = (
    "Forbidden: pod updates may not change fields other than `spec.containers[*].image`,"
    "`spec.initContainers[*].image`,`spec.activeDeadlineSeconds`,`spec.tolerations` (only additions to existing "
    "tolerations),`spec.terminationGracePeriodSeconds` (allow it to be set to 1 if it was previously negative)"
)


def check(resource: Resource, obj: Obj, before: Obj | None) -> None:
    """Raises ApiStatus 422 naming every field that is wrong. `before` = the stored object of an update."""
    causes = list(_metadata(resource, obj["metadata"], before))
    if resource.kind == "Node":
        causes += _taints((obj.get("spec") or {}).get("taints") or [])
    elif resource.kind == "Event":
        causes += _event(obj, before)
    elif resource.kind == "ConfigMap":
        causes += _configmap(obj)
    elif resource.kind == "Lease":
        causes += _lease(obj.get("spec") or {})
    elif resource.kind == "Pod":
        causes += _pod(obj, before)
    elif resource.kind == "DeviceTaintRule":
        causes += _rule(obj.get("spec") or {})
    if causes:
        raise invalid(resource.group, resource.kind, str(obj["metadata"].get("name", "")), causes)


def qualified_name(field: str, key: str, lower: bool = False) -> Iterator[Cause]:
    """A label key, annotation key or taint key: [DNS subdomain/]name."""
    checked = key.lower() if lower else key  # annotation keys are checked in lower case
    prefix, slash, name = checked.rpartition("/")
    if slash and not prefix:
        yield invalid_value(field, key, "prefix part must be non-empty")
    elif slash and (len(prefix) > 253 or not _SUBDOMAIN.fullmatch(prefix)):
        yield invalid_value(field, key, f"prefix part {_SUBDOMAIN_TEXT}")
    if not name:
        yield invalid_value(field, key, "name part must be non-empty")
    elif len(name) > MAX_LABEL_BYTES:
        yield invalid_value(field, key, f"name part must be no more than {MAX_LABEL_BYTES} bytes")
    if not _NAME_PART.fullmatch(name):
        yield invalid_value(field, key, _NAME_PART_TEXT)


def label_value(field: str, value: str) -> Iterator[Cause]:
    if len(value) > MAX_LABEL_BYTES:
        yield invalid_value(field, value, f"must be no more than {MAX_LABEL_BYTES} bytes")
    elif not _LABEL_VALUE.fullmatch(value):
        yield invalid_value(field, value, _LABEL_VALUE_TEXT)


def _metadata(resource: Resource, meta: Obj, before: Obj | None) -> Iterator[Cause]:
    name = str(meta.get("name", ""))
    if not name:
        yield required("metadata.name", "name or generateName is required")
    elif resource.kind == "Namespace" and (len(name) > 63 or not _DNS_LABEL.fullmatch(name)):
        yield invalid_value("metadata.name", name, _DNS_LABEL_TEXT)
    elif len(name) > 253 or not _SUBDOMAIN.fullmatch(name):
        yield invalid_value("metadata.name", name, _SUBDOMAIN_TEXT)
    for key, value in (meta.get("labels") or {}).items():
        yield from qualified_name("metadata.labels", key)
        yield from label_value("metadata.labels", value)
    annotations: Mapping[str, str] = meta.get("annotations") or {}
    for key in annotations:
        yield from qualified_name("metadata.annotations", key, lower=True)
    if sum(len(key.encode()) + len(value.encode()) for key, value in annotations.items()) > MAX_ANNOTATIONS_BYTES:
        text = f"Too long: may not be more than {MAX_ANNOTATIONS_BYTES} bytes"
        yield Cause("metadata.annotations", text, "FieldValueTooLong")
    for index, owner in enumerate(meta.get("ownerReferences") or []):
        for field in ("apiVersion", "kind", "name", "uid"):
            if not owner.get(field):
                yield required(f"metadata.ownerReferences[{index}].{field}", "must not be empty")
    if before is not None:
        for field in ("uid", "creationTimestamp", "deletionTimestamp"):
            if meta.get(field) != before["metadata"].get(field):
                yield invalid_value(f"metadata.{field}", str(meta.get(field, "")), "field is immutable")


def _taints(taints: list[Obj]) -> Iterator[Cause]:
    seen: set[tuple[str, str]] = set()
    for index, taint in enumerate(taints):
        field = f"metadata.taints[{index}]"
        key, value, effect = (str(taint.get(part, "")) for part in ("key", "value", "effect"))
        yield from qualified_name(f"{field}.key", key)
        yield from label_value(f"{field}.value", value)
        if not effect:
            yield required(f"{field}.effect")
        elif effect not in TAINT_EFFECTS:
            known = ", ".join(f'"{one}"' for one in TAINT_EFFECTS)
            text = f'Unsupported value: "{effect}": supported values: {known}'
            yield Cause(f"{field}.effect", text, "FieldValueNotSupported")
        if (key, effect) in seen:
            text = f'Duplicate value: {{"Key":"{key}","Value":"{value}","Effect":"{effect}","TimeAdded":null}}'
            yield Cause(field, f"{text}: taints must be unique by key and effect pair", "FieldValueDuplicate")
        seen.add((key, effect))


def _event(event: Obj, before: Obj | None) -> Iterator[Cause]:
    namespace = event["metadata"].get("namespace", "")
    about = str((event.get("involvedObject") or {}).get("namespace", ""))
    # Events about objects without a namespace live in "default".
    if about != namespace and not (not about and namespace == "default"):
        yield invalid_value("involvedObject.namespace", about, "does not match event.namespace")
    if event.get("eventTime") and before is None:
        for field in ("reportingController", "reportingInstance", "action", "reason"):
            if not event.get("reportingComponent" if field == "reportingController" else field):
                yield required(field)
        if len(str(event.get("message", "")).encode()) > MAX_EVENT_NOTE_BYTES:
            yield Cause("message", f"Too long: may not be more than {MAX_EVENT_NOTE_BYTES} bytes", "FieldValueTooLong")


def _configmap(configmap: Obj) -> Iterator[Cause]:
    size = 0
    for part in ("data", "binaryData"):
        for key, value in (configmap.get(part) or {}).items():
            size += len(value.encode())
            if len(key) > 253 or not _CONFIG_KEY.fullmatch(key):
                yield invalid_value(f"{part}[{key}]", key, _CONFIG_KEY_TEXT)
    if size > MAX_CONFIGMAP_BYTES:
        yield Cause("", f"Too long: may not be more than {MAX_CONFIGMAP_BYTES} bytes", "FieldValueTooLong")


def _lease(spec: Obj) -> Iterator[Cause]:
    for field, least, text in (
        ("leaseDurationSeconds", 1, "must be greater than 0"),
        ("leaseTransitions", 0, "must be greater than or equal to 0"),
    ):
        value = spec.get(field)
        if value is not None and value < least:
            yield Cause(f"spec.{field}", f"Invalid value: {value}: {text}")


def _pod(pod: Obj, before: Obj | None) -> Iterator[Cause]:
    spec = pod.get("spec") or {}
    if not spec.get("containers"):
        yield required("spec.containers")
    for index, one in enumerate(spec.get("containers") or []):
        for field in ("name", "image"):
            if not one.get(field):
                yield required(f"spec.containers[{index}].{field}")
    if before is None:
        return
    old = before["spec"]
    if _fixed(spec) != _fixed(old) or any(one not in spec.get("tolerations", []) for one in old["tolerations"]):
        yield Cause("spec", _POD_SPEC_TEXT, "FieldValueForbidden")


def _fixed(spec: Obj) -> Obj:
    """The part of a pod's spec that may not change once it is made."""
    rest = {key: value for key, value in spec.items() if key not in ("activeDeadlineSeconds", "tolerations")}
    for part in ("containers", "initContainers"):
        if part in rest:
            rest[part] = [{key: value for key, value in one.items() if key != "image"} for one in rest[part]]
    return rest


def _rule(spec: Obj) -> Iterator[Cause]:
    taint = spec.get("taint") or {}
    effects = ("NoExecute", "NoSchedule", "None")
    if not taint.get("effect"):
        yield required("spec.taint.effect")
    elif taint["effect"] not in effects:
        known = ", ".join(f'"{one}"' for one in effects)
        text = f'Unsupported value: "{taint["effect"]}": supported values: {known}'
        yield Cause("spec.taint.effect", text, "FieldValueNotSupported")
    yield from qualified_name("spec.taint.key", str(taint.get("key", "")))
    yield from label_value("spec.taint.value", str(taint.get("value", "")))


# --- what is filled in ------------------------------------------------------------------------------------------------


def with_defaults(resource: Resource, obj: Obj, now: str) -> Obj:
    """A new object as the server would store it."""
    if resource.kind == "Node":
        spec = dict(obj["spec"])
        # Admission keeps pods away from a new node until its readiness is known.
        if not any(taint["key"] == NOT_READY_TAINT for taint in spec.get("taints", [])):
            spec["taints"] = [*spec.get("taints", []), {"key": NOT_READY_TAINT, "effect": "NoSchedule"}]
        status = obj["status"]
        if "capacity" in status and "allocatable" not in status:
            status = status | {"allocatable": status["capacity"]}
        return obj | {"spec": spec, "status": status}
    if resource.kind == "Namespace":
        meta = obj["metadata"]
        labels = {**(meta.get("labels") or {}), "kubernetes.io/metadata.name": meta["name"]}
        return obj | {
            "metadata": meta | {"labels": labels},
            "spec": {"finalizers": ["kubernetes"]},
            "status": {"phase": "Active"},
        }
    if resource.kind == "Pod":
        return _pod_defaults(obj, now)
    if resource.kind == "DeviceTaintRule":
        spec = obj.get("spec") or {}
        taint = {"timeAdded": now, **(spec.get("taint") or {})}
        return obj | {"spec": spec | {"taint": taint}, "status": {}}
    return obj


def _pod_defaults(pod: Obj, now: str) -> Obj:
    spec = dict(pod.get("spec") or {})
    account = spec.get("serviceAccountName") or spec.get("serviceAccount") or "default"
    grace = [
        {"key": f"node.kubernetes.io/{why}", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300}
        for why in ("not-ready", "unreachable")
    ]
    defaults: Obj = {
        "restartPolicy": "Always",
        "terminationGracePeriodSeconds": 30,
        "dnsPolicy": "ClusterFirst",
        "securityContext": {},
        "schedulerName": "default-scheduler",
        "priority": 0,
        "enableServiceLinks": True,
        "preemptionPolicy": "PreemptLowerPriority",
    }
    spec = defaults | spec | {"serviceAccountName": account, "serviceAccount": account}
    given = spec.get("tolerations") or []
    spec["tolerations"] = given + [one for one in grace if not any(t.get("key") in (one["key"], None) for t in given)]
    spec["containers"] = [_container_defaults(one) for one in spec.get("containers") or []]
    return pod | {"spec": spec, "status": {"phase": "Pending", "qosClass": "BestEffort"}}


def _container_defaults(container: Obj) -> Obj:
    image = str(container.get("image", ""))
    tag = image.rpartition("/")[2].partition(":")[2]
    defaults: Obj = {
        "terminationMessagePath": "/dev/termination-log",
        "terminationMessagePolicy": "File",
        "imagePullPolicy": "Always" if tag in ("", "latest") else "IfNotPresent",
        "resources": {},
    }
    result = defaults | container
    limits: dict[str, Any] = (result["resources"] or {}).get("limits") or {}
    if limits:
        requests = {**limits, **(result["resources"].get("requests") or {})}
        result["resources"] = result["resources"] | {"requests": requests}
    return result
