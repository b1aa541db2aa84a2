"""Snapshot files, stage times, recordings and the policy source."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest

from aggregator import state
from aggregator.engine.inputs import AgentEvent, PolicyLoaded
from aggregator.ingest.cursors import Position
from aggregator.ingest.session import NodeMemory
from aggregator.kube.objects import ConfigMap, Meta
from aggregator.kube.plan import Change, Patch
from aggregator.kube.write import Written
from aggregator.policy_source import POLL_S, PolicySource
from aggregator.trace import BELONGS_S, LineFile, Stages, trace_line
from headway import metrics
from headway.readings import Readings
from headway.wire import Event

SNAPSHOT = state.Snapshot("0.1", 123.5, b"engine", {"n1": NodeMemory({"j": Position("j", "b", 3, 5, 9, [(5, 7)])})})


def test_a_snapshot_comes_back_as_it_was(tmp_path: Path) -> None:
    state.write(tmp_path / "new", state.encode(SNAPSHOT))
    assert state.read(tmp_path / "new") == SNAPSHOT


def test_the_old_snapshot_stays_until_the_new_one_is_whole(tmp_path: Path) -> None:
    state.write(tmp_path, state.encode(SNAPSHOT))
    (tmp_path / f"{state.FILE}.new").write_bytes(b"half")
    assert state.read(tmp_path) == SNAPSHOT


@pytest.mark.parametrize("data", [b"", b"xy", b"\0" * 100, state.encode(SNAPSHOT)[:-1], state.encode(SNAPSHOT) + b"x"])
def test_a_damaged_snapshot_is_an_empty_start_and_a_line(
    tmp_path: Path, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / state.FILE).write_bytes(data)
    assert state.read(tmp_path) is None
    assert "cannot be used" in caplog.text


def test_no_snapshot_is_an_empty_start(tmp_path: Path) -> None:
    assert state.read(tmp_path) is None


def agent_event(node: str) -> AgentEvent:
    return AgentEvent(1.0, 1.0, node, "j", Event(0, "b", 1.0, 1.0, "agent", "agent"))


def written(node: str, planned_s: float) -> Written:
    patch = Patch(node, "/p", "t", {}, (Change("taint", "add", "k", "bus"),), True)
    return Written(patch, planned_s, planned_s + 0.001, planned_s + 0.01)


def test_a_write_is_joined_to_the_oldest_event_that_its_plan_was_the_first_to_see() -> None:
    wall_s = [100.0]
    stages = Stages(lambda: wall_s[0])
    stages.applied(agent_event("n1"), 99.9)
    wall_s[0] = 100.5
    stages.applied(agent_event("n1"), 100.4)
    stages.planning("n1")
    stages.planning("n1")  # a conflict: planned again, the event is still the reason
    stamp = stages.of(written("n1", 100.6))
    assert stamp is not None
    assert (stamp.received_s, stamp.engine_s) == (99.9, 100.0)
    assert trace_line(written("n1", 100.6), stamp)["changes"] == ["add taint k"]
    assert stages.of(written("n2", 100.6)) is None
    wall_s[0] += BELONGS_S + 1
    stages.planning("n1")
    assert stages.of(written("n1", wall_s[0])) is None, "a write long after has another reason"


def test_a_recording_ends_at_its_limit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = LineFile(tmp_path / "r", 40)
    for index in range(20):
        file.write({"n": index})
    file.close()
    lines = (tmp_path / "r").read_text().splitlines()
    assert [json.loads(line)["n"] for line in lines] == list(range(5))
    assert caplog.text.count("reached its limit") == 1


class Policies:
    """A policy source, with what it told."""

    def __init__(self) -> None:
        self.loaded: list[PolicyLoaded] = []
        self.refused: list[str] = []
        self.readings = Readings("aggregator")
        self.source = PolicySource(lambda: 5.0, self.readings, self.loaded.append, self.refused.append)


GOOD = "version: 1\ndefault: {level: observe}\n"
BAD = "version: 1\nnonsense: 1\n"


def configmap(text: str | None) -> ConfigMap:
    return ConfigMap(Meta("headway-policy", "headway"), None if text is None else {"policy.yaml": text})


def test_a_refused_policy_leaves_the_last_good_one_and_says_where_it_is_wrong() -> None:
    policies = Policies()
    policies.source.configmap(configmap(GOOD))
    good = policies.source.state.hash
    policies.source.configmap(configmap(BAD))
    state_now = policies.source.state
    assert (state_now.hash, len(policies.loaded)) == (good, 1)
    assert state_now.error is not None
    assert "headway/headway-policy/policy.yaml:2:" in state_now.error
    assert policies.refused == [state_now.error]
    assert policies.readings.value(metrics.POLICY_REFUSED) == 1
    policies.source.configmap(configmap(GOOD))
    assert policies.source.state.error is None
    assert policies.readings.value(metrics.POLICY_INFO, (str(good),)) == 1


def test_the_same_refusal_is_told_once() -> None:
    policies = Policies()
    for _ in range(3):
        policies.source.configmap(configmap(BAD))
    assert len(policies.refused) == 1


def test_a_configmap_without_the_key_or_deleted_changes_nothing_but_is_told() -> None:
    policies = Policies()
    policies.source.configmap(configmap(GOOD))
    policies.source.configmap(configmap(None))
    policies.source.configmap_gone("headway/headway-policy")
    assert policies.source.state.hash is not None
    assert ["no key policy.yaml" in policies.refused[0], "was deleted" in policies.refused[1]] == [True, True]
    policies.source.configmap(configmap(GOOD))
    assert policies.source.state.error is None


async def test_a_policy_file_is_read_again_when_it_changes(tmp_path: Path) -> None:
    policies, path, turns = Policies(), tmp_path / "policy.yaml", 0

    async def sleep(s: float) -> None:
        """Each turn changes the file, as people would between two looks at it."""
        nonlocal turns
        assert s == POLL_S
        turns += 1
        if turns == 1:
            path.write_text(GOOD)
        elif turns == 3:
            aside = tmp_path / "aside"
            aside.write_text(BAD)
            os.replace(aside, path)
        elif turns == 5:
            raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await policies.source.poll_file(path, sleep)
    assert "No such file" in policies.refused[0]
    assert len(policies.loaded) == 1
    assert f"{path}:2:" in policies.refused[1]
