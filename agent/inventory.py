"""The node's GPUs as last told by NVML, the layouts of their samples, and the newest sample. Latest wins."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headway.wire import GPU_COLUMNS, MAX_GPUS, GpuInfo, Layout

GROUP_GPU = "gpu"


@dataclass(frozen=True, slots=True)
class PackedSample:
    """A sample ready for the wire: `data` is rows x columns little-endian f64 in the order of the layout."""

    layout_id: int
    group: str
    observed_s: float
    data: bytes


class Inventory:
    """`version` grows whenever Hello would say something else. Subscribers are called after each change."""

    def __init__(self) -> None:
        self.version = 0
        self.gpus: tuple[GpuInfo, ...] = ()
        self.driver_version: str | None = None
        self.layouts: tuple[Layout, ...] = ()
        self.sample: PackedSample | None = None
        self._layout_id = 0
        self._listeners: list[Callable[[], None]] = []

    def subscribe(self, listener: Callable[[], None]) -> None:
        self._listeners.append(listener)

    def set_gpus(self, gpus: Sequence[GpuInfo], driver_version: str | None) -> None:
        """Take the GPUs that the driver names now; beyond MAX_GPUS they are left out."""
        kept = tuple(gpus[:MAX_GPUS])
        if (kept, driver_version) == (self.gpus, self.driver_version):
            return
        rows = tuple(gpu.uuid for gpu in kept)
        if not self.layouts or self.layouts[0].rows != rows:
            self._layout_id += 1
            self.layouts = (Layout(self._layout_id, GROUP_GPU, GPU_COLUMNS, rows),) if rows else ()
            self.sample = None
        self.gpus, self.driver_version = kept, driver_version
        self.version += 1
        self._tell()

    def set_sample(self, rows: Sequence[tuple[str, Sequence[float]]], observed_s: float) -> None:
        """Newest values: per GPU its UUID and one float per column of GPU_COLUMNS, NaN = not measured.

        A GPU of the layout without values gets NaN in every column; values of an unknown GPU are left out.
        """
        if not self.layouts:
            return
        layout = self.layouts[0]
        values = dict(rows)
        missing = (float("nan"),) * len(layout.columns)
        flat = [value for uuid in layout.rows for value in values.get(uuid, missing)]
        data = struct.pack(f"<{len(layout.rows) * len(layout.columns)}d", *flat)
        self.sample = PackedSample(layout.layout_id, layout.group, observed_s, data)
        self._tell()

    def _tell(self) -> None:
        for listener in self._listeners:
            listener()
