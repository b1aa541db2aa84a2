"""`headway decode FILE`: print what a file of the wire or of a journal holds, whatever version wrote it.

Decoded by `msgpack` without a schema, not by the structs that wrote it: so it shows fields that this version does not
know, and is an independent second opinion on the bytes.
"""

from __future__ import annotations

import argparse
import json
import math
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack

from agent.journal_files import frames as journal_frames
from headway.wire import MAX_MESSAGE_BYTES, WireError, decode_any

HELP = "print any frame of the wire, a journal or a recording"

KINDS = {b"H": "header", b"E": "event", b"N": "note"}


class NotReadable(Exception):
    """What is wrong with the file, where."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file", metavar="FILE", help="one or more wire frames, a journal segment (*.seg), or - for standard input"
    )
    parser.add_argument("-o", "--output", choices=("text", "json"), default="text", help="default: %(default)s")
    parser.epilog = "One object per frame. Exit code 1 where bytes at the end are no whole frame, 2 where none is."


def run(args: argparse.Namespace) -> int:
    try:
        data = sys.stdin.buffer.read() if args.file == "-" else Path(args.file).read_bytes()
    except OSError as error:
        print(f"headway decode: {args.file}: {error.strerror}", file=sys.stderr)
        return 2
    shown = 0
    try:
        for item in read(data):
            shown += 1
            if args.output == "json":
                print(json.dumps(item, ensure_ascii=False))
            else:
                print("\n".join(text(item)), end="\n\n")
    except NotReadable as error:
        print(f"headway decode: {args.file}: {error}", file=sys.stderr)
        return 1 if shown else 2
    return 0


def read(data: bytes) -> Iterator[dict[str, Any]]:
    """Frames of a wire capture or records of a journal segment. Raises NotReadable at the first that is neither."""
    if not data:
        raise NotReadable("the file is empty")
    records = list(journal_frames(data))
    if records:
        for kind, payload, _ in records:
            yield {"record": KINDS[kind], **plain(msgpack.unpackb(payload, strict_map_key=False))}
        if (end := records[-1][2]) < len(data):
            raise NotReadable(f"after byte {end} no whole journal record follows ({len(data) - end} bytes left)")
        return
    yield from wire_frames(data)


def wire_frames(data: bytes) -> Iterator[dict[str, Any]]:
    unpacker = msgpack.Unpacker(strict_map_key=False, max_buffer_size=max(len(data), MAX_MESSAGE_BYTES))
    unpacker.feed(data)
    start = 0
    while start < len(data):
        try:
            item = unpacker.unpack()
        except (msgpack.exceptions.UnpackException, ValueError) as error:
            why = "cut off" if isinstance(error, msgpack.exceptions.OutOfData) else str(error) or "not MessagePack"
            raise NotReadable(f"at byte {start} no frame begins: {why}") from error
        if not isinstance(item, dict) or "t" not in item:
            raise NotReadable(f"at byte {start} there is MessagePack, but no frame (a map with a tag 't')")
        end = unpacker.tell()
        yield plain(item) | {"valid": _valid(data[start:end])}
        start = end


def _valid(frame: bytes) -> bool | str:
    """True, or what the aggregator would answer."""
    try:
        decode_any(frame)
    except WireError as error:
        return str(error)
    return True


def plain(item: Any) -> Any:
    """JSON has no bytes: a sample's data is shown as its numbers, other bytes as hexadecimal."""
    if isinstance(item, dict):
        return {str(key): plain(value) for key, value in item.items()}
    if isinstance(item, list | tuple):
        return [plain(value) for value in item]
    if isinstance(item, bytes):
        if item and len(item) % 8 == 0:
            numbers = struct.unpack(f"<{len(item) // 8}d", item)
            return [None if math.isnan(number) else number for number in numbers]
        return item.hex()
    return item


def text(item: dict[str, Any]) -> Iterator[str]:
    yield str(item.get("record") or item.get("t"))
    for key, value in item.items():
        if key in ("record", "t"):
            continue
        if isinstance(value, list) and value and isinstance(value[0], dict):
            yield f"  {key}:"
            yield from (f"    {json.dumps(entry, ensure_ascii=False)}" for entry in value)
        else:
            yield f"  {key}: {json.dumps(value, ensure_ascii=False)}"
