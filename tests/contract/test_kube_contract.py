"""The embedded Kubernetes API passes the contract that the real one passes (tests/cluster/test_kube_contract.py)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from fakes.kube.embedded import EmbeddedKube
from tests.cluster.client import ApiClient
from tests.contract.kube_contract import NODES, Kube, KubeContract, make_node

HISTORY = 200


@pytest.fixture(scope="module")
def kube(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kube]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def made() -> EmbeddedKube:
        return await EmbeddedKube(tmp_path_factory.mktemp("kube"), history=HISTORY, bookmark_s=1.0).start()

    server = asyncio.run_coroutine_threadsafe(made(), loop).result(20)
    client = ApiClient(server.url, server.ca_file, server.admin_token)
    yield Kube(server.url, server.ca_file, server.admin_token, client, server.sign_token)
    client.close()
    asyncio.run_coroutine_threadsafe(server.stop(), loop).result(20)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)
    loop.close()


class TestEmbedded(KubeContract):
    def test_a_version_that_is_too_old_is_gone(self, kube: Kube) -> None:
        """410, after which a watcher lists again. The real server forgets changes only after 75 s and more."""
        version = make_node(kube)["metadata"]["resourceVersion"]
        name = make_node(kube)["metadata"]["name"]
        for number in range(HISTORY):
            kube.request("PATCH", f"{NODES}/{name}", {"metadata": {"labels": {"n": str(number)}}})
        said = kube.watch(NODES, f"resourceVersion={version}")
        assert (said[0]["type"], said[0]["object"]["code"]) == ("ERROR", 410)
        assert said[0]["object"]["reason"] == "Expired"
