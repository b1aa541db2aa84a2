"""The embedded Kubernetes API passes the contract that the real one passes (tests/cluster/test_kube_contract.py)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from fakes.kube.embedded import EmbeddedKube
from tests.cluster.client import ApiClient
from tests.contract.kube import NODES, Kube, make_node
from tests.contract.kube_contract import KubeContract

HISTORY = 200


@pytest.fixture(scope="module")
def kube(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kube]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def made() -> EmbeddedKube:
        return await EmbeddedKube(tmp_path_factory.mktemp("kube"), history=HISTORY).start()

    server = asyncio.run_coroutine_threadsafe(made(), loop).result(20)
    client = ApiClient(server.url, server.ca_file, server.admin_token)
    yield Kube(server.url, server.ca_file, server.admin_token, client, server.sign_token)
    client.close()
    asyncio.run_coroutine_threadsafe(server.stop(), loop).result(20)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)
    loop.close()


@pytest.fixture
def forgetful(kube: Kube) -> tuple[Kube, str]:
    """A server, and a version of before all that it remembers of nodes."""
    node = make_node(kube)["metadata"]
    for number in range(HISTORY + 1):
        kube.request("PATCH", f"{NODES}/{node['name']}", {"metadata": {"labels": {"n": str(number)}}})
    return kube, node["resourceVersion"]


class TestEmbedded(KubeContract):
    pass
