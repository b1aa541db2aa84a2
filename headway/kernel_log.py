"""One line of a kernel log, recognised by its shape: family, code, address. Pure.

The agent sends what is recognised with the raw line; what it *means* is decided once, in the aggregator's engine. The
formats are those of NVIDIA's driver source (krcReportXid, nvswitch common code), Linux's own (AER, DPC, pciehp, EDAC,
mce, watchdog, hung task, OOM) and mlx5's, as they appear in public reports since 2013.

Framing in front of the text (kmsg record, `<6>`, uptime, caller id, date, syslog) is passed over and never decides.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import msgspec

#: A longer line is cut before it is looked at: no format above needs more, and work per line stays bounded.
MAX_LINE_CHARS = 4096


class KernelLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the text of one line says. None = not in the text."""

    family: str
    raw: str
    code: int | None = None
    pci: str | None = None
    pid: int | None = None
    process: str | None = None
    subcode: str | None = None
    link: int | None = None
    fatal: bool | None = None
    uuid: str | None = None
    driver_version: str | None = None
    stamp: str | None = None


#: Every family with what it stands for; closed. `read kernel-log --help` prints it.
FAMILIES: dict[str, str] = {
    "xid": "NVIDIA driver error with an XID code",
    "sxid": "NVSwitch error with an SXid code",
    "companion": "second line of an SXid (severity, data); no event of its own",
    "off_bus": "GPU gone from the bus, said without an XID",
    "gpu_init": "a GPU could not be initialised (RmInitAdapter and the like)",
    "gsp": "GPU system processor: heartbeat, RPC or rate-limit notice",
    "gpu_uuid": "which GPU sits at which PCI address",
    "gpu_reset": "a reset of a GPU was carried out",
    "driver_load": "the NVIDIA driver was loaded: counters start anew",
    "driver_mismatch": "user library and driver differ; no hardware fault",
    "gpu_lost_hint": "driver messages that follow a lost GPU",
    "reset_required": "driver messages that ask for a GPU reset",
    "gpu_memory": "memory subsystem error without an XID",
    "peermem": "nvidia-peermem error",
    "fabric_manager": "fabric manager: NVSwitch error",
    "aer": "PCIe advanced error reporting",
    "dpc": "PCIe downstream port containment",
    "pciehp": "PCIe hot-plug: link down",
    "nic": "mlx5 network adapter fault",
    "edac": "host memory error",
    "mce": "machine check",
    "soft_lockup": "a CPU stuck in the kernel",
    "hung_task": "a task blocked for minutes",
    "panic": "kernel panic",
    "segfault": "segmentation fault in an NVIDIA or NCCL library",
    "oom": "out of memory: a process was killed",
    "filesystem": "file-system error",
    "nvme": "NVMe controller or timeout error",
}

#: Families that say what is, not what is wrong: never evidence against a part.
INFORMATION = frozenset({"companion", "gsp", "gpu_uuid", "gpu_reset", "driver_load", "driver_mismatch"})

