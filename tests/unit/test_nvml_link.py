"""Frames between the agent and its NVML process."""

from __future__ import annotations

import asyncio

import pytest

from agent.nvml_link import (
    MAX_FRAME_BYTES,
    RECOVERY_ACTIONS,
    Hello,
    LinkError,
    NvmlEvent,
    Ping,
    pack,
    read_from_client,
    recovery_action_name,
    recovery_action_number,
)
from headway.wire import GPU_COLUMNS


@pytest.mark.parametrize("number", [*range(len(RECOVERY_ACTIONS)), 8, 4711])
def test_names_and_numbers_of_recovery_actions(number: int) -> None:
    assert recovery_action_number(recovery_action_name(number)) == number


def test_an_unknown_recovery_action_is_never_none() -> None:
    assert recovery_action_name(8) == "unknown_8"
    with pytest.raises(ValueError, match="nonsense"):
        recovery_action_number("nonsense")


def test_readings_are_named_as_the_columns_of_the_wire() -> None:
    from agent.nvml_link import GpuReading

    made_by_the_agent = {"epoch_driver_load", "epoch_reset_count"}
    assert set(GPU_COLUMNS) - made_by_the_agent <= set(GpuReading.__struct_fields__)


async def read(*pieces: bytes) -> list[Hello | Ping]:
    reader = asyncio.StreamReader()
    for piece in pieces:
        reader.feed_data(piece)
    reader.feed_eof()
    frames = []
    while (frame := await read_from_client(reader)) is not None:
        frames.append(frame)
    return frames


async def test_frames_survive_any_cut_of_the_stream() -> None:
    stream = pack(Hello(1, "abc", 7)) + pack(Ping(3))
    assert await read(*(bytes([byte]) for byte in stream)) == [Hello(1, "abc", 7), Ping(3)]
    assert await read() == []


async def test_a_stream_that_ends_inside_a_frame_is_said_so() -> None:
    with pytest.raises(LinkError, match="inside a frame"):
        await read(pack(Ping(1))[:-1])


@pytest.mark.parametrize(
    "bad",
    [
        (MAX_FRAME_BYTES + 1).to_bytes(4, "little"),
        pack(NvmlEvent("p", 1, 0.0, "u", "0000:1b:00.0", "xid", 79)),
        b"\x01\x00\x00\x00\xc1",
        b"\x00\x00\x00\x00",
    ],
    ids=["too long", "frame of the other side", "no MessagePack", "empty"],
)
async def test_what_is_no_frame_of_a_client_is_refused(bad: bytes) -> None:
    with pytest.raises(LinkError):
        await read(bad)


def test_a_frame_above_the_limit_is_not_sent() -> None:
    with pytest.raises(LinkError, match="at most"):
        pack(NvmlEvent("p" * MAX_FRAME_BYTES, 1, 0.0, "u", "0000:1b:00.0", "xid", 79))
