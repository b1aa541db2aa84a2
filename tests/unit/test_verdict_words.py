"""What a verdict is said to be cleared by, and what is recommended, where several kinds of evidence hold it."""

from __future__ import annotations

import pytest

from aggregator.engine.policy_load import shipped_rows
from aggregator.engine.words import Action, ClearsBy


def test_of_several_the_hardest_to_clear_counts() -> None:
    """A part whose row remap failed and which also asks for a reset is not well again after the reset."""
    assert max([ClearsBy.RESET, ClearsBy.REPLACE, ClearsBy.DRIVER_WORD]) is ClearsBy.REPLACE
    assert max([ClearsBy.REBOOT, ClearsBy.RESET]) is ClearsBy.REBOOT
    assert max([ClearsBy.DECAY, ClearsBy.DRIVER_WORD]) is ClearsBy.DRIVER_WORD


@pytest.mark.parametrize(("milder", "covering"), [("reset", "reboot"), ("reboot", "replace"), ("verify", "reset")])
def test_the_recommended_action_covers_the_milder_one(milder: str, covering: str) -> None:
    assert max([Action(milder), Action(covering)]) is Action(covering)


def test_rows_are_told_by_what_their_action_does() -> None:
    """No shipped row recommends less than what clears it."""
    least = {ClearsBy.REBOOT: Action.REBOOT, ClearsBy.REPLACE: Action.REPLACE}
    weak = [
        row.key
        for row in shipped_rows()
        if row.action is not Action.NONE and row.clears_by in least and row.action < least[row.clears_by]
    ]
    assert weak == []
