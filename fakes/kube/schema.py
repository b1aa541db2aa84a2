"""The known fields of the kinds that headway writes, and their types: an API server drops fields that it does not
know, drops empty optional ones, and refuses values of the wrong type. Kinds and fields not described are kept as sent.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from fakes.kube.status import Obj

_DAY_AND_TIME, _ZONE = r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}", r"(Z|[+-]\d{2}:\d{2})"
_STAMP = re.compile(rf"{_DAY_AND_TIME}(\.\d+)?{_ZONE}")
_MICRO_STAMP = re.compile(rf"{_DAY_AND_TIME}\.\d{{6}}{_ZONE}")


class WrongType(Exception):
    """A value that cannot be decoded; the text names field and type."""


class UnknownField(Exception):
    """Strict field validation met a field that the kind does not have."""


@dataclass(frozen=True)
class Scalar:
    """`name` as Go's decoder says it: string, int, bool, time or microtime."""

    name: str


@dataclass(frozen=True)
class ListOf:
    item: Any


@dataclass(frozen=True)
class MapOf:
    item: Any


@dataclass(frozen=True)
class Struct:
    """`always` holds fields that the server sends even when empty, with what it sends."""

    fields: Mapping[str, Any]
    always: Mapping[str, Any] = field(default_factory=dict)


STR, INT, BOOL, TIME, MICROTIME = (Scalar(name) for name in ("string", "int", "bool", "time", "microtime"))
# Go's pointers: "", 0 and false are values of their own.
POINTER_STR, POINTER_INT, POINTER_BOOL = (Scalar(name) for name in ("*string", "*int", "*bool"))
QUANTITY = Scalar("quantity")
ANY = None

REFERENCE = Struct(
    dict.fromkeys(("kind", "namespace", "name", "uid", "apiVersion", "resourceVersion", "fieldPath"), STR)
)
OWNER = Struct(
    {
        "apiVersion": STR,
        "kind": STR,
        "name": STR,
        "uid": STR,
        "controller": POINTER_BOOL,
        "blockOwnerDeletion": POINTER_BOOL,
    },
    {"apiVersion": "", "kind": "", "name": "", "uid": ""},
)
META = Struct(
    {
        **dict.fromkeys(("name", "generateName", "namespace", "selfLink", "uid", "resourceVersion"), STR),
        "generation": INT,
        "creationTimestamp": TIME,
        "deletionTimestamp": TIME,
        "deletionGracePeriodSeconds": POINTER_INT,
        "labels": MapOf(STR),
        "annotations": MapOf(STR),
        "ownerReferences": ListOf(OWNER),
        "finalizers": ListOf(STR),
    }
)
TAINT = Struct(
    {"key": STR, "value": STR, "effect": STR, "timeAdded": TIME},
    {"key": "", "effect": ""},
)
NODE_CONDITION = Struct(
    {
        **dict.fromkeys(("type", "status", "reason", "message"), STR),
        "lastHeartbeatTime": TIME,
        "lastTransitionTime": TIME,
    },
    {"type": "", "status": "", "lastHeartbeatTime": None, "lastTransitionTime": None},
)
POD_CONDITION = Struct(
    {**NODE_CONDITION.fields, "lastProbeTime": TIME, "observedGeneration": INT} | {"lastHeartbeatTime": ANY},
    {"type": "", "status": "", "lastProbeTime": None, "lastTransitionTime": None},
)
_INFO = (
    *("machineID", "systemUUID", "bootID", "kernelVersion", "osImage", "containerRuntimeVersion"),
    *("kubeletVersion", "kubeProxyVersion", "operatingSystem", "architecture"),
)
NODE = Struct(
    {
        "spec": Struct(
            {
                **dict.fromkeys(("podCIDR", "providerID", "externalID"), STR),
                "podCIDRs": ListOf(STR),
                "unschedulable": BOOL,
                "taints": ListOf(TAINT),
                "configSource": ANY,
            }
        ),
        "status": Struct(
            {
                "capacity": MapOf(QUANTITY),
                "allocatable": MapOf(QUANTITY),
                "phase": STR,
                "conditions": ListOf(NODE_CONDITION),
                "addresses": ListOf(Struct({"type": STR, "address": STR})),
                "daemonEndpoints": ANY,
                "nodeInfo": Struct(dict.fromkeys(_INFO, STR) | {"swap": ANY}, dict.fromkeys(_INFO, "")),
                **dict.fromkeys(("images", "volumesInUse", "volumesAttached", "config", "runtimeHandlers"), ANY),
                **dict.fromkeys(("features", "declaredFeatures"), ANY),
            },
            {"daemonEndpoints": {"kubeletEndpoint": {"Port": 0}}, "nodeInfo": dict.fromkeys(_INFO, "")},
        ),
    },
    {"spec": {}, "status": {"daemonEndpoints": {"kubeletEndpoint": {"Port": 0}}, "nodeInfo": dict.fromkeys(_INFO, "")}},
)
EVENT = Struct(
    {
        "involvedObject": REFERENCE,
        "related": REFERENCE,
        "source": Struct({"component": STR, "host": STR}),
        "series": Struct({"count": INT, "lastObservedTime": MICROTIME}),
        **dict.fromkeys(("reason", "message", "type", "action", "reportingComponent", "reportingInstance"), STR),
        "firstTimestamp": TIME,
        "lastTimestamp": TIME,
        "eventTime": MICROTIME,
        "count": INT,
    },
    {
        "involvedObject": {},
        "source": {},
        "firstTimestamp": None,
        "lastTimestamp": None,
        "eventTime": None,
        "reportingComponent": "",
        "reportingInstance": "",
    },
)
LEASE = Struct(
    {
        "spec": Struct(
            {
                "holderIdentity": POINTER_STR,
                "preferredHolder": POINTER_STR,
                "strategy": POINTER_STR,
                "leaseDurationSeconds": POINTER_INT,
                "leaseTransitions": POINTER_INT,
                "acquireTime": MICROTIME,
                "renewTime": MICROTIME,
            }
        )
    },
    {"spec": {}},
)
CONFIGMAP = Struct({"data": MapOf(STR), "binaryData": MapOf(STR), "immutable": POINTER_BOOL})
ACCOUNT = Struct({"secrets": ANY, "imagePullSecrets": ANY, "automountServiceAccountToken": POINTER_BOOL})
POD = Struct({"spec": ANY, "status": Struct({"conditions": ListOf(POD_CONDITION)})}, {"spec": {}, "status": {}})
KINDS: Mapping[str, Struct] = {
    "Node": NODE,
    "Event": EVENT,
    "Lease": LEASE,
    "ConfigMap": CONFIGMAP,
    "ServiceAccount": ACCOUNT,
}


