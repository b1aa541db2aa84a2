"""The snapshot: what this process knows, kept on its own volume so that a restart need not ask every agent for all.

Engine and cursors stand in one file and are taken in one step of the event loop, so a cursor never runs ahead of the
evidence that was applied. Losing the file costs a backfill and nothing else: a file that is missing, damaged or of
another format is a line in the log and an empty start.
"""

from __future__ import annotations

import logging
import os
import zlib
from dataclasses import dataclass
from pathlib import Path

import msgspec

from aggregator.ingest.session import NodeMemory

log = logging.getLogger(__name__)

FORMAT = 1
FILE = "snapshot.v1"
#: More than any real one (100,000 GPUs with evidence on each hundredth): beyond it something is wrong.
MAX_BYTES = 1024 * 1024 * 1024


class _File(msgspec.Struct):
    format: int
    version: str
    at_s: float
    engine: bytes
    memory: dict[str, NodeMemory]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """`at_s` = the aggregator's clock when it was taken; `engine` = the engine's own bytes."""

    version: str
    at_s: float
    engine: bytes
    memory: dict[str, NodeMemory]


def encode(snapshot: Snapshot) -> bytes:
    """Checksum, then MessagePack."""
    file = _File(FORMAT, snapshot.version, snapshot.at_s, snapshot.engine, snapshot.memory)
    body = msgspec.msgpack.encode(file)
    return zlib.crc32(body).to_bytes(4, "little") + body


def decode(data: bytes) -> Snapshot:
    """Raises ValueError that says what is wrong."""
    if len(data) < 4 or zlib.crc32(data[4:]) != int.from_bytes(data[:4], "little"):
        raise ValueError("the checksum does not match")
    file = msgspec.msgpack.decode(data[4:], type=_File)
    if file.format != FORMAT:
        raise ValueError(f"format {file.format}, this version reads {FORMAT}")
    return Snapshot(file.version, file.at_s, file.engine, file.memory)


def write(folder: Path, data: bytes) -> None:
    """In one step: the old file or the new one, never half of it. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    aside = folder / f"{FILE}.new"
    with aside.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(folder / FILE)


def read(folder: Path) -> Snapshot | None:
    """None where there is none that can be used; the log says why."""
    path = folder / FILE
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ValueError(f"{path.stat().st_size} bytes")
        return decode(path.read_bytes())
    except FileNotFoundError:
        log.info("no snapshot in %s: starting empty, the agents send their journals again", folder)
    except (OSError, ValueError, msgspec.DecodeError) as error:
        log.warning("snapshot %s cannot be used, starting empty: %s", path, error)
    return None
