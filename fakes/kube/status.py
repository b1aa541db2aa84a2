"""Errors as an API server words them: `metav1.Status` bodies, with the codes and reasons that clients act on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Obj = dict[str, Any]

REASONS: Mapping[int, str] = {
    400: "BadRequest",
    401: "Unauthorized",
    403: "Forbidden",
    404: "NotFound",
    405: "MethodNotAllowed",
    409: "Conflict",
    410: "Expired",
    415: "UnsupportedMediaType",
    422: "Invalid",
    429: "TooManyRequests",
    500: "InternalError",
    504: "Timeout",
}
MODIFIED = "the object has been modified; please apply your changes to the latest version and try again"


class ApiStatus(Exception):
    """A refused request. `reason` defaults to the one that goes with the code."""

    def __init__(
        self,
        code: int,
        message: str,
        *,
        reason: str | None = None,
        details: Obj | None = None,
        headers: Mapping[str, str] | None = None,
        list_meta: Obj | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.reason = REASONS.get(code, "") if reason is None else reason
        self.details = details
        self.headers = dict(headers or {})
        self.list_meta = list_meta or {}

    def body(self) -> Obj:
        status: Obj = {"kind": "Status", "apiVersion": "v1", "metadata": self.list_meta, "status": "Failure"}
        status["message"] = self.message
        if self.reason:
            status["reason"] = self.reason
        if self.details is not None:
            status["details"] = self.details
        return status | {"code": self.code}


@dataclass(frozen=True)
class Cause:
    """One field that is wrong: `reason` is FieldValueInvalid, FieldValueRequired and the like."""

    field: str
    message: str
    reason: str = "FieldValueInvalid"

    def as_object(self) -> Obj:
        return {"reason": self.reason, "message": self.message, "field": self.field}


def invalid_value(field: str, value: str, why: str) -> Cause:
    return Cause(field, f'Invalid value: "{value}": {why}')


def required(field: str, why: str = "") -> Cause:
    return Cause(field, f"Required value: {why}" if why else "Required value", "FieldValueRequired")


def success(details: Obj | None = None, code: int | None = None) -> Obj:
    """`code` is sent by create requests only, as the real server does."""
    status: Obj = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}
    if details is not None:
        status["details"] = details
    return status if code is None else status | {"code": code}


def _details(group: str, name: str, kind: str) -> Obj:
    details = {"name": name, "group": group, "kind": kind}
    return {key: value for key, value in details.items() if value}


def qualified(group: str, word: str) -> str:
    return f"{word}.{group}" if group else word


def bad_request(message: str) -> ApiStatus:
    return ApiStatus(400, message)


def not_found(group: str, plural: str, name: str) -> ApiStatus:
    text = f'{qualified(group, plural)} "{name}" not found'
    return ApiStatus(404, text, details=_details(group, name, plural))


def no_such_path() -> ApiStatus:
    return ApiStatus(404, "the server could not find the requested resource", details={})


def already_exists(group: str, plural: str, name: str) -> ApiStatus:
    text = f'{qualified(group, plural)} "{name}" already exists'
    return ApiStatus(409, text, reason="AlreadyExists", details=_details(group, name, plural))


def conflict(group: str, plural: str, name: str, why: str = MODIFIED) -> ApiStatus:
    text = f'Operation cannot be fulfilled on {qualified(group, plural)} "{name}": {why}'
    return ApiStatus(409, text, details=_details(group, name, plural))


def forbidden(group: str, plural: str, name: str, why: str, causes: Sequence[Obj] = ()) -> ApiStatus:
    details = _details(group, name, plural)
    if causes:
        details["causes"] = list(causes)
    return ApiStatus(403, f'{qualified(group, plural)} "{name}" is forbidden: {why}', details=details)


def invalid(group: str, kind: str, name: str, causes: Sequence[Cause]) -> ApiStatus:
    """422 with the fields that are wrong."""
    words = [f"{cause.field}: {cause.message}" for cause in causes]
    what = words[0] if len(words) == 1 else f"[{', '.join(words)}]"
    details = _details(group, name, kind) | {"causes": [cause.as_object() for cause in causes]}
    return ApiStatus(422, f'{qualified(group, kind)} "{name}" is invalid: {what}', details=details)


def method_not_allowed() -> ApiStatus:
    return ApiStatus(405, "the server does not allow this method on the requested resource", details={})


def unsupported_media_type() -> ApiStatus:
    return ApiStatus(415, "415: Unsupported Media Type", details={})


def unauthorized() -> ApiStatus:
    return ApiStatus(401, "Unauthorized")


def expired(message: str, list_meta: Obj | None = None) -> ApiStatus:
    return ApiStatus(410, message, list_meta=list_meta)
