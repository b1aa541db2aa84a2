"""The agent's configuration: one frozen dataclass from arguments and HEADWAY_AGENT_* variables. Unknown = error."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from urllib.parse import urlsplit

from headway.options import ConfigError, defaults_from, host_port, version

ENV_PREFIX = "HEADWAY_AGENT_"
#: Sessions that one agent holds: a leader, a standby, and one more during a move.
MAX_AGGREGATORS = 3
#: unix(7): sun_path holds 108 bytes with the final NUL.
MAX_SOCKET_PATH_BYTES = 107
_NODE_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_BOOT_ID = re.compile(r"[0-9a-zA-Z-]{1,64}")


@dataclass(frozen=True, slots=True)
class AgentConfig:
    node: str
    state_dir: Path
    aggregators: tuple[str, ...]
    token_file: Path | None
    ca_file: Path | None
    insecure: bool
    reconnect_max_s: float
    #: ("kmsg", path), ("file", path), ("journald", None) or ("off", None)
    kernel_log: tuple[str, Path | None]
    sysfs: Path
    pci_interval_s: float
    nvml: str
    nvml_socket: Path
    nvml_probe_s: float
    nvml_library: Path | None
    nvml_linger_s: float
    boot_id: str | None
    listen: tuple[str, int] | None
    log_level: str

    def lines(self) -> list[str]:
        """For --print-config: one `name = value` a line."""
        return [f"{field.name} = {_shown(getattr(self, field.name))}" for field in fields(self)]


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="headway-agent",
        description="Watches the GPUs of one node (NVML, kernel log, PCI) and reports to headway's aggregators. "
        "Needs no aggregator to run: what it sees is kept in its journal and sent when one is there.",
        epilog="Every option can be given as a variable HEADWAY_AGENT_<OPTION>, e.g. HEADWAY_AGENT_STATE_DIR; lists "
        "are separated by commas; arguments win. Exit codes: 0 stopped by a signal, 2 wrong use, 1 an error.",
        allow_abbrev=False,
    )
    add = p.add_argument
    # fmt: off
    add("--node", metavar="NAME", help="name of this node in Kubernetes (default: $NODE_NAME)")
    add("--state-dir", metavar="DIR", default="/var/lib/headway",
        help="where the journal lives; one agent per directory (default: %(default)s)")
    add("--aggregator", metavar="URL", action="append",
        help="wss://HOST:PORT/PATH of an aggregator; may be given up to three times")
    add("--token-file", metavar="FILE", help="projected service-account token (audience headway), re-read at connect")
    add("--ca-file", metavar="FILE", help="CA that vouches for the aggregator (default: the system's)")
    add("--insecure", action="store_true", help="for the demo alone: allow ws:// and unknown certificates")
    add("--reconnect-max-s", metavar="S", default="30", help="longest wait before a new try (default: %(default)s)")
    add("--kernel-log", metavar="WHERE", default="kmsg",
        help="kmsg (/dev/kmsg), kmsg:PATH, journald, file:PATH or off (default: %(default)s)")
    add("--sysfs", metavar="DIR", default="/sys", help="root of sysfs (default: %(default)s)")
    add("--pci-interval-s", metavar="S", default="10", help="how often the PCI bus is looked at (default: %(default)s)")
    add("--nvml", metavar="HOW", default="start", choices=("start", "find", "off"),
        help="start: start the NVML process; find: use the one that serves --nvml-socket; off (default: %(default)s)")
    add("--nvml-socket", metavar="PATH", help="socket of the NVML process (default: nvml.sock in the state directory)")
    add("--nvml-probe-s", metavar="S", default="4",
        help="how often NVML must show a sign of life (default: %(default)s)")
    add("--nvml-library", metavar="PATH", help="libnvidia-ml.so.1 for the NVML process (default: the system's)")
    add("--nvml-linger-s", metavar="S", default="300",
        help="the NVML process ends when no agent was there for so long; 0: never (default: %(default)s)")
    add("--boot-id", metavar="ID", help="for tests: stand in for the kernel's boot id")
    add("--listen", metavar="HOST:PORT", help="serve /healthz /readyz /metrics there, e.g. 127.0.0.1:9400")
    add("--log-level", metavar="LEVEL", default="info", choices=("debug", "info", "warning", "error"),
        help="debug, info, warning or error (default: %(default)s)")
    add("--print-config", action="store_true", help="print the configuration in force and exit")
    add("--version", action="version", version=f"headway-agent {version()}")
    # fmt: on
    return p


def load(arguments: Sequence[str], environment: Mapping[str, str]) -> tuple[AgentConfig, argparse.Namespace]:
    """Raises ConfigError; argparse itself ends the process (exit code 2) on unknown arguments and on --help."""
    p = parser()
    p.set_defaults(aggregator_variable=[])
    defaults_from(p, environment, ENV_PREFIX)
    given = p.parse_args(arguments)
    node = given.node or environment.get("NODE_NAME", "")
    if not node:
        raise ConfigError("no node name: give --node NAME, or NODE_NAME (in a pod: fieldRef spec.nodeName)")
    if not _NODE_NAME.fullmatch(node):
        raise ConfigError(f"--node {node!r}: not a Kubernetes node name (lower case letters, digits, '-' and '.')")
    if given.boot_id is not None and not _BOOT_ID.fullmatch(given.boot_id):
        raise ConfigError(f"--boot-id {given.boot_id!r}: 1 to 64 letters, digits and '-'")
    state_dir = Path(given.state_dir)
    nvml_socket = Path(given.nvml_socket) if given.nvml_socket else state_dir / "nvml.sock"
    if given.nvml != "off" and len(os.fsencode(nvml_socket)) > MAX_SOCKET_PATH_BYTES:
        raise ConfigError(f"{nvml_socket}: longer than a Unix socket's path may be; give --nvml-socket a shorter one")
    return (
        AgentConfig(
            node=node,
            state_dir=state_dir,
            aggregators=_aggregators(given.aggregator or given.aggregator_variable, given.insecure),
            token_file=Path(given.token_file) if given.token_file else None,
            ca_file=Path(given.ca_file) if given.ca_file else None,
            insecure=given.insecure,
            reconnect_max_s=_seconds("--reconnect-max-s", given.reconnect_max_s, 0.1, 3600),
            kernel_log=_kernel_log(given.kernel_log),
            sysfs=Path(given.sysfs),
            pci_interval_s=_seconds("--pci-interval-s", given.pci_interval_s, 1, 3600),
            nvml=given.nvml,
            nvml_socket=nvml_socket,
            nvml_probe_s=_seconds("--nvml-probe-s", given.nvml_probe_s, 0.5, 600),
            nvml_library=Path(given.nvml_library) if given.nvml_library else None,
            nvml_linger_s=_seconds("--nvml-linger-s", given.nvml_linger_s, 0, 86_400),
            boot_id=given.boot_id,
            listen=host_port("--listen", given.listen) if given.listen is not None else None,
            log_level=given.log_level,
        ),
        given,
    )


def _aggregators(urls: Sequence[str], insecure: bool) -> tuple[str, ...]:
    if len(urls) > MAX_AGGREGATORS:
        raise ConfigError(f"{len(urls)} aggregators, at most {MAX_AGGREGATORS} can be reported to")
    if len(set(urls)) != len(urls):
        raise ConfigError("--aggregator: the same URL twice")
    for url in urls:
        parts = urlsplit(url)
        if parts.scheme not in ("ws", "wss") or not parts.hostname:
            raise ConfigError(f"--aggregator {url!r}: wss://HOST:PORT/PATH")
        if parts.scheme == "ws" and not insecure:
            raise ConfigError(f"--aggregator {url!r}: without TLS anybody can report; use wss:// (or --insecure)")
    return tuple(urls)


def _kernel_log(where: str) -> tuple[str, Path | None]:
    kind, separator, path = where.partition(":")
    if where in ("journald", "off"):
        return where, None
    if where == "kmsg":
        return "kmsg", Path("/dev/kmsg")
    if separator and path and kind in ("kmsg", "file"):
        return kind, Path(path)
    raise ConfigError(f"--kernel-log {where!r}: kmsg, kmsg:PATH, journald, file:PATH or off")


def _seconds(option: str, text: str, low: float, high: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not low <= value <= high:
        raise ConfigError(f"{option} {text!r}: seconds from {low:g} to {high:g}")
    return value


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return " ".join(str(part) for part in value if part is not None) or "-"
    return "-" if value is None else str(value)