_PCI = r"(?P<pci>(?:[0-9a-fA-F]{4,8}:)[0-9a-fA-F]{2}:[0-9a-fA-F]{2}(?:\.[0-7])?)"
_FRAME = re.compile(
    r"^(?:<\d+>|\d+,\d+,(?P<usec>\d+),[^;]*;|(?=\S))"
    r"(?:\[(?P<date>[A-Z][a-z]{2} [A-Z][a-z]{2} +\d+ \d+:\d+:\d+ \d{4})\] ?)?"
    r"(?:(?P<syslog>[A-Z][a-z]{2} +\d+ \d+:\d+:\d+) \S+ )?"
    r"(?:\S+ kernel: ?|kernel: ?)?"
    r"(?:\[ *(?P<up>\d+(?:\.\d+)?)\] ?)?(?:\[ *[TC]\d+\] ?)?"
)
_XID = re.compile(r"NVRM: Xid \((?:PCI:)?(?P<address>[^)]*)\): (?P<code>\d{1,5})(?:, ?|$)(?P<rest>.*)")
_ADDRESS = re.compile(_PCI)
_PID = re.compile(r"pid=(?:'?<unknown>'?|(?P<pid>\d+))(?:, name=(?:'?<unknown>'?|(?P<name>[^,]*)))?(?:, ?|$)")
_NVLINK5 = re.compile(
    r"(?P<sub>[A-Z][A-Z0-9_]{2,40})\s+(?P<fatal>Fatal|Nonfatal)\s+XC[01]\s+i\d+\s+Link\s+(?P<link>-?\d+)"
)
_LINK = re.compile(r"\b(?:on link|Link) (?P<link>-?\d{1,3})\b")
_SXID = re.compile(r"nvidia-nvswitch\d*: SXid \(PCI:(?P<address>[^)]*)\): (?P<code>\d{1,6}), (?P<rest>.*)")
_COMPANION = re.compile(r"(?:Severity \d+ |Data \{)")
_WORD = re.compile(r"(?P<word>Fatal|Non-fatal|Correctable)\b")
_FABRIC = re.compile(
    r"detected NVSwitch (?P<word>fatal|non-fatal) error (?P<code>\d+) .*?pci bus id " + _PCI + r".*?port (?P<link>\d+)"
)
#: Where other families say how grave it is: AER ("Uncorrected (Fatal)", "severity=Correctable"), DPC ("ERR_FATAL").
_GRAVITY = re.compile(
    r"\((?P<a>Fatal|Non-Fatal)\)|severity=(?P<b>\w+)|AER: (?P<c>Corrected) error|ERR_(?P<d>FATAL|NONFATAL)"
)
_GRAVE = {"fatal": True, "non-fatal": False, "nonfatal": False, "corrected": False, "correctable": False}
_CALLER = re.compile(r"\(pid (?P<pid>\d+)\)")
_FATAL = {"Fatal": True, "fatal": True, "Nonfatal": False, "Non-fatal": False, "non-fatal": False, "Correctable": False}

