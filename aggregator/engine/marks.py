"""The annotations of a node that headway reads: its own memory, and the decisions of people. Pure text in and out.

`headway.dev/state`         {"v":1,"policy":hash,"parts":{uuid or "node":{verdict,since,class,until,doublings}}}
`headway.dev/override`      {"v":1,"parts":{part:{"decision":"out"|"in","reason":text,"until":seconds or null}}}
`headway.dev/forget-before` {"v":1,"parts":{part:seconds}}

`part` is a UUID or "node"; people may also write `gpu-N`. Seconds are since 1970 UTC. For hands at 3 a.m. a bare word
serves too: `out` or `in` as override of the whole node, and a number or an ISO time as forget-before of all its parts.
What cannot be read is no decision: it is shown, and nothing follows from it.
"""

from __future__ import annotations

import datetime
from typing import Annotated, Literal

import msgspec

from aggregator.engine.fleet import NODE
from aggregator.engine.words import FaultClass, Verdict

Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e11)]
#: The API server takes 256 KiB of annotations in all; ours is far below.
MAX_STATE_BYTES = 4096
ALL_PARTS = "*"


class Memory(msgspec.Struct, frozen=True):
    """What was published about one part."""

    verdict: Verdict
    since: Seconds
    fault_class: FaultClass | None = msgspec.field(name="class", default=None)
    until: Seconds | None = None
    doublings: Annotated[int, msgspec.Meta(ge=0, le=64)] = 0


class State(msgspec.Struct, frozen=True):
    """Our own memory on a node. `dropped` = parts left out because of its size."""

    v: int
    policy: str
    parts: dict[str, Memory]
    dropped: int = 0


class Decision(msgspec.Struct, frozen=True, omit_defaults=True):
    """What people decided about a part. `until` None = until they say otherwise."""

    decision: Literal["out", "in"]
    reason: str = ""
    until: Seconds | None = None
    by: str = ""

    def holds(self, now: float) -> bool:
        return self.until is None or now < self.until


class Overrides(msgspec.Struct, frozen=True):
    v: int
    parts: dict[str, Decision]


class Forgets(msgspec.Struct, frozen=True):
    v: int
    parts: dict[str, Seconds]


_state = msgspec.json.Decoder(State)
_overrides = msgspec.json.Decoder(Overrides)
_forgets = msgspec.json.Decoder(Forgets)


def read_state(text: str | None) -> State | None:
    """None where there is none, or none of this version."""
    try:
        state = _state.decode(text or "")
    except (msgspec.DecodeError, RecursionError):
        return None
    return state if state.v == 1 else None


def write_state(policy: str, parts: dict[str, Memory]) -> str | None:
    """At most MAX_STATE_BYTES; the mildest parts are left out first, and counted. None: nothing to remember."""
    if not parts:
        return None
    kept = sorted(parts, key=lambda part: (-parts[part].verdict.rank, part))
    while True:
        body: dict[str, object] = {"v": 1, "policy": policy, "parts": {part: parts[part] for part in sorted(kept)}}
        if len(kept) < len(parts):
            body["dropped"] = len(parts) - len(kept)
        text = msgspec.json.encode(body)
        if len(text) <= MAX_STATE_BYTES or not kept:
            return text.decode()
        kept.pop()


def read_overrides(text: str | None) -> dict[str, Decision]:
    """Part -> decision. Raises ValueError that says what is wrong."""
    if not text or text.strip() in ("", "none"):
        return {}
    if text.strip() in ("out", "in"):
        return {NODE: msgspec.convert({"decision": text.strip()}, Decision)}
    try:
        overrides = _overrides.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"override annotation: {error}") from error
    return overrides.parts


def write_overrides(parts: dict[str, Decision]) -> str | None:
    """None: nothing is decided, the annotation is to go."""
    return msgspec.json.encode(Overrides(1, dict(sorted(parts.items())))).decode() if parts else None


def read_forgets(text: str | None) -> dict[str, float]:
    """Part -> evidence before this time no longer counts. Raises ValueError that says what is wrong."""
    if not text or not text.strip():
        return {}
    try:
        return {ALL_PARTS: msgspec.convert(float(text), Seconds)}
    except ValueError:
        pass
    try:
        stamp = datetime.datetime.fromisoformat(text.strip())
        return {ALL_PARTS: stamp.replace(tzinfo=stamp.tzinfo or datetime.UTC).timestamp()}
    except ValueError:
        pass
    try:
        return dict(_forgets.decode(text).parts)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"forget-before annotation: {error}") from error


def write_forgets(parts: dict[str, float]) -> str | None:
    return msgspec.json.encode(Forgets(1, dict(sorted(parts.items())))).decode() if parts else None
