"""The control plane that the cluster tests share, and the marks that choose which of them run.

Everything in this folder is marked `cluster`. `@pytest.mark.kube(since="1.37")` or `(until="1.36")` names the versions
a test is for; on others it is deselected, not skipped. Nodes and namespaces are shared by all tests of a run: take
names of your own (fixture `unique`).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster import build_kube
from tests.cluster.fake_kubelet import FakeKubelet
from tests.cluster.harness import ControlPlane, NotBuilt
from tests.cluster.real_kubelet import RealKubelet

HERE = Path(__file__).resolve().parent


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "kube(since=None, until=None): Kubernetes minor versions this test is for")


def _number(minor: str) -> tuple[int, ...]:
    return tuple(map(int, minor.split(".")))


def _is_for(item: pytest.Item, minor: tuple[int, ...]) -> bool:
    for mark in item.iter_markers("kube"):
        since, until = mark.kwargs.get("since"), mark.kwargs.get("until")
        if (since and minor < _number(since)) or (until and minor > _number(until)):
            return False
    return True


@pytest.hookimpl(tryfirst=True)  # before -m is applied
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    mine = [item for item in items if HERE in item.path.parents]
    if not mine:
        return
    for item in mine:
        item.add_marker("cluster")
    try:
        minor = _number(build_kube.chosen_minor(config.getoption("--kube-version")))
    except build_kube.BuildError as error:
        raise pytest.UsageError(str(error)) from error
    other = [item for item in mine if not _is_for(item, minor)]
    if other:
        config.hook.pytest_deselected(items=other)
        items[:] = [item for item in items if item not in other]


@pytest.fixture(scope="session")
def control_plane(
    pytestconfig: pytest.Config, record_testsuite_property: Callable[[str, object], None]
) -> Iterator[ControlPlane]:
    """The control plane of this run, started once. Users, nodes and namespaces are shared."""
    try:
        plane = ControlPlane(pytestconfig.getoption("--kube-version"))
    except NotBuilt as missing:
        pytest.skip(str(missing))
    with plane:
        record_testsuite_property("kube_version", plane.version)
        yield plane


@pytest.fixture(scope="session")
def fake_kubelet(control_plane: ControlPlane) -> Iterator[FakeKubelet]:
    """Looks after the fake nodes created through it."""
    with FakeKubelet(control_plane) as kubelet:
        yield kubelet


@pytest.fixture(scope="session")
def real_kubelet(control_plane: ControlPlane) -> Iterator[RealKubelet]:
    """A real kubelet, node "kubelet-0"."""
    if reason := RealKubelet.unavailable():
        pytest.skip(reason)
    try:
        kubelet = RealKubelet(control_plane)
    except NotBuilt as missing:
        pytest.skip(str(missing))
    with kubelet:
        yield kubelet


@pytest.fixture
def unique() -> Callable[[str], str]:
    """Makes names that no other test uses: unique("node") gives "node-3f9a1c"."""
    return lambda prefix: f"{prefix}-{secrets.token_hex(3)}"


@pytest.fixture
def namespace(control_plane: ControlPlane, unique: Callable[[str], str]) -> Iterator[str]:
    """A namespace of the test's own, with its default ServiceAccount; deleted afterwards, without waiting."""
    name = control_plane.create_namespace(unique("test"))
    yield name
    control_plane.delete(f"/api/v1/namespaces/{name}")
