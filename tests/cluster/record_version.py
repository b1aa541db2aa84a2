#!/usr/bin/env python3
"""Writes the README's table of Kubernetes versions from a cluster run: `record_version.py JUNIT_XML [VERSION]`.

The row (version, date, tests passed) replaces the one of the same minor version, between the markers
`<!-- kube-versions:begin -->` and `<!-- kube-versions:end -->`. A run with a failure, or without a passed test, is not
recorded. The version is the one that the API server of that run reported; VERSION, where given, must agree with it.
"""

from __future__ import annotations

import argparse
import re
import sys
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from pathlib import Path

README = Path(__file__).resolve().parent.parent.parent / "README.md"
BEGIN, END = "<!-- kube-versions:begin -->", "<!-- kube-versions:end -->"
HEADER = ["| Kubernetes | date | tests passed |", "|---|---|---|"]


class RecordError(Exception):
    """Why nothing was recorded."""


@dataclass(frozen=True)
class Row:
    """One line of the table: full version without "v", ISO date, number of tests passed."""

    version: str
    date: str
    passed: int

    @property
    def minor(self) -> tuple[int, ...]:
        """(1, 37) for 1.37.2."""
        return tuple(map(int, self.version.split(".")[:2]))


def read_junit(text: str) -> Row:
    """The row of a run from its JUnit XML as pytest writes it. Raises RecordError."""
    try:
        root = ET.fromstring(text)
    except ET.ParseError as error:
        raise RecordError(f"not JUnit XML: {error}") from error
    suites = list(root.iter("testsuite"))
    cases = list(root.iter("testcase"))
    bad = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    if bad:
        names = ", ".join(case.get("name", "?") for case in bad[:5])
        raise RecordError(f"{len(bad)} tests failed ({names}): a failed run is not recorded")
    versions = [prop.get("value", "") for prop in root.iter("property") if prop.get("name") == "kube_version"]
    match = re.match(r"v(\d+\.\d+\.\d+)", versions[0]) if versions else None
    passed = sum(case.find("skipped") is None for case in cases)
    if match is None or not passed or not suites:
        raise RecordError("no test ran against a control plane (no passed test, or no property kube_version)")
    return Row(match[1], suites[0].get("timestamp", "")[:10], passed)


def update(readme: str, row: Row) -> str:
    """The README with this row in its table, newest version first. Raises RecordError."""
    before, begin, rest = readme.partition(BEGIN)
    table, end, after = rest.partition(END)
    if not (begin and end):
        raise RecordError(f"no {BEGIN} … {END} in it: put the two markers where the table belongs")
    rows = [Row(m[1], m[2], int(m[3])) for m in re.finditer(r"^\| (\d+\.\d+\.\d+) \| (\S+) \| (\d+) \|$", table, re.M)]
    rows = sorted([row, *(old for old in rows if old.minor != row.minor)], key=lambda one: one.minor, reverse=True)
    lines = [*HEADER, *(f"| {one.version} | {one.date} | {one.passed} |" for one in rows)]
    return "\n".join([before + begin, *lines, end + after])


def main() -> int:
    """The command; exit status 1 with a message when nothing was recorded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("junit", type=Path, help="the file of pytest --junit-xml")
    parser.add_argument("version", nargs="?", help="1.37 or 1.37.2; checked against the version that ran")
    parser.add_argument("--readme", type=Path, default=README)
    arguments = parser.parse_args()
    try:
        row = read_junit(arguments.junit.read_text())
        asked = (arguments.version or row.version).removeprefix("v")
        if f"{row.version}.".startswith(f"{asked}.") is False:
            raise RecordError(f"the run was against {row.version}, not {asked}")
        arguments.readme.write_text(update(arguments.readme.read_text(), row))
    except (RecordError, OSError) as error:
        print(f"record_version: {error}", file=sys.stderr)
        return 1
    print(f"{arguments.readme.name}: Kubernetes {row.version}, {row.date}, {row.passed} tests passed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
