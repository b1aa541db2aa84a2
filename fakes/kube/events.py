"""Events of group events.k8s.io are those of the core group under other field names."""

from __future__ import annotations

from collections.abc import Mapping

from fakes.kube.status import Obj

_NEW_NAMES: Mapping[str, str] = {
    "involvedObject": "regarding",
    "message": "note",
    "reportingComponent": "reportingController",
    "source": "deprecatedSource",
    "firstTimestamp": "deprecatedFirstTimestamp",
    "lastTimestamp": "deprecatedLastTimestamp",
    "count": "deprecatedCount",
}
_CORE_NAMES = {new: core for core, new in _NEW_NAMES.items()}


def as_new(event: Obj) -> Obj:
    renamed = {_NEW_NAMES.get(key, key): value for key, value in event.items() if value != ""}
    return renamed | {"apiVersion": "events.k8s.io/v1"}


def as_core(event: Obj) -> Obj:
    return {_CORE_NAMES.get(key, key): value for key, value in event.items()} | {"apiVersion": "v1"}
