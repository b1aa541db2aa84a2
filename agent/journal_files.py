"""Journals as files: framing, segments, and what can still be read after a crash at any byte.

A journal is a folder `NNNNNN-<journal_id>` of segments `<first_seq>.seg`. A segment is a sequence of frames

    u32 length of payload | u32 CRC-32 of kind and payload | 1 byte kind | payload (MessagePack)        little-endian

of the kinds `H` (header, first in each segment: who the journal is, and the whole state at that point), `E` (one event
and the state that changed with it) and `N` (changed state alone). State is a flat map: positions in the sources, open
repeats, slots seen. It stands in the frame of the event it belongs to, so one write(2) stores both or neither: after a
kill at any moment no line is read twice and none is passed over.

Frames are only ever appended. Reading stops at the first frame that is not whole; all before it are good.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from headway.wire import Event

FORMAT_VERSION = 1
#: A frame may not be longer: a length above this is damage, not data.
MAX_FRAME_PAYLOAD_BYTES = 256 * 1024

KIND_HEADER, KIND_EVENT, KIND_NOTE = b"H", b"E", b"N"
_FRAME = struct.Struct("<IIc")

State = dict[str, Any]


class Header(msgspec.Struct, frozen=True):
    version: int
    journal_id: str
    boot_id: str
    first_seq: int
    wall_s: float
    state: State


class Entry(msgspec.Struct, frozen=True, omit_defaults=True):
    event: Event
    state: State = {}


class Note(msgspec.Struct, frozen=True):
    state: State


_encoder = msgspec.msgpack.Encoder()
_header = msgspec.msgpack.Decoder(Header)
_entry = msgspec.msgpack.Decoder(Entry)
_note = msgspec.msgpack.Decoder(Note)


def frame(record: Header | Entry | Note) -> bytes:
    """One record as it stands on disk."""
    kind = KIND_HEADER if isinstance(record, Header) else KIND_EVENT if isinstance(record, Entry) else KIND_NOTE
    payload = _encoder.encode(record)
    if len(payload) > MAX_FRAME_PAYLOAD_BYTES:
        raise ValueError(f"a record of {len(payload)} bytes; sources cut lines long before")
    return _FRAME.pack(len(payload), zlib.crc32(payload, zlib.crc32(kind)), kind) + payload


def frames(data: bytes, offset: int = 0) -> Iterator[tuple[bytes, bytes, int]]:
    """Whole frames from `offset` on as (kind, payload, offset after it); ends at the first that is not whole."""
    while offset + _FRAME.size <= len(data):
        length, crc, kind = _FRAME.unpack_from(data, offset)
        start = offset + _FRAME.size
        if length > MAX_FRAME_PAYLOAD_BYTES or start + length > len(data):
            return
        payload = data[start : start + length]
        if kind not in (KIND_HEADER, KIND_EVENT, KIND_NOTE) or zlib.crc32(payload, zlib.crc32(kind)) != crc:
            return
        offset = start + length
        yield kind, payload, offset


def apply_state(state: State, change: Mapping[str, Any]) -> None:
    """Fold a change into the state: None takes a key away."""
    for key, value in change.items():
        if value is None:
            state.pop(key, None)
        else:
            state[key] = value


@dataclass(slots=True)
class Segment:
    """One file: events `first_seq <= seq < next_seq` in its first `size_bytes` bytes."""

    path: Path
    first_seq: int
    next_seq: int
    size_bytes: int
    #: Where reading last stopped: backfill reads on from there instead of from the start.
    resume: tuple[int, int] = (0, 0)


@dataclass(slots=True)
class _Scan:
    header: Header | None
    segment: Segment
    whole: bool


def _scan(path: Path) -> _Scan:
    data = path.read_bytes()
    header: Header | None = None
    count = end = 0
    for kind, payload, after in frames(data):
        if header is None:
            if kind != KIND_HEADER:
                break
            try:
                header = _header.decode(payload)
            except msgspec.DecodeError:
                break
            if header.version != FORMAT_VERSION:
                header = None
                break
        count += kind == KIND_EVENT
        end = after
    first = header.first_seq if header is not None else 0
    return _Scan(header, Segment(path, first, first + count, end), header is not None and end == len(data))


def _fold_state(header: Header, segment: Segment) -> State:
    state = dict(header.state)
    for kind, payload, _ in frames(segment.path.read_bytes()[: segment.size_bytes]):
        if kind == KIND_EVENT:
            apply_state(state, _entry.decode(payload).state)
        elif kind == KIND_NOTE:
            apply_state(state, _note.decode(payload).state)
    return state


@dataclass(slots=True)
class DiskJournal:
    """One journal on disk. Raises OSError from `create` and `append`; the caller then starts another journal."""

    directory: Path
    journal_id: str
    boot_id: str
    segments: list[Segment]
    #: State as of the last whole frame.
    state: State
    #: The last segment ends with a whole frame: only then may the journal be continued.
    whole: bool
    durable: bool = True
    _fd: int | None = None
    _unsynced: list[int] = field(default_factory=list)
    _dirty: bool = False

    @classmethod
    def create(cls, directory: Path, journal_id: str, boot_id: str, wall_s: float, state: State) -> DiskJournal:
        directory.mkdir(parents=True)
        journal = cls(directory, journal_id, boot_id, [], dict(state), whole=True)
        try:
            journal._open_segment(0, wall_s)
        except OSError:
            shutil.rmtree(directory, ignore_errors=True)
            raise
        return journal

    @classmethod
    def load(cls, directory: Path) -> DiskJournal | None:
        """What is readable of a journal; None if nothing is.

        Segments are taken as far back as they join: after damage in an older one, only what follows it is kept, since
        a journal is announced as one range.
        """
        kept: list[_Scan] = []
        scan = None
        for path in sorted(directory.glob("*.seg")):
            scan = _scan(path)
            if scan.header is None:
                continue
            if kept and kept[-1].segment.next_seq != scan.segment.first_seq:
                kept.clear()
            kept.append(scan)
        if not kept or scan is None:
            return None
        last = kept[-1]
        assert last.header is not None
        state = _fold_state(last.header, last.segment)
        segments = [one.segment for one in kept]
        whole = last is scan and last.whole
        return cls(directory, last.header.journal_id, last.header.boot_id, segments, state, whole)

    @property
    def first_seq(self) -> int:
        return self.segments[0].first_seq

    @property
    def next_seq(self) -> int:
        return self.segments[-1].next_seq

    @property
    def size_bytes(self) -> int:
        return sum(segment.size_bytes for segment in self.segments)

    def continue_writing(self) -> None:
        assert self.whole
        self._fd = os.open(self.segments[-1].path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)

    def append(self, record: Entry | Note, wall_s: float, segment_bytes: int) -> None:
        """Write one record. `self.state` moves with it."""
        if self.segments[-1].size_bytes >= segment_bytes:
            self._open_segment(self.next_seq, wall_s)
        self._write(frame(record))
        self.segments[-1].next_seq += isinstance(record, Entry)
        apply_state(self.state, record.state)

    def read(self, from_seq: int, max_events: int, max_bytes: int) -> list[Event]:
        """Events from `from_seq` on (at least one where there is one), in order. Raises OSError."""
        for segment in self.segments:
            if from_seq < segment.next_seq:
                return _read(segment, max(from_seq, segment.first_seq), max_events, max_bytes)
        return []

    def drop_oldest_segment(self) -> None:
        """Forget the oldest segment; the last one, which is being written, stays."""
        self.segments.pop(0).path.unlink(missing_ok=True)

    def take_unsynced(self) -> list[int]:
        """Descriptors with data that is not yet on the disk; the caller syncs and closes them."""
        taken, self._unsynced = self._unsynced, []
        if self._dirty and self._fd is not None:
            taken.append(os.dup(self._fd))
        self._dirty = False
        return taken

    def close(self) -> None:
        for fd in (*self._unsynced, *(() if self._fd is None else (self._fd,))):
            os.close(fd)
        self._unsynced, self._fd = [], None

    def remove(self) -> None:
        self.close()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _open_segment(self, first_seq: int, wall_s: float) -> None:
        path = self.directory / f"{first_seq:016d}.seg"
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o640)
        if self._fd is not None:
            self._unsynced.append(self._fd)
        self._fd = fd
        self._unsynced.append(os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        self.segments.append(Segment(path, first_seq, first_seq, 0))
        header = Header(FORMAT_VERSION, self.journal_id, self.boot_id, first_seq, wall_s, self.state)
        self._write(frame(header))

    def _write(self, data: bytes) -> None:
        assert self._fd is not None
        segment = self.segments[-1]
        self._dirty = True
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._fd, view) :]
        except OSError:
            # Half a frame must not stand before whole ones; where even this fails, the reader stops at it.
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, segment.size_bytes)
            raise
        segment.size_bytes += len(data)


def _read(segment: Segment, from_seq: int, max_events: int, max_bytes: int) -> list[Event]:
    seq, offset = segment.first_seq, 0
    if segment.resume[1] and segment.resume[0] <= from_seq:
        seq, offset = segment.resume
    events: list[Event] = []
    taken = 0
    with segment.path.open("rb") as file:
        file.seek(offset)
        data = file.read(segment.size_bytes - offset)
    for kind, payload, after in frames(data):
        if kind == KIND_EVENT:
            if seq >= from_seq:
                if events and (len(events) >= max_events or taken + len(payload) > max_bytes):
                    break
                events.append(_entry.decode(payload).event)
                taken += len(payload)
            seq += 1
        segment.resume = (seq, offset + after)
    return events
