"""The aggregator's configuration: what is taken, and what is refused with what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from aggregator.config import load
from headway.options import ConfigError

TLS = ["--tls-cert", "c.pem", "--tls-key", "k.pem"]


def test_defaults_serve_agents_over_tls_and_the_api_to_this_machine_only() -> None:
    config, _ = load(TLS, {})
    assert config.listen == ("0.0.0.0", 9470)
    assert config.api_listen == ("127.0.0.1", 9480)
    assert (config.tls_cert, config.insecure, config.namespace) == (Path("c.pem"), False, "headway")
    assert config.policy is None


def test_variables_stand_in_for_arguments_and_arguments_win() -> None:
    environment = {
        "HEADWAY_AGGREGATOR_NAMESPACE": "other",
        "HEADWAY_AGGREGATOR_DRY_RUN": "true",
        "HEADWAY_AGGREGATOR_API_LISTEN": "127.0.0.1:1",
        "HEADWAY_AGGREGATOR_SERVICE_HOST": "10.0.0.1",
        "HEADWAY_AGGREGATOR_PORT_9470_TCP_ADDR": "10.0.0.1",
        "HOME": "/root",
    }
    config, _ = load([*TLS, "--api-listen", "[::1]:2"], environment)
    assert (config.namespace, config.dry_run, config.api_listen) == ("other", True, ("::1", 2))


@pytest.mark.parametrize(
    ("arguments", "environment", "says"),
    [
        ([], {}, "give --tls-cert"),
        (["--tls-cert", "c"], {}, "give --tls-cert FILE and --tls-key FILE"),
        (["--insecure"], {}, "only 127.0.0.1"),
        (["--insecure", "--listen", "127.0.0.1:0", *TLS], {}, "exclude each other"),
        (["--insecure", "--listen", "127.0.0.1:0", "--api-tls"], {}, "--api-tls needs"),
        ([*TLS, "--listen", "9470"], {}, "HOST:PORT"),
        ([*TLS, "--listen", "a:99999"], {}, "HOST:PORT"),
        ([*TLS, "--namespace", "Not_One"], {}, "--namespace 'Not_One'"),
        ([*TLS, "--domain", "head way"], {}, "--domain 'head way'"),
        (TLS, {"HEADWAY_AGGREGATOR_NAMESPCE": "x"}, "unknown variable HEADWAY_AGGREGATOR_NAMESPCE; known are"),
        (TLS, {"HEADWAY_AGGREGATOR_DRY_RUN": "yes"}, "true or false"),
        (TLS, {"HEADWAY_AGGREGATOR_LOG_LEVEL": "loud"}, "one of debug"),
    ],
)
def test_what_is_wrong_is_refused_and_says_what_to_do(
    arguments: list[str], environment: dict[str, str], says: str
) -> None:
    with pytest.raises(ConfigError) as excinfo:
        load(arguments, environment)
    assert says in str(excinfo.value)


def test_print_config_names_every_setting() -> None:
    config, _ = load(TLS, {})
    assert {line.split(" = ")[0] for line in config.lines()} == set(config.__dataclass_fields__)
