"""The real API server passes the contract of tests/contract/kube_contract.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster.client import ApiClient
from tests.cluster.harness import ControlPlane
from tests.contract.kube_contract import Kube, KubeContract


@pytest.fixture(scope="module")
def kube(control_plane: ControlPlane) -> Iterator[Kube]:
    server, ca_file, token = control_plane.server, control_plane.ca_file, control_plane.admin_token
    client = ApiClient(server, ca_file, token)
    yield Kube(server, ca_file, token, client, control_plane.sign_token)
    client.close()


class TestReal(KubeContract):
    pass
