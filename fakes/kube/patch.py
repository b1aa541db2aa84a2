"""JSON merge patch (RFC 7386), strategic merge patch and JSON patch (RFC 6902), as an API server applies them.

Each takes the stored object and gives a new one; the stored one is never touched.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from fakes.kube.status import ApiStatus, bad_request

#: Lists that strategic merge patch merges, by the field of their entries that identifies one. All others are replaced
#: as a whole; `taints` and `tolerations` among them (`listType=atomic`).
MERGE_KEYS: Mapping[str, str] = {
    "conditions": "type",
    "addresses": "type",
    "ownerReferences": "uid",
    "containers": "name",
    "initContainers": "name",
    "ephemeralContainers": "name",
    "env": "name",
    "volumes": "name",
    "volumeMounts": "mountPath",
    "secrets": "name",
    "imagePullSecrets": "name",
    "hostIPs": "ip",
    "podIPs": "ip",
}
MERGED_PRIMITIVES = frozenset({"finalizers", "podCIDRs"})
DIRECTIVE = "$patch"


def merge_patch(target: Any, patch: Any) -> Any:
    """RFC 7386."""
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    result = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merge_patch(result.get(key), value)
    return result


def _failed(message: str) -> ApiStatus:
    return ApiStatus(500, message, reason="")


def strategic_merge_patch(target: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """Raises ApiStatus for a directive or a list entry that makes no sense."""
    directive = patch.get(DIRECTIVE)
    if directive == "replace":
        return {key: copy.deepcopy(value) for key, value in patch.items() if key != DIRECTIVE}
    if directive == "delete":
        return {}
    if directive not in (None, "merge"):
        raise _failed(f"unknown patch type: {directive} in map: {dict(patch)}")
    result = dict(target)
    if (keep := patch.get("$retainKeys")) is not None:
        result = {key: value for key, value in result.items() if key in keep}
    for key, value in patch.items():
        if key.startswith("$deleteFromPrimitiveList/"):
            name = key.split("/", 1)[1]
            result[name] = [one for one in result.get(name) or [] if one not in value]
        elif key.startswith("$"):
            continue  # $setElementOrder only says how to order what is merged
        elif value is None:
            result.pop(key, None)
        elif isinstance(value, dict) and isinstance(result.get(key, {}), dict):
            result[key] = strategic_merge_patch(result.get(key) or {}, value)
        elif isinstance(value, list) and key in MERGE_KEYS:
            result[key] = _merge_list(result.get(key) or [], value, MERGE_KEYS[key])
        elif isinstance(value, list) and key in MERGED_PRIMITIVES:
            present = result.get(key) or []
            result[key] = [*present, *(one for one in value if one not in present)]
        else:
            result[key] = copy.deepcopy(value)
    return result


def _merge_list(target: Sequence[dict[str, Any]], patch: Sequence[Any], merge_key: str) -> list[dict[str, Any]]:
    replace = any(isinstance(one, dict) and one.get(DIRECTIVE) == "replace" for one in patch)
    entries: list[dict[str, Any]] = []
    for one in patch:
        if not isinstance(one, dict):
            raise _failed(f"expected a map in a list merged by {merge_key}, got {one}")
        if one.get(DIRECTIVE) == "replace" and merge_key not in one:
            continue
        if merge_key not in one:
            raise _failed(f"map: {one} does not contain declared merge key: {merge_key}")
        entries.append(one)
    if replace:
        return [{key: value for key, value in one.items() if key != DIRECTIVE} for one in entries]
    gone = {one[merge_key] for one in entries if one.get(DIRECTIVE) == "delete"}
    present = {one.get(merge_key): one for one in target}
    patched = {
        one[merge_key]: strategic_merge_patch(present.get(one[merge_key], {}), one)
        for one in entries
        if one[merge_key] not in gone
    }
    untouched = [one for one in target if one.get(merge_key) not in patched and one.get(merge_key) not in gone]
    return _in_order(untouched, list(patched.values()), [one.get(merge_key) for one in target], merge_key)


def _in_order(
    untouched: list[dict[str, Any]], patched: list[dict[str, Any]], before: list[Any], merge_key: str
) -> list[dict[str, Any]]:
    """Patched entries in the patch's order, the others between them by the old order: new ones come first."""
    result: list[dict[str, Any]] = []
    left, right = list(untouched), list(patched)
    while left and right:
        a, b = left[0][merge_key], right[0][merge_key]
        earlier = b in before and before.index(a) < before.index(b)
        result.append(left.pop(0) if earlier else right.pop(0))
    return result + left + right


def _rejected() -> ApiStatus:
    return ApiStatus(422, "the server rejected our request due to an error in our request", details={})


def _pointer(path: Any) -> list[str]:
    if not isinstance(path, str) or (path and not path.startswith("/")):
        raise _rejected()
    return [part.replace("~1", "/").replace("~0", "~") for part in path.split("/")[1:]]


def _step(container: Any, part: str) -> Any:
    try:
        return container[int(part)] if isinstance(container, list) else container[part]
    except (KeyError, IndexError, ValueError, TypeError):
        raise _rejected() from None


def json_patch(target: dict[str, Any], operations: Any) -> Any:
    """Raises ApiStatus: 400 for what is no patch, 422 for an operation that cannot be done or a test that fails."""
    if not isinstance(operations, list) or not all(isinstance(one, dict) for one in operations):
        raise bad_request("error decoding patch: json: cannot unmarshal object into Go value of type []jsonPatchOp")
    root: dict[str, Any] = {"": copy.deepcopy(target)}
    for operation in operations:
        _operate(root, operation)
    return root[""]


def _operate(root: dict[str, Any], operation: Mapping[str, Any]) -> None:
    *parents, last = ["", *_pointer(operation.get("path"))]
    container: Any = root
    for part in parents:
        container = _step(container, part)
    match operation.get("op"):
        case "test":
            if _read(container, last) != operation.get("value"):
                raise _rejected()
        case "add":
            _add(container, last, operation.get("value"))
        case "replace":
            # The server's library accepts a key that is not there; a list index has to be.
            if isinstance(container, list):
                _step(container, last)
                container[int(last)] = operation.get("value")
            else:
                _add(container, last, operation.get("value"))
        case "remove":
            _step(container, last)
            del container[int(last) if isinstance(container, list) else last]
        case "copy" | "move" as kind:
            *source_parents, source_last = ["", *_pointer(operation.get("from"))]
            source: Any = root
            for part in source_parents:
                source = _step(source, part)
            value = copy.deepcopy(_step(source, source_last))
            if kind == "move":
                del source[int(source_last) if isinstance(source, list) else source_last]
            _add(container, last, value)
        case _:
            raise _rejected()


def _read(container: Any, part: str) -> Any:
    return container.get(part) if isinstance(container, dict) else _step(container, part)


def _add(container: Any, part: str, value: Any) -> None:
    if isinstance(container, dict):
        container[part] = value
        return
    if not isinstance(container, list):
        raise _rejected()
    if part == "-":
        container.append(value)
        return
    if not part.isdigit() or int(part) > len(container):
        raise _rejected()
    container.insert(int(part), value)
