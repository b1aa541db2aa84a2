"""The engine's memory as bytes, versioned, and back. What Kubernetes tells anew (views of nodes) and what ends with a
process (sessions of agents) is not in it: until each agent is back, its node is warming up.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from aggregator.engine.fleet import NodeFacts
from aggregator.engine.inputs import PolicyLoaded

FORMAT = 1


class Memory(msgspec.Struct, frozen=True):
    format: int
    policy: PolicyLoaded | None
    nodes: list[NodeFacts]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Memory)


def to_bytes(policy: PolicyLoaded | None, nodes: Iterable[NodeFacts]) -> bytes:
    kept = [
        msgspec.structs.replace(
            facts,
            lived=_lived(facts),
            seen=None,
            firsts={},
            gone=None,
            connected=None,
            agent_gone_s=-1.0,
            backfill_s=-1.0,
        )
        for facts in nodes
    ]
    return _encoder.encode(Memory(FORMAT, policy, kept))


def _lived(facts: NodeFacts) -> tuple[str, float] | None:
    """Views of nodes are told anew, but not which of the evidence is about an earlier node of the same name."""
    return (facts.seen.node.uid, facts.born_s) if facts.seen is not None else facts.lived


def from_bytes(data: bytes) -> Memory:
    """Raises ValueError where it is not a snapshot of this format."""
    try:
        memory = _decoder.decode(data)
    except msgspec.DecodeError as error:
        raise ValueError(f"not a snapshot of this engine: {error}") from error
    if memory.format != FORMAT:
        raise ValueError(f"snapshot of format {memory.format}; this release reads {FORMAT}")
    return memory
