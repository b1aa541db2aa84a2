"""Runs each source by itself: tells its failures on the edge and starts it again, whatever the others do."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from agent.recorder import Recorder
from agent.sources import Source, SourceAbsent, SourceFailed

log = logging.getLogger("headway.agent")

#: Wait before a source is run again: doubled from the first to the longest. Start over after a run this long.
RETRY_FIRST_S = 1.0
RETRY_MAX_S = 30.0
STEADY_S = 60.0


async def run_source(source: Source, recorder: Recorder) -> None:
    """Run one source until cancelled."""
    loop = asyncio.get_running_loop()
    retry_s = RETRY_FIRST_S
    while True:
        started_s = loop.time()
        try:
            await source.run(recorder)
            recorder.tell_source(source.name, "failed", "ended by itself")
        except SourceAbsent as error:
            recorder.tell_source(source.name, "absent", str(error))
        except SourceFailed as error:
            recorder.tell_source(source.name, "failed", str(error))
        except Exception as error:
            # An error of ours in one source: loud, but the others are all the evidence that is left of this node.
            log.exception("error in source source=%s", source.name)
            recorder.tell_source(source.name, "failed", f"error in the agent: {type(error).__name__}: {error}")
            retry_s = RETRY_MAX_S
        if loop.time() - started_s > STEADY_S:
            retry_s = RETRY_FIRST_S
        await asyncio.sleep(retry_s)
        retry_s = min(retry_s * 2, RETRY_MAX_S)


def start_sources(sources: Sequence[Source], recorder: Recorder) -> list[asyncio.Task[None]]:
    return [asyncio.create_task(run_source(source, recorder), name=f"source {source.name}") for source in sources]
