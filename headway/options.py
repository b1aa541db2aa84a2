"""What the command lines of both halves share: variables that stand in for arguments, HOST:PORT, the version."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from importlib import metadata

#: Kubernetes sets such variables for each Service of the namespace (service links); they are not ours.
_SERVICE_LINK = re.compile(r"(_|^)(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)$")


class ConfigError(Exception):
    """What is wrong, where, and what to do."""


def version() -> str:
    """The installed version."""
    return metadata.version("headway")


def defaults_from(p: argparse.ArgumentParser, environment: Mapping[str, str], prefix: str) -> None:
    """Let variables (`prefix` + option in capitals) stand in for arguments that are not given.

    Those of an option that may be given several times are split at commas and set as `<dest>_variable`: as its default
    they would be added to instead of overridden. Raises ConfigError for a variable that names no option.
    """
    actions = {action.dest: action for action in p._actions if action.dest not in ("help", "version", "print_config")}
    for variable, value in environment.items():
        if not variable.startswith(prefix):
            continue
        name = variable[len(prefix) :]
        action = actions.get(name.lower())
        if action is None:
            if _SERVICE_LINK.search(name):
                continue
            known = ", ".join(sorted(prefix + dest.upper() for dest in actions))
            raise ConfigError(f"unknown variable {variable}; known are {known}")
        if action.choices is not None and value not in action.choices:
            raise ConfigError(f"{variable}={value!r}: one of {', '.join(action.choices)}")
        if isinstance(action, argparse._StoreTrueAction):
            if value not in ("true", "false"):
                raise ConfigError(f"{variable}={value!r}: true or false")
            p.set_defaults(**{action.dest: value == "true"})
        elif isinstance(action, argparse._AppendAction):
            p.set_defaults(**{f"{action.dest}_variable": [part for part in value.split(",") if part]})
        else:
            p.set_defaults(**{action.dest: value})


def host_port(option: str, text: str) -> tuple[str, int]:
    """`127.0.0.1:9400`; port 0 takes a free one. Raises ConfigError."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"{option} {text!r}: HOST:PORT, e.g. 127.0.0.1:9400 (port 0 takes a free one)")
    return host.strip("[]"), int(port)
