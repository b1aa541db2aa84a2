"""One frame of each kind, every field set, for the golden files beside this one.

`python -m tests.golden.frames` writes the files that are missing and touches none that is there: a committed file is
what peers of that wire version send, and only a new major version may need another.
"""

from __future__ import annotations

import struct
import sys
from pathlib import Path

from headway.kernel_log import KernelLine
from headway.wire import (
    Ack,
    Bye,
    Cursor,
    Epoch,
    Event,
    Events,
    Frame,
    GpuInfo,
    Hello,
    JournalInfo,
    Layout,
    Orders,
    Refused,
    Repeats,
    Sample,
    Welcome,
    encode,
)

FOLDER = Path(__file__).parent
BOOT = "6f9c2c1e-0b0f-4a43-9d3c-5a1f6c1f7a11"
JOURNAL = "00112233445566778899aabbccddeeff"
EPOCH = Epoch(BOOT, 1, 0)
GPU = GpuInfo(
    uuid="GPU-11111111-2222-3333-4444-555555555555",
    pci="0000:3b:00.0",
    minor=0,
    model="NVIDIA H100 80GB HBM3",
    serial="1650522000000",
    part_number="692-2G520-0200-000",
    vbios="96.00.74.00.01",
    memory_total_bytes=85520809984,
    epoch=EPOCH,
)
LINE = KernelLine(
    family="xid",
    raw="NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, name=python, GPU has fallen off the bus.",
    code=79,
    pci="0000:3b:00.0",
    pid=1234,
    process="python",
)
COMMON = (BOOT, 4711.25, 1795000000.5)
EVENTS = (
    Event(10, *COMMON, kind="kernel_line", source="kmsg", line=LINE),
    Event(
        11,
        *COMMON,
        kind="state",
        source="nvml",
        name="recovery_action",
        value="reset",
        uuid=GPU.uuid,
        pci=GPU.pci,
        epoch=EPOCH,
    ),
    Event(12, *COMMON, kind="gpu", source="nvml", gpu=GPU),
    Event(
        13,
        *COMMON,
        kind="source",
        source="nvml",
        name="nvml",
        value="silent",
        count=3,
        since_s=4700.0,
        detail="no answer to 3 probes",
    ),
    Event(14, *COMMON, kind="slot", source="sysfs", pci=GPU.pci, value="missing"),
    Event(15, *COMMON, kind="repeats", source="kmsg", repeats=Repeats(10, 41, 4711.5, 4770.75)),
    Event(16, *COMMON, kind="agent", source="agent", name="start"),
)
CURSORS = (Cursor(JOURNAL, 7, 10, 17),)

FRAMES: dict[str, Frame] = {
    "hello": Hello(
        node="gpu-node-1",
        boot_id=BOOT,
        sent_s=4712.0,
        wall_s=1795000001.25,
        major=1,
        minor=0,
        agent_version="0.1.0",
        journals=(JournalInfo(JOURNAL, BOOT, 3, 10, durable=True, current=True),),
        gpus=(GPU,),
        layouts=(Layout(1, "gpu", ("lost", "power_w"), (GPU.uuid,)),),
        driver_version="580.65.06",
    ),
    "welcome": Welcome(CURSORS, pace_s=1.0, credit=512, aggregator_epoch="a1b2c3d4"),
    "sample": Sample(1, "gpu", BOOT, 4711.5, 4712.5, struct.pack("<2d", 0.0, float("nan"))),
    "event": Events(JOURNAL, "live", BOOT, 4712.75, EVENTS),
    "ack": Ack(CURSORS, pace_s=5.0, credit=32),
    "orders": Orders(fence=3, expires_in_s=10.0, orders=("none",)),
    "refused": Refused("event", "from_the_future", "event 10 observed at 9.000, sent at 8.000"),
    "bye": Bye("superseded", 30.0),
}


def path(name: str) -> Path:
    return FOLDER / f"{name}.v1.msgpack"


def main() -> int:
    for name, frame in FRAMES.items():
        if not path(name).exists():
            path(name).write_bytes(encode(frame))
            print(f"wrote {path(name)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
