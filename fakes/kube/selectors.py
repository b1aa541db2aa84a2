"""Label and field selectors of lists and watches."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fakes.kube.resources import Resource
from fakes.kube.status import Obj, bad_request

Predicate = Callable[[Obj], bool]

_SET = re.compile(r"(?P<key>[^\s,()!=]+)\s+(?P<op>in|notin)\s*\(\s*(?P<values>[^()]*)\)")
_EQUALITY = re.compile(r"(?P<key>[^\s,()!=]+)\s*(?P<op>==|=|!=)\s*(?P<value>[^\s,()!=]*)")
_EXISTS = re.compile(r"(?P<no>!?)\s*(?P<key>[^\s,()!=]+)")


@dataclass(frozen=True)
class _Requirement:
    key: str
    wanted: frozenset[str] | None  # None = any value
    negated: bool

    def holds(self, labels: Mapping[str, str]) -> bool:
        value = labels.get(self.key)
        found = value is not None if self.wanted is None else value in self.wanted
        return found != self.negated


def _requirement(match: re.Match[str]) -> _Requirement:
    parts = match.groupdict()
    if "values" in parts:
        values = frozenset(value.strip() for value in parts["values"].split(","))
        return _Requirement(parts["key"], values, parts["op"] == "notin")
    if "value" in parts:
        return _Requirement(parts["key"], frozenset([parts["value"]]), parts["op"] == "!=")
    return _Requirement(parts["key"], None, bool(parts["no"]))


def labels_match(text: str) -> Predicate:
    """Raises ApiStatus 400 for a selector that cannot be parsed."""
    requirements: list[_Requirement] = []
    rest = text.strip()
    while rest:
        match = next((found for form in (_SET, _EQUALITY, _EXISTS) if (found := form.match(rest))), None)
        after = rest[match.end() :].lstrip() if match else ""
        if match is None or (after and not after.startswith(",")):
            raise bad_request(f"unable to parse requirement: found '{after or rest}', expected: ',' or identifier")
        requirements.append(_requirement(match))
        rest = after[1:].lstrip()
    return lambda obj: all(one.holds(obj["metadata"].get("labels") or {}) for one in requirements)


def field_value(obj: Obj, path: str) -> str:
    """The value a field selector sees; "" for a field that is not there."""
    if path == "source" and obj.get("kind") == "Event":
        return str((obj.get("source") or {}).get("component") or obj.get("reportingComponent") or "")
    value: Any = obj
    for part in path.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    if isinstance(value, bool):
        return "true" if value else "false"
    return "" if value is None else str(value)


def fields_match(text: str, resource: Resource) -> Predicate:
    """Raises ApiStatus 400 for a field that this kind cannot be selected by."""
    allowed = {"metadata.name", *resource.selectable, *(["metadata.namespace"] if resource.namespaced else [])}
    wanted: list[tuple[str, str, bool]] = []
    for term in filter(None, text.split(",")):
        match = re.fullmatch(r"\s*([^=!\s]+)\s*(==|=|!=)\s*(.*?)\s*", term)
        if not match:
            raise bad_request(f"invalid selector: '{text}'; can't understand '{term}'")
        if match[1] not in allowed:
            raise bad_request(f"field label not supported: {match[1]}")
        wanted.append((match[1], match[3], match[2] == "!="))
    return lambda obj: all((field_value(obj, path) == value) != negated for path, value, negated in wanted)


def matcher(resource: Resource, query: Mapping[str, str], namespace: str | None) -> Predicate:
    """What a request's labelSelector, fieldSelector and namespace let through."""
    by_label = labels_match(query.get("labelSelector", ""))
    by_field = fields_match(query.get("fieldSelector", ""), resource)

    def matches(obj: Obj) -> bool:
        in_namespace = namespace is None or obj["metadata"].get("namespace") == namespace
        return in_namespace and by_label(obj) and by_field(obj)

    return matches
