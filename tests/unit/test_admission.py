"""The budget holds at every moment, also while fences are on their way and ranks change under them."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from aggregator.engine.admission import Admissions
from aggregator.engine.inputs import Condition, NodeView
from aggregator.engine.policy import Pool
from aggregator.engine.policy_load import load_policy

NODES = [f"node-{n}" for n in range(6)]
LIMIT = 2
POLICY = "version: 1\npools:\n- {name: a, nodes: {matchLabels: {a: b}}, level: fence, max_out: {nodes: 2}}\n"


def view(node: str) -> NodeView:
    ready = Condition("Ready", "True", "", "")
    return NodeView(name=node, uid=node, resource_version="1", labels={"a": "b"}, conditions=(ready,))


class Fleet:
    """Six nodes of one pool, and writes of their fences that are in flight."""

    def __init__(self) -> None:
        self.pool: Pool = load_policy(POLICY, "policy.yaml").pools[0]
        self.admissions = Admissions()
        self.wants: dict[str, tuple[bool, float]] = {}
        self.flying: set[str] = set()
        self.fenced: set[str] = set()
        for node in NODES:
            self.admissions.place(view(node), self.pool, fenced=False)

    def fail(self, node: str, word: bool, probability: float) -> None:
        self.wants[node] = (word, probability)
        self.admissions.want(node, (node in self.fenced, word, probability))

    def recover(self, node: str) -> None:
        self.wants.pop(node, None)
        self.admissions.want(node, None)

    def lift(self, node: str) -> None:
        """The API server has taken the taint of a node that is well again."""
        if node in self.fenced and node not in self.wants:
            self.fenced.discard(node)
            self.admissions.place(view(node), self.pool, fenced=False)

    def send(self, node: str) -> None:
        self.admissions.settle({"a": self.pool})
        if node in self.wants and node not in self.flying | self.fenced and self.admissions.reserve(node):
            self.flying.add(node)

    def answer(self, node: str, stored: bool) -> None:
        if node not in self.flying:
            return
        self.flying.discard(node)
        if stored:
            self.fenced.add(node)
            self.admissions.place(view(node), self.pool, fenced=True)
            if node in self.wants:
                self.fail(node, *self.wants[node])
        self.admissions.release(node)


step = st.one_of(
    st.tuples(st.just("fail"), st.sampled_from(NODES), st.booleans(), st.floats(0.0, 1.0)),
    st.tuples(st.just("recover"), st.sampled_from(NODES)),
    st.tuples(st.just("lift"), st.sampled_from(NODES)),
    st.tuples(st.just("send"), st.sampled_from(NODES)),
    st.tuples(st.just("answer"), st.sampled_from(NODES), st.booleans()),
)


@settings(derandomize=True, max_examples=500, deadline=None)
@given(st.lists(step, max_size=60))
def test_never_more_than_the_budget_is_fenced_or_about_to_be(steps: list[tuple[object, ...]]) -> None:
    fleet = Fleet()
    for name, *arguments in steps:
        getattr(fleet, str(name))(*arguments)
        assert len(fleet.fenced | fleet.flying) <= LIMIT


def test_who_ranks_higher_later_does_not_take_a_slot_that_is_being_written() -> None:
    fleet = Fleet()
    for node in NODES[:3]:
        fleet.fail(node, False, 0.1)
    for node in NODES[:2]:
        fleet.send(node)
    assert fleet.flying == set(NODES[:2])
    fleet.fail(NODES[2], True, 0.9)
    fleet.send(NODES[2])
    assert fleet.flying == set(NODES[:2])
    fleet.answer(NODES[0], stored=False)  # refused: the slot goes to whom it belongs by rank
    fleet.send(NODES[2])
    assert fleet.flying == {NODES[1], NODES[2]}
    fleet.send(NODES[0])
    assert NODES[0] not in fleet.flying