#: (family, substring that must stand in the line, pattern). The first that fits names the family; order matters.
#: Named groups pci, pid, process, uuid, driver_version, link are taken over.
_PLAIN: tuple[tuple[str, str, re.Pattern[str]], ...] = tuple(
    (family, needle, re.compile(pattern))
    for family, needle, pattern in (
        ("gpu_uuid", "NVRM: GPU at", rf"NVRM: GPU at (?:PCI:)?{_PCI}: (?P<uuid>GPU-[0-9a-f-]{{36}})"),
        ("gsp", "Rate limiting GSP", rf"NVRM: Rate limiting GSP RPC error prints for GPU at (?:PCI:)?{_PCI}"),
        ("gsp", "_kgspIsHeartbeatTimedOut", r"NVRM: .*_kgspIsHeartbeatTimedOut"),
        ("off_bus", "has fallen off the bus", rf"NVRM: (?:GPU )?(?:at )?(?:PCI:)?{_PCI}: GPU has fallen off the bus"),
        ("off_bus", "fallen off the bus", r"NVRM: (?:.*)fallen off the bus"),
        ("off_bus", "NVRM: The NVIDIA GPU", rf"NVRM: The NVIDIA GPU {_PCI}"),
        ("gpu_init", "RmInitAdapter", rf"NVRM: (?:GPU )?{_PCI}: RmInitAdapter failed"),
        ("gpu_init", "rm_init_adapter", rf"NVRM: (?:GPU )?(?:{_PCI}: )?rm_init_adapter failed"),
        ("gpu_init", "probe routine failed", r"NVRM: The NVIDIA probe routine failed"),
        ("gpu_init", "Cannot attach gpu", r"NVRM: osInitNvMapping: \*\*\* Cannot attach gpu"),
        ("driver_mismatch", "API mismatch", r"NVRM: API mismatch"),
        ("reset_required", "NV_ERR_RESET_REQUIRED", r"NVRM: .*NV_ERR_RESET_REQUIRED"),
        ("gpu_lost_hint", "NV_ERR_GPU_IS_LOST", r"NVRM: .*NV_ERR_GPU_IS_LOST"),
        ("gpu_lost_hint", "status 0x0000000f", r"NVRM: _issueRpcAndWait: rpcSendMessage failed with status 0x0000000f"),
        ("gpu_memory", "CheckMemSubsysError", r"NVRM: .*CheckMemSubsysError\w*: Memory Subsystem Error"),
        (
            "driver_load",
            "NVRM: loading",
            r"NVRM: loading NVIDIA UNIX .*?Kernel Module(?: for \S+)?\s+(?P<driver_version>[\d.]+)",
        ),
        ("gpu_reset", "GPU reset executed", r"GPU reset executed: (?P<uuid>GPU-[0-9a-f-]{36}), success: true"),
        ("peermem", "nvidia-peermem", r"nvidia-peermem .*ERROR"),
        ("aer", "AER: ", rf"pcieport {_PCI}: AER: (?:Multiple )?(?:Corrected|Uncorrected|Uncorrectable|Correctable)"),
        ("aer", "PCIe Bus Error", rf"{_PCI}: (?:AER: )?PCIe Bus Error: severity="),
        ("aer", ": ", rf"pcieport {_PCI}:    ?\[ ?\d+\] \w+"),
        ("dpc", "DPC: containment", rf"{_PCI}: DPC: containment event"),
        ("pciehp", "Link Down", rf"pciehp {_PCI}:\S* slot\(\S+\): Link Down"),
        ("nic", "insufficient power", rf"mlx5_core {_PCI}: .*insufficient power"),
        ("nic", "Cable unplugged", rf"mlx5_core {_PCI}: .*Cable unplugged"),
        ("nic", "poll_health", rf"mlx5_core {_PCI}: poll_health:"),
        ("nic", "Will cause a leak", rf"mlx5_core {_PCI}: .*Will cause a leak"),
        ("nic", "unrecoverable hardware error", rf"mlx5_core {_PCI}: .*unrecoverable hardware error"),
        ("nic", "High Temperature", rf"mlx5_core {_PCI}: .*High Temperature"),
        ("nic", "NETDEV WATCHDOG", r"NETDEV WATCHDOG: \S+ \(mlx5_core\)"),
        ("edac", "EDAC MC", r"EDAC MC\d+: \d+ [CU]E "),
        ("mce", "Machine check", r"mce: \[Hardware Error\]"),
        ("mce", "[Hardware Error]", r"mce: \[Hardware Error\]"),
        ("soft_lockup", "soft lockup", r"BUG: soft lockup - CPU#\d+ stuck for \d+s! \[(?P<process>.*):(?P<pid>\d+)\]"),
        ("hung_task", "blocked for more than", r"INFO: task (?P<process>.*):(?P<pid>\d+) blocked for more than"),
        ("panic", "Kernel panic", r"Kernel panic - not syncing"),
        ("segfault", "segfault at", r"(?P<process>\S+)\[(?P<pid>\d+)\]: segfault at .* in lib(?:nccl|cuda|nvidia)\S*"),
        ("oom", "Killed process", r"[Oo]ut of memory.*: Killed process (?P<pid>\d+) \((?P<process>[^)]*)\)"),
        ("filesystem", "EXT4-fs error", r"EXT4-fs error \(device"),
        ("filesystem", "Buffer I/O error", r"Buffer I/O error on dev"),
        ("nvme", "timeout", r"nvme nvme\d+: I/O (?:tag )?\d+ .*timeout"),
        ("nvme", "controller is down", r"nvme nvme\d+: controller is down"),
    )
)
#: A line without any of these is noise; one scan instead of forty.
_ANY = re.compile(
    r"NVRM|SXid|NVSwitch|GPU reset executed|nvidia-peermem|pcieport|PCIe Bus Error|DPC: |pciehp|mlx5_core|EDAC MC|mce: "
    r"|soft lockup|blocked for more than|Kernel panic|segfault at|Killed process|EXT4-fs error|Buffer I/O error"
    r"|nvme nvme"
)


def recognise(text: str) -> KernelLine | None:
    """What one line (without its line end) says, or None where it is noise. Never raises."""
    text = raw = text[:MAX_LINE_CHARS]
    if _ANY.search(text) is None:
        return None
    line = _xid(text, raw) or _sxid(text, raw) or _fabric(text, raw) or _plain(text, raw)
    stamp = _stamp(text) if line is not None else None
    return msgspec.structs.replace(line, stamp=stamp) if line is not None and stamp else line


