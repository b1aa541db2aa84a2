"""The tools around the cluster tests: choosing versions, recording a run in the README, and skips that fail in CI."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster import record_version

TESTS = Path(__file__).resolve().parent.parent
BUILD = TESTS / "cluster" / "build_kube.py"

RUN = """<testsuites><testsuite name="pytest" timestamp="2026-11-30T23:59:01.5+00:00">
<properties><property name="kube_version" value="v1.36.3"/></properties>
<testcase classname="a" name="t1"/><testcase classname="a" name="t2"/>
<testcase classname="a" name="t3"><skipped message="no GPU"/></testcase></testsuite></testsuites>"""

README = f"""# x
{record_version.BEGIN}
{record_version.END}
tail
"""


def test_a_run_becomes_a_row_and_replaces_the_row_of_its_minor() -> None:
    text = record_version.update(README, record_version.read_junit(RUN))
    text = record_version.update(text, record_version.Row("1.37.2", "2026-12-01", 40))
    text = record_version.update(text, record_version.Row("1.36.4", "2026-12-02", 41))
    header = "| Kubernetes | date | tests passed |\n|---|---|---|\n"
    rows = "| 1.37.2 | 2026-12-01 | 40 |\n| 1.36.4 | 2026-12-02 | 41 |\n"
    assert text == README.replace(record_version.END, header + rows + record_version.END)


def test_row_of_a_run_counts_only_what_passed() -> None:
    assert record_version.read_junit(RUN) == record_version.Row("1.36.3", "2026-11-30", 2)


@pytest.mark.parametrize(
    ("junit", "reason"),
    [
        (RUN.replace('name="t2"/>', 'name="t2"><failure message="no"/></testcase>'), r"1 tests failed \(t2\)"),
        (RUN.replace("kube_version", "other"), "no test ran against a control plane"),
        ("<testsuites/>", "no test ran against a control plane"),
        ("not xml", "not JUnit XML"),
    ],
)
def test_other_runs_are_not_recorded(junit: str, reason: str) -> None:
    with pytest.raises(record_version.RecordError, match=reason):
        record_version.read_junit(junit)


def test_readme_without_the_markers_is_left_alone() -> None:
    with pytest.raises(record_version.RecordError, match="kube-versions:begin"):
        record_version.update("# x\n", record_version.Row("1.37.2", "2026-12-01", 40))


# --- build_kube -------------------------------------------------------------------------------------------------------


def check(cache: Path, assets: Path | None, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`build_kube.py --check` with an empty cache: tells what it found and builds nothing."""
    env = {key: value for key, value in os.environ.items() if key not in ("KUBEBUILDER_ASSETS", "HEADWAY_KUBE_VERSION")}
    env["XDG_CACHE_HOME"] = str(cache)
    if assets:
        env["KUBEBUILDER_ASSETS"] = str(assets)
    command = [sys.executable, str(BUILD), "--check", *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=30, check=False)


@pytest.fixture
def assets(tmp_path: Path) -> Path:
    """A KUBEBUILDER_ASSETS folder of 1.36.1, without the parts that such folders lack."""
    folder = tmp_path / "assets"
    folder.mkdir()
    for name in ("etcd", "kube-apiserver", "kubectl"):
        (folder / name).write_text("#!/bin/sh\necho Kubernetes v1.36.1\n")
        (folder / name).chmod(0o755)
    return folder


@pytest.mark.parametrize("asked", [[], ["1.36"], ["1.36.1"], ["v1.36.1"]])
def test_assets_are_used_where_their_version_fits(tmp_path: Path, assets: Path, asked: list[str]) -> None:
    built = tmp_path / "headway" / "kube" / "v1.36.1"
    built.mkdir(parents=True)
    (built / "kube-scheduler").symlink_to("/bin/true")
    done = check(tmp_path, assets, *asked)
    assert done.returncode == 1
    found = dict(line.split() for line in done.stdout.splitlines())
    assert found == {name: str(assets / name) for name in ("etcd", "kube-apiserver", "kubectl")} | {
        "kube-scheduler": str(built / "kube-scheduler")
    }
    assert done.stderr.splitlines() == ["kube-controller-manager missing", "kubelet missing", "fakecri missing"]


def test_assets_of_another_version_are_not_mixed_in(tmp_path: Path, assets: Path) -> None:
    done = check(tmp_path, assets, "1.35")
    assert done.stdout == ""
    assert "kube-apiserver missing" in done.stderr


@pytest.mark.parametrize("asked", ["1.2", "latest", "1.37.x", ""])
def test_unknown_versions_are_refused_with_what_there_is(tmp_path: Path, asked: str) -> None:
    done = check(tmp_path, None, asked)
    assert done.returncode == 1
    assert "1.34, 1.35, 1.36, 1.37" in done.stderr


# --- skips in CI ------------------------------------------------------------------------------------------------------

SUITE = """
import pytest
def test_passes(): pass
@pytest.mark.gpu
def test_gpu(): pytest.skip("no GPU")
@pytest.mark.xfail
def test_known(): raise ValueError
"""


@pytest.mark.parametrize(
    ("suite", "ci", "status"),
    [
        (SUITE, "true", 0),
        (SUITE + "def test_tool(): pytest.skip('no compiler')", "true", 1),
        (SUITE + "def test_tool(): pytest.skip('no compiler')", "", 0),
        ("import pytest\npytest.skip('no compiler', allow_module_level=True)", "true", 1),
    ],
)
def test_in_ci_a_skip_fails_the_run_unless_it_needs_a_gpu(tmp_path: Path, suite: str, ci: str, status: int) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    (tmp_path / "conftest.py").write_text((TESTS / "conftest.py").read_text())
    (tmp_path / "test_it.py").write_text(suite + "\n")
    (tmp_path / "test_other.py").write_text("def test_passes(): pass\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q"]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "CI": ci}, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == status, done.stdout
    assert ("no compiler" in done.stdout.partition("fails the run")[2]) is (status == 1)
