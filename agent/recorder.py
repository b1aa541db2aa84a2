"""From observation to journal: stamps, folds repeats, tells edges of sources, and wakes the sessions.

The only writer of the journal. Everything here happens on the event loop within one call, so the order of records is
the order of observations.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from typing import Any

from msgspec import structs

from agent.blocking import in_daemon_thread
from agent.clock import Clock
from agent.journal import Journals, sync_and_close
from agent.repeats import MAX_WINDOWS, Repeating, Window, state_key, stored_windows
from agent.sources import Observation
from headway.metrics import (
    AGENT_DROPPED,
    AGENT_EVENTS,
    AGENT_JOURNAL_BYTES,
    AGENT_JOURNAL_DURABLE,
    AGENT_SOURCE_AGE,
    AGENT_SOURCE_UP,
)
from headway.readings import Readings
from headway.wire import Event

log = logging.getLogger("headway.agent")

#: Written data reaches the disk within a second: half for waiting, half for the disk.
SYNC_AFTER_S = 0.5
#: State that no event carried along (a position past lines without news) is written at the latest after this.
#: A crash before that costs reading those lines again; writing it each second would push evidence out of the journal.
REMEMBER_S = 60.0
#: How often retention by age and a failed disk are looked at.
HOUSEKEEPING_S = 60.0


class Recorder:
    """Implements `agent.sources.Sink`. `subscribe` adds a function that is called after every new event."""

    def __init__(self, journals: Journals, clock: Clock, readings: Readings) -> None:
        self._journals = journals
        self._clock = clock
        self._readings = readings
        self._repeating = Repeating()
        self._remembered: dict[str, Any] = {}
        self._listeners: list[Callable[[], None]] = []
        self._last_word: dict[str, str] = {}
        self._answered_s: dict[str, float] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._syncing: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()
        self._dropped_in_journal = 0
        journals.on_new_journal = self._retell_pending
        self._restore_windows()

    def subscribe(self, listener: Callable[[], None]) -> None:
        self._listeners.append(listener)

    def observe(self, observation: Observation, state: Mapping[str, Any] | None = None) -> None:
        if state:
            self._remembered.update(state)
        now_s = observation.observed_s if observation.observed_s is not None else self._clock.boottime_s()
        line = observation.line
        if line is None:
            self._append(lambda seq: (self._event(observation, seq, now_s), {}))
            return
        self._close(self._repeating.close_due(now_s, make_room=len(self._repeating) >= MAX_WINDOWS))
        window = self._repeating.count(line, now_s)
        if window is not None:
            self.remember({window.state_key: window.state})
            return

        def make(seq: int) -> tuple[Event, dict[str, Any]]:
            opened = state_key(self._journals.current.journal_id, seq)
            return self._event(observation, seq, now_s), {opened: [0, 0.0, 0.0]}

        event = self._append(make)
        self._repeating.opened(event, self._journals.current.journal_id)
        self._arm_repeats()

    def remember(self, state: Mapping[str, Any]) -> None:
        self._remembered.update(state)
        self._after("remember", REMEMBER_S, self._write_remembered)

    def recall(self, key: str) -> Any:
        return self._remembered.get(key, self._journals.state.get(key))

    def alive(self, source: str) -> None:
        self._answered_s[source] = self._clock.boottime_s()
        self.tell_source(source, "ok")

    def dropped(self, what: str, count: int = 1) -> None:
        self._readings.inc(AGENT_DROPPED, (what,), count)

    def tell_source(
        self,
        source: str,
        value: str,
        detail: str | None = None,
        *,
        count: int | None = None,
        since_s: float | None = None,
    ) -> None:
        """Tell how a source is: on the edge only, but every time for `silent`, whose count is the news."""
        if self._last_word.get(source) == value and value != "silent":
            return
        if self._last_word.get(source) != value:
            level = logging.INFO if value in ("ok", "absent") else logging.WARNING
            log.log(level, "source %s source=%s detail=%r", value, source, detail or "")
        self._last_word[source] = value
        self._readings.set(AGENT_SOURCE_UP, float(value == "ok"), (source,))
        self.observe(
            Observation("source", source, name=source, value=value, detail=detail, count=count, since_s=since_s)
        )

    def is_up(self, source: str) -> bool:
        """Whether the source's last word is `ok`."""
        return self._last_word.get(source) == "ok"

    def scrape(self) -> None:
        """Bring the gauges up to date."""
        now_s = self._clock.boottime_s()
        self._readings.set(AGENT_JOURNAL_BYTES, self._journals.size_bytes)
        self._readings.set(AGENT_JOURNAL_DURABLE, float(self._journals.durable))
        for source, answered_s in self._answered_s.items():
            self._readings.set(AGENT_SOURCE_AGE, now_s - answered_s, (source,))

    def start(self) -> None:
        """Begin with an event of our own, and look after the journal from now on."""
        self.observe(Observation("agent", "agent", name="start"))
        self._after("housekeeping", HOUSEKEEPING_S, self._housekeeping)

    async def stop(self) -> None:
        """Tell what was counted, say goodbye, and leave everything on the disk."""
        self._close(self._repeating.close_all())
        self.observe(Observation("agent", "agent", name="stop"))
        for timer in self._timers.values():
            timer.cancel()
        self._stopping.set()
        if self._syncing is not None:
            await self._syncing
        await self._sync()

    def _event(self, observation: Observation, seq: int, observed_s: float) -> Event:
        o = observation
        return Event(
            seq, self._clock.boot_id, observed_s, self._clock.wall_s(), o.kind, o.source, o.name, o.value, o.uuid,
            o.pci, o.epoch, o.line, o.gpu, None, o.count, o.since_s, o.detail,
        )  # fmt: skip

    def _append(self, make: Callable[[int], tuple[Event, dict[str, Any]]]) -> Event:
        """Append the event that `make(seq)` returns with its own change of state, and all that is to be remembered."""

        def made(seq: int) -> tuple[Event, dict[str, Any]]:
            event, change = make(seq)
            return event, {**self._remembered, **change}

        event = self._journals.append(made)
        self._remembered.clear()
        self._readings.inc(AGENT_EVENTS, (event.kind,))
        if self._journals.dropped > self._dropped_in_journal:
            self.dropped("journal", self._journals.dropped - self._dropped_in_journal)
            self._dropped_in_journal = self._journals.dropped
        self._sync_soon()
        for listener in self._listeners:
            listener()
        return event

    def _close(self, windows: list[Window]) -> None:
        for window in windows:
            self._remembered.pop(window.state_key, None)
            if window.count:
                self._tell_repeats(window)
            else:
                self._journals.state.pop(window.state_key, None)

    def _tell_repeats(self, window: Window) -> None:
        """Write what was counted. In a journal that does not hold the first event, that event is said again there."""

        def make(seq: int) -> tuple[Event, dict[str, Any]]:
            first, journal_id = window.first, self._journals.current.journal_id
            if journal_id == window.journal_id:
                wall_s = self._clock.wall_s()
                repeats = Event(
                    seq, first.boot_id, window.last_s, wall_s, "repeats", first.source, repeats=window.told()
                )
                return repeats, {window.state_key: None}
            change: dict[str, Any] = {window.state_key: None}
            if window.count > 1:
                change[state_key(journal_id, seq)] = [window.count - 1, window.first_s, window.last_s]
            return structs.replace(first, seq=seq, observed_s=window.first_s), change

        event = self._append(make)
        if event.kind != "repeats" and window.count > 1:
            journal_id = self._journals.current.journal_id
            self._tell_repeats(Window(event, journal_id, window.count - 1, window.first_s, window.last_s))

    def _retell_pending(self) -> None:
        """A new journal has begun, in which nothing of the open windows stands."""
        self._close(self._repeating.close_all())

    def _restore_windows(self) -> None:
        """Take up what an earlier process had counted and not told."""
        for journal_id, seq, (count, first_s, last_s) in stored_windows(self._journals.state):
            events = self._journals.read(journal_id, seq, 1, 1)
            if not events or events[0].seq != seq or events[0].line is None:
                self.dropped("repeats", int(count))
                self._journals.state.pop(state_key(journal_id, seq), None)
                continue
            window = Window(events[0], journal_id, int(count), first_s, last_s)
            if journal_id == self._journals.current.journal_id:
                self._repeating.restore(window)
            else:
                self._close([window])
        self._close(self._repeating.close_due(self._clock.boottime_s()))
        self._arm_repeats()

    def _arm_repeats(self) -> None:
        due_s = self._repeating.next_due_s()
        if due_s is not None:
            self._after("repeats", max(0.0, due_s - self._clock.boottime_s()) + 0.001, self._repeats_due)

    def _repeats_due(self) -> None:
        self._close(self._repeating.close_due(self._clock.boottime_s()))
        self._arm_repeats()

    def _write_remembered(self) -> None:
        if self._remembered:
            self._journals.note(self._remembered)
            self._remembered.clear()
            self._sync_soon()

    def _housekeeping(self) -> None:
        self._journals.retain()
        self._journals.retry_disk()
        self._after("housekeeping", HOUSEKEEPING_S, self._housekeeping)

    def _after(self, name: str, delay_s: float, call: Callable[[], None]) -> None:
        """Call once after a while; asking again meanwhile changes nothing."""
        if name in self._timers:
            return

        def fire() -> None:
            del self._timers[name]
            call()

        self._timers[name] = asyncio.get_running_loop().call_later(delay_s, fire)

    def _sync_soon(self) -> None:
        if self._syncing is None or self._syncing.done():
            self._syncing = asyncio.get_running_loop().create_task(self._sync_later())

    async def _sync_later(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SYNC_AFTER_S):
                await self._stopping.wait()
        await self._sync()

    async def _sync(self) -> None:
        fds = self._journals.take_unsynced()
        if not fds:
            return
        try:
            await in_daemon_thread(lambda: sync_and_close(fds))
        except OSError as error:
            # After a failed fsync the kernel may have let the data go: nothing written since can be vouched for.
            if self._journals.durable:
                self._journals.fail(error)