def normal_pci(address: str) -> str | None:
    """`0000:3b:00.0` from any way to write it; None where the text is no address."""
    found = _ADDRESS.search(address)
    if found is None:
        return None
    domain, bus, device = found["pci"].lower().split(":")
    slot, _, function = device.partition(".")
    return f"{domain[-4:]}:{bus}:{slot}.{function or '0'}"


def _stamp(text: str) -> str | None:
    frame = _FRAME.match(text)
    return (
        next((value for value in (frame["usec"], frame["date"], frame["syslog"], frame["up"]) if value), None)
        if frame
        else None
    )


def _xid(text: str, raw: str) -> KernelLine | None:
    found = _XID.search(text)
    if found is None:
        return None
    rest = found["rest"]
    pid = _PID.match(rest)
    body = rest[pid.end() :] if pid else rest
    number = int(pid["pid"]) if pid and pid["pid"] else None
    process = (pid["name"] or "").strip() if pid else ""
    nvlink5 = _NVLINK5.match(body)
    link = nvlink5 or _LINK.search(body)
    return KernelLine(
        family="xid",
        raw=raw,
        code=int(found["code"]),
        pci=normal_pci(found["address"]),
        pid=number or None,
        process=process or None,
        subcode=nvlink5["sub"] if nvlink5 else None,
        link=int(link["link"]) if link else None,
        fatal=_FATAL[nvlink5["fatal"]] if nvlink5 else None,
    )


def _sxid(text: str, raw: str) -> KernelLine | None:
    found = _SXID.search(text)
    if found is None:
        return None
    rest = found["rest"]
    family = "companion" if _COMPANION.match(rest) else "sxid"
    word, link = _WORD.match(rest), _LINK.search(rest)
    return KernelLine(
        family=family,
        raw=raw,
        code=int(found["code"]),
        pci=normal_pci(found["address"]),
        link=int(link["link"]) if link and family == "sxid" else None,
        fatal=_FATAL[word["word"]] if word else None,
    )


def _fabric(text: str, raw: str) -> KernelLine | None:
    found = _FABRIC.search(text)
    if found is None:
        return None
    return KernelLine(
        family="fabric_manager",
        raw=raw,
        code=int(found["code"]),
        pci=normal_pci(found["pci"]),
        link=int(found["link"]),
        fatal=_FATAL[found["word"]],
    )


def _plain(text: str, raw: str) -> KernelLine | None:
    for family, needle, pattern in _PLAIN:
        if needle not in text:
            continue
        found = pattern.search(text)
        if found is None:
            continue
        groups = found.groupdict()
        pid = groups.get("pid") or (caller["pid"] if (caller := _CALLER.search(text)) else None)
        return KernelLine(
            family=family,
            raw=raw,
            pci=normal_pci(groups["pci"]) if groups.get("pci") else None,
            pid=int(pid) or None if pid else None,
            process=groups.get("process"),
            fatal=_gravity(text) if family in ("aer", "dpc") else None,
            uuid=groups.get("uuid"),
            driver_version=groups.get("driver_version"),
        )
    return None


def _gravity(text: str) -> bool | None:
    found = _GRAVITY.search(text)
    word = next((word for word in found.groups() if word), "") if found else ""
    return _GRAVE.get(word.lower())


class ReadLine(msgspec.Struct, frozen=True):
    """A recognised line of a text: `line` counts from 1, `companion_of` is the line of its event."""

    line: int
    companion_of: int | None
    what: KernelLine


def read_lines(lines: Iterable[str]) -> Iterator[ReadLine]:
    """The recognised lines of a whole text. A companion belongs to the nearest earlier SXid of its device and code."""
    events: dict[tuple[str | None, int | None], int] = {}
    for number, text in enumerate(lines, 1):
        what = recognise(text)
        if what is None:
            continue
        if what.family == "sxid":
            events[what.pci, what.code] = number
        yield ReadLine(number, events.get((what.pci, what.code)) if what.family == "companion" else None, what)
