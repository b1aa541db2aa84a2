"""Who may connect: tokens against a reviewer that answers as the API server does, and the loopback-only exception."""

from __future__ import annotations

import pytest

from aggregator.ingest.auth import DENIED_S, Identity, Insecure, ReviewFailed, Tokens
from aggregator.ingest.pods import MAX_GONE, Pods
from aggregator.kube.review import Denied, Reviewed

WALL_S = 1_800_000_000.0


def reviewed(
    node: str = "n1", uid: str = "uid-1", expires_s: float = WALL_S + 600, account: str = "headway-agent"
) -> Reviewed:
    return Reviewed(node, "node-uid", "agent-x", uid, "headway", account, expires_s)


class Api:
    """Answers by token, and counts the questions."""

    def __init__(self, answers: dict[str, Reviewed | Denied]) -> None:
        self.answers = answers
        self.asked: list[str] = []
        self.wall_s = WALL_S
        self.counted: list[str] = []
        self.pods = Pods()
        self.tokens = Tokens(
            self.review,
            self.pods,
            namespace="headway",
            service_account="headway-agent",
            count=self.counted.append,
            wall=lambda: self.wall_s,
        )

    async def review(self, token: str) -> Reviewed | Denied:
        self.asked.append(token)
        if token not in self.answers:
            raise ReviewFailed("no answer")
        return self.answers[token]

    async def identify(self, token: str) -> Identity | Denied:
        return await self.tokens.identify(f"Bearer {token}", "10.0.0.7")


async def test_a_good_token_names_node_pod_and_how_long_it_lasts() -> None:
    api = Api({"t": reviewed()})
    assert await api.identify("t") == Identity("n1", "agent-x", "uid-1", 600.0)
    assert api.counted == ["accepted"]


@pytest.mark.parametrize("header", [None, "", "t", "Basic t", "Bearer ", "Bearer " + "x" * 20_000])
async def test_without_a_bearer_token_nobody_is_asked(header: str | None) -> None:
    api = Api({"t": reviewed()})
    assert isinstance(await api.tokens.identify(header, "10.0.0.7"), Denied)
    assert api.asked == []


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (Denied("not for audience"), "audience"),
        (reviewed(account="default"), "headway/default is not"),
        (reviewed(node=""), "not bound"),
        (reviewed(uid=""), "not bound"),
        (reviewed(expires_s=WALL_S - 1), "expired"),
    ],
)
async def test_what_the_review_does_not_support_is_denied(answer: Reviewed | Denied, why: str) -> None:
    got = await Api({"t": answer}).identify("t")
    assert isinstance(got, Denied)
    assert why in got.why


async def test_one_review_serves_all_connections_of_a_token_while_its_pod_is_seen_alive() -> None:
    api = Api({"t": reviewed()})
    await api.identify("t")
    api.pods.saw("uid-1", WALL_S)
    for _ in range(5):
        assert isinstance(await api.identify("t"), Identity)
    assert api.asked == ["t"]
    api.wall_s += 601
    assert isinstance(await api.identify("t"), Denied)
    assert api.asked == ["t", "t"], "a token at its end is asked for anew"


async def test_an_answer_is_not_used_again_for_a_pod_that_was_not_seen() -> None:
    api = Api({"t": reviewed()})
    await api.identify("t")
    await api.identify("t")
    assert api.asked == ["t", "t"]


async def test_a_pod_that_is_gone_is_denied_though_the_api_server_still_says_yes() -> None:
    api = Api({"t": reviewed()})
    api.pods.saw("uid-1", WALL_S)
    assert isinstance(await api.identify("t"), Identity)
    api.pods.gone("uid-1")
    got = await api.identify("t")
    assert isinstance(got, Denied)
    assert "gone" in got.why


async def test_a_denied_token_is_not_asked_for_again_at_once() -> None:
    api = Api({"t": Denied("no")})
    await api.identify("t")
    await api.identify("t")
    assert len(api.asked) == 1
    api.wall_s += DENIED_S + 0.1
    await api.identify("t")
    assert len(api.asked) == 2


async def test_no_answer_is_neither_yes_nor_no_and_is_not_remembered() -> None:
    api = Api({})
    for _ in range(2):
        with pytest.raises(ReviewFailed):
            await api.identify("t")
    assert api.counted == ["failed", "failed"]


@pytest.mark.parametrize(("peer", "allowed"), [("127.0.0.1", True), ("::1", True), ("10.0.0.7", False)])
async def test_without_tokens_only_this_machine_may_connect(peer: str, allowed: bool) -> None:
    assert isinstance(await Insecure().identify(None, peer), Identity) == allowed


def test_pods_that_are_gone_are_remembered_within_a_bound() -> None:
    pods = Pods()
    told: list[str] = []
    pods.on_gone = told.append
    assert pods.alive("a") is None
    pods.saw("a", 1.0)
    assert (pods.alive("a"), pods.created_s("a")) == (True, 1.0)
    pods.gone("a")
    assert (pods.alive("a"), pods.created_s("a"), told) == (False, None, ["a"])
    for index in range(MAX_GONE):
        pods.gone(str(index))
    assert pods.alive("a") is None
