"""What the text of a recognised kernel line means: sub-codes, units, registers, causes. Pure.

The agent sends the shape and the raw line; decoding lives here alone, so that an agent in the field never has to be
changed for a new meaning. Sources of the layouts: NVIDIA's XID catalogue (workflows 13, 48, NVLINK_ERR and the decode
sheet of 144-150), the open kernel modules' comments on 94/95 and on 154, and captures of both.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from headway.kernel_log import MAX_LINE_CHARS, KernelLine

#: 154 prints the driver's recovery action as a number (gpu.c of the open kernel modules; 6 and 7 from nvml.h).
RECOVERY_ACTIONS = {
    0: "none",
    1: "reset",
    2: "reboot",
    3: "drain_p2p",
    4: "drain_and_reset",
    5: "recover_imex_domain",
    6: "bus_reset",
    7: "system_reboot",
}
#: From this driver branch on, intrInfo of 144-150 carries its sub-code in bits 6-0 instead of 9-5.
INTR_INFO_V2_DRIVER = 575
#: Link-down reasons of 149 that speak of the device at the other end, and those that are orders or software's.
PEER_REASONS = frozenset({21, *range(32, 38)})
IGNORED_REASONS = frozenset({38, 40})
#: Highest error status of 145 RLW_REMAP that only follows from a link down; 0x40 and 0x80 ask for a reset themselves.
MAX_REMAP_BY_PRODUCT = 0x20
SIGNAL_REASONS = frozenset({2, 4, 10})
CABLE_REASONS = frozenset({42, 43})

#: XID 74 on Hopper: (register, bits) -> what a set bit says. Bits that say nothing are left out.
_REGISTERS_74 = (
    (1, (4, 5), "parity or ECC"),
    (1, (8, 9, 12, 16, 17, 24, 28), "hardware"),
    (1, (21, 22), "marginal signal"),
    (1, (27, 29), "hardware if repeated"),
    (3, (0, 1, 2, 6), "parity"),
    (3, (16, 19), "hardware if repeated"),
    (4, (18,), "fabric reset needed"),
    (5, (18, 19, 21, 22, 24, 25, 27, 28), "parity if more than two"),
)
_HEX = re.compile(r"0x[0-9a-fA-F]{1,8}")
_ACTION = re.compile(r"recovery action changed from 0x[0-9a-f]+ \([^)]*\) to 0x(?P<to>[0-9a-f]+)")
_RST = re.compile(r"RST: (?P<rst>Yes|No), D-RST: (?P<drst>Yes|No)")
_CAUSED_BY = re.compile(r"caused by previous Xid (?P<code>\d+)")
_UNIT_13 = re.compile(r"\(GPC (?P<gpc>\d+), TPC (?P<tpc>\d+)(?:, SM (?P<sm>\d+))?\)")
_UNIT_48 = re.compile(r"in (?:the )?(?P<unit>framebuffer|SRAM|L2|[A-Z][A-Za-z0-9 ]{1,24}?)(?: at| \(|$)")
_RATE_LIMIT = re.compile(r"printing 1 of every (?P<n>\d+)")


@dataclass(frozen=True, slots=True)
class Decoded:
    """None = the text does not say. `counts_for` = how many events one line stands for after a rate-limit notice."""

    recovery_action: str | None = None
    reset_needed: bool | None = None
    drain_and_reset_needed: bool | None = None
    caused_by: int | None = None
    unit: str | None = None
    registers: tuple[str, ...] = ()
    reason: int | None = None
    interrupt_subcode: int | None = None
    peer_device: bool = False
    ignorable: bool = False
    counts_for: int | None = None

    def words(self) -> str:
        """For people; empty where nothing was decoded."""
        said = [
            f"driver asks for {self.recovery_action}" if self.recovery_action else "",
            "reset needed" if self.reset_needed else "",
            "drain and reset needed" if self.drain_and_reset_needed else "",
            f"caused by XID {self.caused_by}" if self.caused_by is not None else "",
            self.unit or "",
            ", ".join(self.registers),
            f"link-down reason {self.reason}" if self.reason else "",
            "the other end's fault" if self.peer_device else "",
            "ignored by NVIDIA's table" if self.ignorable else "",
            f"each further line stands for {self.counts_for}" if self.counts_for else "",
        ]
        return "; ".join(word for word in said if word)


def decode(line: KernelLine, driver_version: str | None = None) -> Decoded:
    """Never raises: what does not fit the known layouts is left None."""
    text = line.raw[:MAX_LINE_CHARS]
    if line.family == "gsp":
        found = _RATE_LIMIT.search(text)
        return Decoded(counts_for=int(found["n"])) if found else Decoded()
    if line.family != "xid" or line.code is None:
        return Decoded()
    match line.code:
        case 13:
            return Decoded(unit=_unit_13(text))
        case 45:
            found = _CAUSED_BY.search(text)
            return Decoded(caused_by=int(found["code"]) if found else None)
        case 48:
            found = _UNIT_48.search(text)
            return Decoded(unit=found["unit"] if found else None)
        case 74:
            return Decoded(registers=_registers_74(text))
        case 94 | 95:
            found = _RST.search(text)
            if found is None:
                return Decoded()
            return Decoded(reset_needed=found["rst"] == "Yes", drain_and_reset_needed=found["drst"] == "Yes")
        case 154:
            found = _ACTION.search(text)
            return Decoded(recovery_action=RECOVERY_ACTIONS.get(int(found["to"], 16)) if found else None)
        case code if 144 <= code <= 150:
            return _nvlink5(line, text, driver_version)
    return Decoded()


def subcode_of(line: KernelLine) -> str | None:
    """The sub-code by which policy rows know the line, where the code alone does not say enough.

    An SXID, a fabric manager's or an AER line: the gravity it prints, `fatal` or `nonfatal`. XID 154: the recovery
    action that the driver asks for now. `off_bus`: `fallen` where one line says of one address that it has; the first
    line of the three-line notice is the same for GPUs that are merely not supported. XID 149: `link_down_ordered` or
    `link_down_peer` where the printed reason is an order or the other end's. Else what is printed (144-150).
    """
    if line.family in ("sxid", "fabric_manager", "aer", "dpc") and line.fatal is not None:
        return "fatal" if line.fatal else "nonfatal"
    if line.family == "xid" and line.code == 154:
        return decode(line).recovery_action
    if line.family == "xid" and line.code == 149:
        said = decode(line)
        return "link_down_ordered" if said.ignorable else "link_down_peer" if said.peer_device else line.subcode
    if line.family == "off_bus":
        return "fallen" if line.pci is not None and "fallen off the bus" in line.raw[:MAX_LINE_CHARS] else None
    return line.subcode


def is_remap_by_product(line: KernelLine) -> bool:
    """XID 145 RLW_REMAP as it comes with a link that goes down: error status 0x1-0x20, or none printed. The higher ones
    are errors of their own."""
    if line.code != 145 or line.subcode != "RLW_REMAP":
        return False
    numbers = _numbers(line.raw[:MAX_LINE_CHARS])
    return len(numbers) < 2 or numbers[1] <= MAX_REMAP_BY_PRODUCT


def _unit_13(text: str) -> str | None:
    found = _UNIT_13.search(text)
    return " ".join(f"{key.upper()} {value}" for key, value in found.groupdict().items() if value) if found else None


def _numbers(text: str) -> list[int]:
    """The last parenthesised group of hexadecimal words; empty where the line was cut before it."""
    opening = text.rfind("(0x")
    return [int(word, 16) for word in _HEX.findall(text[opening:])] if opening >= 0 else []


def _registers_74(text: str) -> tuple[str, ...]:
    numbers = _numbers(text)
    if len(numbers) < 5:
        return ()
    return tuple(
        f"register {register} bit {bit}: {meaning}"
        for register, bits, meaning in _REGISTERS_74
        for bit in bits
        if numbers[register - 1] >> bit & 1
    )


def _nvlink5(line: KernelLine, text: str, driver_version: str | None) -> Decoded:
    numbers = _numbers(text)
    if not numbers:
        return Decoded()
    info = numbers[0]
    subcode = None
    if driver_version is not None and (branch := driver_version.split(".")[0]).isdigit():
        subcode = info & 0x7F if int(branch) >= INTR_INFO_V2_DRIVER else info >> 5 & 0x1F
    if line.code != 149 or line.subcode != "NETIR_LINK_EVT":
        return Decoded(interrupt_subcode=subcode)
    reason = info >> 20 & 0x3F
    return Decoded(
        reason=reason,
        interrupt_subcode=subcode,
        peer_device=reason in PEER_REASONS,
        ignorable=reason in IGNORED_REASONS,
        unit="signal integrity" if reason in SIGNAL_REASONS else "cable" if reason in CABLE_REASONS else None,
    )
