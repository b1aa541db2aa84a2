"""Options of every test run, and the rule that in CI (CI=true) a skip fails the run, save tests that need a GPU."""

from __future__ import annotations

import os

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--kube-version",
        default=os.environ.get("HEADWAY_KUBE_VERSION") or None,
        help="Kubernetes of the cluster tests: 1.34, 1.35, 1.36, 1.37 or a full version (default: environment variable "
        "HEADWAY_KUBE_VERSION, else the version in KUBEBUILDER_ASSETS, else 1.37)",
    )


class SkipsFail:
    """Collects the skips of a run and turns them into a failing exit status."""

    def __init__(self) -> None:
        self.skipped: list[str] = []

    def _note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        self.skipped.append(f"{report.nodeid}: {reason}")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and not hasattr(report, "wasxfail") and "gpu" not in report.keywords:
            self._note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self._note(report)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.skipped and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.skipped:
            terminalreporter.section("skipped, which fails the run where CI=true", red=True)
            for line in self.skipped:
                terminalreporter.line(line)


def pytest_configure(config: pytest.Config) -> None:
    if os.environ.get("CI", "").lower() == "true":
        config.pluginmanager.register(SkipsFail(), "skips-fail")
