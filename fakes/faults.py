"""Makes GPUs fail, by a seed: `python -m fakes.faults --nodes DIR ... --truth FILE --seed N --seconds S`.

Its own process, which knows the hardware's files and nothing of headway: it writes kernel lines and NVML state, and
what it did, with times, into the truth file (JSON lines), against which somebody else may hold what was published.

kinds   row_remap_failure   memory, never cleared by a reset
        off_the_bus         XID 79, NVML says lost, PCI reads as all ones
        driver_hang         every NVML call blocks
        uncontained_memory  XID 95, the driver asks for a reset, and gets it after a while: clears
        application_xid     XID 31 and 13 of a process: means nothing
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from fakes.gpu_node import GpuNode
from fakes.nvml_state import RecoveryAction

KINDS = ("row_remap_failure", "off_the_bus", "uncontained_memory", "application_xid", "driver_hang")
#: The reset comes this long after an uncontained memory error.
RESET_AFTER_S = 6.0
#: Whoever looks once a second has seen what was done before.
SEEN_AFTER_S = 3.0


@dataclass(frozen=True)
class Fault:
    """`uuid` = the GPU, or "node". `at_s` = wall time just before the first write(2). `harmful`: must be published."""

    kind: str
    node: str
    uuid: str
    pci: str
    at_s: float
    harmful: bool
    event: str = "fault"


def choose(rng: random.Random, nodes: list[GpuNode]) -> list[tuple[str, GpuNode, int]]:
    """One fault of each kind; on different nodes while there are enough. The hang comes last: it hides what follows."""
    order = rng.sample(nodes, len(nodes))
    kinds = rng.sample(KINDS[:-1], len(KINDS) - 1) + [KINDS[-1]]
    used: dict[str, set[int]] = {}
    chosen = []
    for number, kind in enumerate(kinds):
        node = order[number % len(order)]
        free = sorted(set(range(len(node.gpus()))) - used.setdefault(node.name, set()))
        if not free:
            raise ValueError(f"{node.name}: more faults than GPUs; give more nodes or more GPUs per node")
        index = rng.choice(free)
        used[node.name].add(index)
        chosen.append((kind, node, index))
    return chosen


def inject(kind: str, node: GpuNode, index: int) -> Fault:
    gpu = node.gpus()[index]
    uuid, pci = gpu.uuid, gpu.pci
    at_s = time.time()
    if kind == "row_remap_failure":
        with node.nvml.edit() as driver:
            driver.gpu(uuid).remap_row(failed=True)
        node.xid(pci, 64, "pid='<unknown>', name=<unknown>, Row Remapper: remapping could not be recorded")
    elif kind == "off_the_bus":
        node.xid(pci, 79, "pid='<unknown>', name=<unknown>, GPU has fallen off the bus.")
        node.answer_on_pci(pci, False)
        with node.nvml.edit() as driver:
            driver.fall_off_the_bus(driver.gpu(uuid))
    elif kind == "uncontained_memory":
        node.xid(pci, 95, "pid=7062, name=python3, Uncontained: LTC TAG (0x2,0x0). RST: Yes, D-RST: No")
        with node.nvml.edit() as driver:
            driver.gpu(uuid).ecc_error(uncorrected=1, location="sram")
            driver.require(driver.gpu(uuid), RecoveryAction.RESET)
    elif kind == "application_xid":
        text = "pid=4242, name=python3, Ch 00000008, intr 00000000. MMU Fault: ENGINE GRAPHICS GPC1 faulted @ 0x0"
        node.xid(pci, 31, text)
        node.xid(pci, 13, "pid=4242, name=python3, Graphics SM Warp Exception on (GPC 1, TPC 0, SM 0): Out Of Range")
    elif kind == "driver_hang":
        with node.nvml.edit() as driver:
            driver.block("all")
        uuid, pci = "node", ""
    else:
        raise ValueError(kind)
    return Fault(kind, node.name, uuid, pci, at_s, harmful=kind != "application_xid")


def main() -> int:
    parser = argparse.ArgumentParser("python -m fakes.faults", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--nodes", nargs="+", required=True, type=Path, metavar="DIR", help="folders of fakes.gpu_node")
    parser.add_argument("--gpus", type=int, default=8, help="GPUs per node (default: %(default)s)")
    parser.add_argument("--truth", required=True, type=Path, help="what was done, JSON lines")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=30.0, help="spread the faults over this long")
    args = parser.parse_args()
    rng = random.Random(args.seed)
    chosen = choose(rng, [GpuNode(folder, folder.name, args.gpus) for folder in args.nodes])
    gaps = sorted(rng.uniform(0.0, max(0.0, args.seconds - RESET_AFTER_S)) for _ in chosen)
    began_s = time.monotonic()
    resets: list[tuple[float, GpuNode, Fault]] = []
    with args.truth.open("a", buffering=1) as truth:

        def reset_due(until_s: float) -> None:
            while resets and resets[0][0] <= until_s:
                due_s, node, fault = resets.pop(0)
                time.sleep(max(0.0, began_s + due_s - time.monotonic()))
                done = Fault(fault.kind, fault.node, fault.uuid, fault.pci, time.time(), True, event="reset")
                node.reset(fault.uuid)
                truth.write(json.dumps(asdict(done)) + "\n")

        for due_s, (kind, node, index) in zip(gaps, chosen, strict=True):
            if kind == "driver_hang":
                # Nothing of this node's other faults and resets could be seen once NVML hangs.
                reset_due(float("inf"))
                time.sleep(SEEN_AFTER_S)
            reset_due(due_s)
            time.sleep(max(0.0, began_s + due_s - time.monotonic()))
            fault = inject(kind, node, index)
            truth.write(json.dumps(asdict(fault)) + "\n")
            if kind == "uncontained_memory":
                resets.append((time.monotonic() - began_s + RESET_AFTER_S, node, fault))
        reset_due(float("inf"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
