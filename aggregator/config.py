"""The aggregator's configuration: one frozen dataclass from arguments and HEADWAY_AGGREGATOR_* variables."""

from __future__ import annotations

import argparse
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from headway.names import DEFAULT_DOMAIN, DEFAULT_NAMESPACE, POLICY_CONFIGMAP, Names
from headway.options import ConfigError, defaults_from, host_port, version

ENV_PREFIX = "HEADWAY_AGGREGATOR_"
_DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_DOMAIN = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True, slots=True)
class AggregatorConfig:
    listen: tuple[str, int]
    api_listen: tuple[str, int]
    api_tls: bool
    tls_cert: Path | None
    tls_key: Path | None
    insecure: bool
    kubeconfig: Path | None
    context: str | None
    namespace: str
    agent_service_account: str
    identity: str
    names: Names
    policy: Path | None
    state_dir: Path | None
    record: Path | None
    trace: Path | None
    dry_run: bool
    log_level: str

    def lines(self) -> list[str]:
        """For --print-config: one `name = value` a line."""
        return [f"{field.name} = {_shown(getattr(self, field.name))}" for field in fields(self)]


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="headway-aggregator",
        description="Takes the agents' reports, judges the GPUs, and publishes taints, conditions and annotations to "
        "Kubernetes, as the policy allows.",
        epilog=f"Every option can be given as a variable {ENV_PREFIX}<OPTION>, e.g. {ENV_PREFIX}STATE_DIR; arguments "
        "win. Exit codes: 0 stopped by a signal, 2 wrong use, 1 an error.",
        allow_abbrev=False,
    )
    add = p.add_argument
    add("--listen", metavar="HOST:PORT", default="0.0.0.0:9470", help="agents connect here (default: %(default)s)")
    add("--tls-cert", metavar="FILE", help="certificate chain for --listen, PEM; read again when it changes")
    add("--tls-key", metavar="FILE", help="its private key, PEM")
    add(
        "--insecure",
        action="store_true",
        help="for the demo alone: no TLS and no tokens; only this machine may connect, and any process of it can lie",
    )
    add(
        "--api-listen",
        metavar="HOST:PORT",
        default="127.0.0.1:9480",
        help="read-only API, /healthz, /readyz and /metrics (default: %(default)s)",
    )
    add("--api-tls", action="store_true", help="serve the API over TLS too, with the same certificate")
    add(
        "--kubeconfig", metavar="FILE", help="how to reach Kubernetes (default: in a pod its own account, else ~/.kube)"
    )
    add("--context", metavar="NAME", help="context of the kubeconfig")
    add(
        "--namespace",
        metavar="NAME",
        default=DEFAULT_NAMESPACE,
        help="where headway is installed: Lease, policy and stop are there (default: %(default)s)",
    )
    add(
        "--agent-service-account",
        metavar="NAME",
        default="headway-agent",
        help="the account in that namespace whose tokens are taken (default: %(default)s)",
    )
    add(
        "--identity",
        metavar="NAME",
        default=socket.gethostname(),
        help="name of this replica in the Lease (default: the host's name)",
    )
    add("--domain", metavar="DOMAIN", default=DEFAULT_DOMAIN, help="domain of all keys written (default: %(default)s)")
    add("--fault-taint-key", metavar="KEY", default="", help="whole key instead of DOMAIN/fault")
    add("--slow-taint-key", metavar="KEY", default="", help="whole key instead of DOMAIN/slow")
    add(
        "--policy",
        metavar="FILE",
        help=f"policy from a file, read again when it changes (default: the ConfigMap {POLICY_CONFIGMAP})",
    )
    add("--state-dir", metavar="DIR", help="keep a snapshot there, each minute and at stop (default: none is kept)")
    add("--record", metavar="FILE", help="append every input of the engine, for `headway replay-inputs`")
    add("--trace", metavar="FILE", help="append the times of each write, from the event's arrival to the answer")
    add("--dry-run", action="store_true", help="print patches as JSON lines instead of sending them; takes no Lease")
    add(
        "--log-level",
        metavar="LEVEL",
        default="info",
        choices=("debug", "info", "warning", "error"),
        help="debug, info, warning or error (default: %(default)s)",
    )
    add("--print-config", action="store_true", help="print the configuration in force and exit")
    add("--version", action="version", version=f"headway-aggregator {version()}")
    return p  # fmt: skip


def load(arguments: Sequence[str], environment: Mapping[str, str]) -> tuple[AggregatorConfig, argparse.Namespace]:
    """Raises ConfigError; argparse itself ends the process (exit code 2) on unknown arguments and on --help."""
    p = parser()
    defaults_from(p, environment, ENV_PREFIX)
    given = p.parse_args(arguments)
    listen = host_port("--listen", given.listen)
    _check_security(given, listen)
    for option, name in (("--namespace", given.namespace), ("--agent-service-account", given.agent_service_account)):
        if not _DNS_LABEL.fullmatch(name):
            raise ConfigError(f"{option} {name!r}: lower case letters, digits and '-', at most 63")
    if not _DOMAIN.fullmatch(given.domain):
        raise ConfigError(f"--domain {given.domain!r}: a DNS name, e.g. {DEFAULT_DOMAIN}")
    config = AggregatorConfig(
        listen=listen,
        api_listen=host_port("--api-listen", given.api_listen),
        api_tls=given.api_tls,
        tls_cert=_path(given.tls_cert),
        tls_key=_path(given.tls_key),
        insecure=given.insecure,
        kubeconfig=_path(given.kubeconfig),
        context=given.context,
        namespace=given.namespace,
        agent_service_account=given.agent_service_account,
        identity=given.identity,
        names=Names(given.domain, given.fault_taint_key, given.slow_taint_key),
        policy=_path(given.policy),
        state_dir=_path(given.state_dir),
        record=_path(given.record),
        trace=_path(given.trace),
        dry_run=given.dry_run,
        log_level=given.log_level,
    )
    return config, given


def _check_security(given: argparse.Namespace, listen: tuple[str, int]) -> None:
    certificate = given.tls_cert and given.tls_key
    if given.insecure:
        if listen[0] not in _LOOPBACK:
            raise ConfigError(f"--insecure with --listen {given.listen}: only 127.0.0.1, e.g. --listen 127.0.0.1:9470")
        if given.tls_cert or given.tls_key:
            raise ConfigError("--insecure and --tls-cert/--tls-key exclude each other")
    elif not certificate:
        raise ConfigError("agents report over TLS: give --tls-cert FILE and --tls-key FILE (or --insecure, demo only)")
    if given.api_tls and not certificate:
        raise ConfigError("--api-tls needs --tls-cert and --tls-key")


def _path(text: str | None) -> Path | None:
    return Path(text) if text else None


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return ":".join(str(part) for part in value)
    if isinstance(value, Names):
        return f"{value.domain} fault={value.fault_taint} slow={value.slow_taint}"
    return "-" if value is None else str(value)
