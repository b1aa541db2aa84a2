"""Bodies in protobuf: since 1.32 `kubectl create configmap` and `create namespace` send nothing else.

Only these two kinds, and of a Namespace only its metadata; answers are JSON, which kubectl takes as well. Field numbers
are those of generated.proto in k8s.io/api/core/v1, and in k8s.io/apimachinery pkg/apis/meta/v1 and pkg/runtime.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from typing import Any

from fakes.kube.status import Obj

MEDIA_TYPE = "application/vnd.kubernetes.protobuf"
MAGIC = b"k8s\x00"
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MAX_VARINT_BITS = 64
_META_TEXTS = {1: "name", 2: "generateName", 3: "namespace", 5: "uid", 6: "resourceVersion"}
_META_MAPS = {11: "labels", 12: "annotations"}

Fields = Iterator[tuple[int, Any]]


class NotProtobuf(Exception):
    """Bytes that are no message, or none of a kind that is read here; the text says which."""


def decoded(raw: bytes) -> Obj:
    """The object as its JSON would be. Raises NotProtobuf."""
    if not raw.startswith(MAGIC):
        raise NotProtobuf("provided data does not appear to be a protobuf message, expected prefix [107 56 115 0]")
    envelope = dict(_fields(raw[len(MAGIC) :]))
    head = dict(_fields(_bytes(envelope.get(1, b""))))
    version, kind = _text(head.get(1, b"")), _text(head.get(2, b""))
    read = _KINDS.get((version, kind))
    if read is None:
        raise NotProtobuf(f'{kind or "an object"} in version "{version}" is not read as protobuf here')
    return {"apiVersion": version, "kind": kind, **read(_fields(_bytes(envelope.get(2, b""))))}


def _configmap(fields: Fields) -> Obj:
    obj: Obj = {"metadata": {}}
    for number, value in fields:
        if number == 1:
            obj["metadata"] = _metadata(_fields(_bytes(value)))
        elif number in (2, 3):
            key, data = _entry(value)
            part = obj.setdefault("data" if number == 2 else "binaryData", {})
            part[key] = _text(data) if number == 2 else base64.b64encode(data).decode()
        elif number == 4:
            obj["immutable"] = bool(value)
    return obj


def _namespace(fields: Fields) -> Obj:
    return {"metadata": _metadata(_fields(_bytes(dict(fields).get(1, b""))))}


_KINDS: dict[tuple[str, str], Callable[[Fields], Obj]] = {
    ("v1", "ConfigMap"): _configmap,
    ("v1", "Namespace"): _namespace,
}


def _metadata(fields: Fields) -> Obj:
    meta: Obj = {}
    for number, value in fields:
        if number in _META_TEXTS and value:
            meta[_META_TEXTS[number]] = _text(value)
        elif number in _META_MAPS:
            key, text = _entry(value)
            meta.setdefault(_META_MAPS[number], {})[key] = _text(text)
    return meta


def _entry(value: Any) -> tuple[str, bytes]:
    """One entry of a map."""
    entry = dict(_fields(_bytes(value)))
    return _text(entry.get(1, b"")), _bytes(entry.get(2, b""))


def _fields(raw: bytes) -> Fields:
    """Number and value of each field; a value is an int, or bytes."""
    at = 0
    while at < len(raw):
        tag, at = _varint(raw, at)
        wire = tag & 7
        if wire == _VARINT:
            value, at = _varint(raw, at)
            yield tag >> 3, value
            continue
        if wire == _BYTES:
            size, at = _varint(raw, at)
        elif wire in (_FIXED32, _FIXED64):
            size = 4 if wire == _FIXED32 else 8
        else:
            raise NotProtobuf(f"proto: illegal wireType {wire}")
        if at + size > len(raw):
            raise NotProtobuf("unexpected EOF")
        yield tag >> 3, raw[at : at + size]
        at += size


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    """The number at this place, and the place after it."""
    value = 0
    for shift in range(0, _MAX_VARINT_BITS, 7):
        if at >= len(raw):
            raise NotProtobuf("unexpected EOF")
        byte, at = raw[at], at + 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise NotProtobuf("proto: integer overflow")


def _bytes(value: Any) -> bytes:
    if not isinstance(value, bytes):
        raise NotProtobuf("proto: wrong wireType")
    return value


def _text(value: Any) -> str:
    try:
        return _bytes(value).decode()
    except UnicodeDecodeError:
        raise NotProtobuf("proto: a string that is not UTF-8") from None