def decoded(kind: str, body: Obj, strict: bool) -> Obj:
    """The object as the server understands it. Raises WrongType and, where `strict`, UnknownField."""
    metadata = _value(META, body.get("metadata") or {}, f"{kind}.metadata", strict)
    rest = {key: value for key, value in body.items() if key not in ("apiVersion", "kind", "metadata")}
    known = KINDS.get(kind)
    if known is not None:
        rest = _value(known, rest, kind, strict)
    elif kind == "Pod" and isinstance(rest.get("status"), dict) and "conditions" in rest["status"]:
        conditions = _value(ListOf(POD_CONDITION), rest["status"]["conditions"], "Pod.status.conditions", strict)
        rest = rest | {"status": {**rest["status"], "conditions": conditions}}
        if not conditions:
            del rest["status"]["conditions"]
    return {"apiVersion": body.get("apiVersion"), "kind": kind, "metadata": metadata, **rest}


def _value(want: Any, value: Any, where: str, strict: bool) -> Any:
    if want is ANY:
        return value
    if isinstance(want, Scalar):
        return _scalar(want.name, value, where)
    if isinstance(want, ListOf):
        if not isinstance(value, list):
            raise _wrong(value, where, "array")
        return [_value(want.item, one, where, strict) for one in value]
    if not isinstance(value, dict):
        raise _wrong(value, where, "object")
    if isinstance(want, MapOf):
        return {key: _value(want.item, one, f"{where}.{key}", strict) for key, one in value.items()}
    return _struct(want, value, where, strict)


def _struct(want: Struct, value: Obj, where: str, strict: bool) -> Obj:
    result: Obj = {}
    for key, one in value.items():
        if key not in want.fields:
            if strict:
                raise UnknownField(f'unknown field "{(where + "." + key).split(".", 1)[1]}"')
            continue
        if one is None:
            continue
        decoded_one = _value(want.fields[key], one, f"{where}.{key}", strict)
        if _is_empty(want.fields[key], decoded_one):
            continue
        result[key] = decoded_one
    return {**want.always, **result} if want.always else result


def _is_empty(want: Any, value: Any) -> bool:
    """Whether Go's `omitempty` leaves the field out."""
    if isinstance(want, ListOf | MapOf):
        return not value
    if isinstance(want, Scalar) and not want.name.startswith("*"):
        return value in ("", 0, False, None)
    return False


def _scalar(name: str, value: Any, where: str) -> Any:
    kind = name.lstrip("*")
    if value is None:
        return "" if kind == "string" else None
    if kind == "quantity":
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise _wrong(value, where, "resource.Quantity")
        return str(value)
    if kind in ("time", "microtime"):
        return _time(value, kind, where)
    types: Mapping[str, type] = {"string": str, "int": int, "bool": bool}
    if not isinstance(value, types[kind]) or (kind == "int" and isinstance(value, bool)):
        raise _wrong(value, where, kind)
    return value


def _time(value: Any, kind: str, where: str) -> str:
    form = _STAMP if kind == "time" else _MICRO_STAMP
    if not isinstance(value, str) or not form.fullmatch(value):
        layout = "2006-01-02T15:04:05Z07:00" if kind == "time" else "2006-01-02T15:04:05.000000Z07:00"
        raise WrongType(f'parsing time "{value}" as "{layout}": cannot parse "{value}" as "2006"')
    try:
        moment = datetime.fromisoformat(value).astimezone(UTC)
    except ValueError as error:
        raise WrongType(f'parsing time "{value}": {error}') from None
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ" if kind == "time" else "%Y-%m-%dT%H:%M:%S.%fZ")


def _wrong(value: Any, where: str, want: str) -> WrongType:
    words: Mapping[type, str] = {str: "string", bool: "bool", int: "number", float: "number", list: "array"}
    got = words.get(type(value), "object")
    return WrongType(f"json: cannot unmarshal {got} into Go struct field {where} of type {want}")
