"""The agent's configuration: where values come from, and what is said about wrong ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.config import load
from headway.options import ConfigError

WS = "wss://aggregator-0:8443/v1/agent"


def test_arguments_win_over_variables_and_variables_over_defaults() -> None:
    environment = {
        "NODE_NAME": "node-a",
        "HEADWAY_AGENT_STATE_DIR": "/from/variable",
        "HEADWAY_AGENT_KERNEL_LOG": "journald",
        "HEADWAY_AGENT_AGGREGATOR": f"{WS},wss://aggregator-1:8443/v1/agent",
        "HEADWAY_AGENT_INSECURE": "true",
        "HOME": "/root",
    }
    config, _ = load(["--kernel-log", "file:/var/log/kern.log"], environment)
    assert config.node == "node-a"
    assert config.state_dir == Path("/from/variable")
    assert config.kernel_log == ("file", Path("/var/log/kern.log"))
    assert config.aggregators == (WS, "wss://aggregator-1:8443/v1/agent")
    assert config.insecure
    assert config.nvml_socket == Path("/from/variable/nvml.sock")
    assert config.reconnect_max_s == 30.0
    config, _ = load(["--aggregator", WS], environment)
    assert config.aggregators == (WS,), "given arguments replace the variable's list"


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        ([], {}, "no node name"),
        (["--node", "UPPER"], {}, "not a Kubernetes node name"),
        (["--node", "a"], {"HEADWAY_AGENT_STATE_DIRR": "x"}, "HEADWAY_AGENT_STATE_DIR,"),
        (["--node", "a"], {"HEADWAY_AGENT_NVML": "perhaps"}, "one of start, find, off"),
        (["--node", "a"], {"HEADWAY_AGENT_INSECURE": "1"}, "true or false"),
        (["--node", "a", "--aggregator", "ws://h:1/x"], {}, "without TLS"),
        (["--node", "a", "--aggregator", "https://h:1/x"], {}, "wss://HOST:PORT/PATH"),
        (["--node", "a", *["--aggregator", WS] * 2], {}, "same URL twice"),
        (["--node", "a", *(f"--aggregator={WS}{n}" for n in range(4))], {}, "at most 3"),
        (["--node", "a", "--kernel-log", "file:"], {}, "kmsg, kmsg:PATH, journald, file:PATH or off"),
        (["--node", "a", "--kernel-log", "/var/log/kern.log"], {}, "kmsg, kmsg:PATH, journald"),
        (["--node", "a", "--pci-interval-s", "0"], {}, "seconds from 1 to 3600"),
        (["--node", "a", "--nvml-probe-s", "nan"], {}, "seconds from 0.5 to 600"),
        (["--node", "a", "--listen", "9400"], {}, "HOST:PORT"),
        (["--node", "a", "--state-dir", "/" + "d" * 100], {}, "give --nvml-socket a shorter one"),
        (["--node", "a", "--boot-id", "a/b"], {}, "letters, digits"),
    ],
)
def test_wrong_use_is_named(arguments: list[str], environment: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(arguments, environment)


def test_unknown_argument_ends_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        load(["--node", "a", "--stat-dir", "x"], {})
    assert ended.value.code == 2
    assert "--stat-dir" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name",
    ["SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_METRICS", "PORT", "PORT_9400_TCP", "PORT_9400_TCP_ADDR"],
)
def test_variables_of_a_service_named_like_us_are_not_ours(name: str) -> None:
    """Kubernetes sets them for each Service of the namespace."""
    load(["--node", "a"], {f"HEADWAY_AGENT_{name}": "tcp://10.0.0.1:9400"})


def test_printed_configuration_names_every_value() -> None:
    config, _ = load(["--node", "a", "--listen", "127.0.0.1:9400"], {})
    lines = dict(line.split(" = ", 1) for line in config.lines())
    assert lines["node"] == "a"
    assert lines["listen"] == "127.0.0.1 9400"
    assert lines["kernel_log"] == "kmsg /dev/kmsg"
    assert lines["token_file"] == "-"
