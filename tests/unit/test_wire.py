"""The wire: golden bytes, a second opinion by msgpack, and what happens to bytes that are no frame."""

from __future__ import annotations

import math
import struct
from typing import Any

import msgpack
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway import wire
from tests.golden.frames import EVENTS, FRAMES, path

NAMES = sorted(FRAMES)
FROM_AGENT = {"hello", "sample", "event", "bye"}
FROM_AGGREGATOR = {"welcome", "ack", "orders", "refused", "bye"}


def plain(value: object) -> Any:
    """A frame as maps, lists and scalars, by its documented shape and without msgspec's own conversion."""
    if isinstance(value, msgspec.Struct):
        config = value.__struct_config__
        out: dict[str, Any] = {"t": config.tag} if config.tag is not None else {}
        defaults = dict(zip(reversed(value.__struct_fields__), reversed(value.__struct_defaults__), strict=False))
        for name in value.__struct_fields__:
            item = getattr(value, name)
            if not (config.omit_defaults and name in defaults and item is defaults[name]):
                out[name] = plain(item)
        return out
    return [plain(item) for item in value] if isinstance(value, tuple) else value


@pytest.mark.parametrize("name", NAMES)
def test_the_golden_bytes_are_what_we_send(name: str) -> None:
    assert wire.encode(FRAMES[name]) == path(name).read_bytes()


@pytest.mark.parametrize("name", NAMES)
def test_the_golden_bytes_are_understood(name: str) -> None:
    assert wire.decode_any(path(name).read_bytes()) == FRAMES[name]


@pytest.mark.parametrize("name", NAMES)
def test_msgpack_reads_the_golden_bytes_as_the_same_map(name: str) -> None:
    assert msgpack.unpackb(path(name).read_bytes()) == plain(FRAMES[name])


@pytest.mark.parametrize("name", NAMES)
def test_what_msgpack_writes_is_understood(name: str) -> None:
    assert wire.decode_any(msgpack.packb(plain(FRAMES[name]))) == FRAMES[name]


def test_each_kind_of_event_has_its_golden_example() -> None:
    kinds = msgspec.inspect.type_info(wire.EventKind)
    assert isinstance(kinds, msgspec.inspect.LiteralType)
    assert [event.kind for event in EVENTS] == list(dict.fromkeys(event.kind for event in EVENTS))
    assert {event.kind for event in EVENTS} == set(kinds.values)


def test_the_values_of_a_sample_are_little_endian_doubles_and_nan_is_not_measured() -> None:
    sample = FRAMES["sample"]
    assert isinstance(sample, wire.Sample)
    lost, power_w = struct.unpack("<2d", sample.data)
    assert lost == 0.0
    assert math.isnan(power_w)


@pytest.mark.parametrize("name", NAMES)
def test_each_side_takes_only_the_frames_of_the_other(name: str) -> None:
    data = path(name).read_bytes()
    for decode, taken in (
        (wire.decode_from_agent, FROM_AGENT),
        (wire.decode_from_aggregator, FROM_AGGREGATOR),
    ):
        if name in taken:
            assert decode(data) == FRAMES[name]
        else:
            with pytest.raises(wire.WireError):
                decode(data)


def with_unknown_fields(value: Any) -> Any:
    if isinstance(value, dict):
        return {"a_field_of_tomorrow": [1, {"x": None}]} | {
            key: with_unknown_fields(item) for key, item in value.items()
        }
    return [with_unknown_fields(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("name", NAMES)
def test_unknown_fields_are_ignored_at_every_depth(name: str) -> None:
    assert wire.decode_any(msgpack.packb(with_unknown_fields(plain(FRAMES[name])))) == FRAMES[name]


def changed(name: str, **fields: object) -> bytes:
    return bytes(msgpack.packb(plain(FRAMES[name]) | fields))


EVENT = plain(EVENTS[6])
JOURNAL_INFO = plain(FRAMES["hello"])["journals"][0]
MALFORMED = {
    "empty": b"",
    "cut short": wire.encode(FRAMES["hello"])[:-1],
    "bytes behind the frame": wire.encode(FRAMES["bye"]) + b"\0",
    "reserved byte": b"\xc1",
    "not a map": msgpack.packb([1, 2]),
    "no tag": msgpack.packb({"code": "x"}),
    "unknown tag": msgpack.packb({"t": "goodbye", "code": "x"}),
    "tag of another type": msgpack.packb({"t": 1, "code": "x"}),
    "field missing": msgpack.packb({"t": "bye"}),
    "field of another type": changed("bye", code=5),
    "text that is not UTF-8": b"\x82\xa1t\xa3bye\xa4code\xa1\xff",
    "binary where text belongs": changed("bye", code=b"x"),
    "nested beyond all measure": changed("bye")[:0]
    + b"\x83\xa1z"
    + b"\x91" * 50_000
    + b"\x01\xa1t\xa3bye\xa4code\xa1x",
    "time that is not a number": changed("sample", sent_s=math.nan),
    "time without end": changed("sample", sent_s=math.inf),
    "time before the boot": changed("sample", observed_s=-1.0),
    "negative sequence": changed("event", events=[EVENT | {"seq": -1}]),
    "sequence beyond 63 bits": changed("event", events=[EVENT | {"seq": 2**63}]),
    "unknown lane": changed("event", lane="fast"),
    "unknown kind": changed("event", events=[EVENT | {"kind": "rumour"}]),
    "more events than a frame may have": changed("event", events=[EVENT] * (wire.MAX_EVENTS_PER_FRAME + 1)),
    "more journals than a hello may have": changed("hello", journals=[JOURNAL_INFO] * (wire.MAX_JOURNALS + 1)),
    "name without end": changed("hello", node="n" * 254),
    "detail without end": changed("event", events=[EVENT | {"detail": "d" * 4097}]),
    "extension type": msgpack.packb({"t": "bye", "code": msgpack.ExtType(5, b"x")}),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_what_is_no_frame_is_a_wire_error_that_says_why(name: str) -> None:
    with pytest.raises(wire.WireError, match="."):
        wire.decode_any(MALFORMED[name])


def refused_or_taken(data: bytes) -> None:
    for decode in (wire.decode_any, wire.decode_from_agent, wire.decode_from_aggregator):
        try:
            frame = decode(data)
        except wire.WireError:
            continue
        assert wire.decode_any(wire.encode(frame)) is not None


@given(st.binary(max_size=300))
def test_arbitrary_bytes_raise_nothing_but_a_wire_error(data: bytes) -> None:
    refused_or_taken(data)


@settings(max_examples=300)
@given(st.sampled_from(NAMES), st.data())
def test_damaged_frames_raise_nothing_but_a_wire_error(name: str, data: st.DataObject) -> None:
    raw = bytearray(path(name).read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    refused_or_taken(bytes(raw))


scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8)
)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
)


@settings(max_examples=300)
@given(st.sampled_from(NAMES), st.data())
def test_frames_with_any_value_in_any_place_raise_nothing_but_a_wire_error(name: str, data: st.DataObject) -> None:
    frame = plain(FRAMES[name])
    at: Any = frame
    while True:
        key = data.draw(st.sampled_from(sorted(at) if isinstance(at, dict) else range(len(at))))
        if isinstance(at[key], dict | list) and at[key] and data.draw(st.booleans()):
            at = at[key]
            continue
        at[key] = data.draw(values)
        break
    refused_or_taken(bytes(msgpack.packb(frame)))
