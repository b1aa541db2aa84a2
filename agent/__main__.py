"""headway-agent: the process on each GPU node. The only place that wires the agent's parts together."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import random
import signal
import sys
from collections.abc import Sequence

from agent import config as configuration
from agent.clock import SystemClock, read_boot_id
from agent.config import AgentConfig
from agent.conversation import DRAIN_S
from agent.inventory import Inventory
from agent.journal import Journals, StateDirBusy
from agent.nvml_link import process_command
from agent.recorder import Recorder
from agent.session import Peer, Session
from agent.sources import Source, kernel_log
from agent.sources.kernel_log import FileLog, JournaldLog, KmsgLog
from agent.sources.nvml import NvmlSource
from agent.sources.pci import PciBus
from agent.supervise import start_sources
from headway import options
from headway.metrics import BUILD_INFO
from headway.readings import Readings

log = logging.getLogger("headway.agent")

#: Clean stop: sessions and sources get this long before they are cancelled.
STOP_S = DRAIN_S + 3.0


def main(argv: Sequence[str] | None = None) -> int:
    try:
        config, given = configuration.load(sys.argv[1:] if argv is None else argv, os.environ)
    except options.ConfigError as error:
        print(f"headway-agent: {error}", file=sys.stderr)
        return 2
    if given.print_config:
        print("\n".join(config.lines()))
        return 0
    logging.basicConfig(
        stream=sys.stderr, level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(message)s"
    )
    if config.insecure:
        print(
            "headway-agent: INSECURE: reports may go unencrypted to anybody. For the demo alone, never for a cluster.",
            file=sys.stderr,
        )
    try:
        return asyncio.run(run(config))
    except StateDirBusy as error:
        print(f"headway-agent: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"headway-agent: {error}", file=sys.stderr)
        return 1


async def run(config: AgentConfig) -> int:
    """Run until SIGTERM or SIGINT. Raises StateDirBusy, and OSError where --listen cannot be had."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    clock = SystemClock(config.boot_id or read_boot_id())
    readings = Readings("agent")
    readings.set(BUILD_INFO, 1.0, (options.version(), "agent"))
    journals = Journals(config.state_dir, clock, os.urandom)
    recorder = Recorder(journals, clock, readings)
    inventory = Inventory()
    sessions = _sessions(config, journals, inventory, clock, readings)
    for session in sessions:
        recorder.subscribe(session.wake)
        inventory.subscribe(session.wake)
    runner = None
    try:
        if config.listen is not None:
            from agent import http  # not imported where nothing listens: 2 MiB

            runner = await http.serve(config.listen, readings, recorder.scrape, journals, sessions)
        recorder.start()
        nvml = _nvml(config, clock, inventory, recorder)
        sources = _sources(config, clock) if nvml is None else [*_sources(config, clock), nvml]
        tasks = start_sources(sources, recorder)
        reporting = [asyncio.create_task(session.run(), name=f"session {session.peer.url}") for session in sessions]
        # What was imported stays: leave it out of every collection.
        gc.collect()
        gc.freeze()
        log.info("started node=%s boot=%s state_dir=%s", config.node, clock.boot_id, config.state_dir)
        await _until_stopped(stop, [*tasks, *reporting])
        await _end(tasks)
        ending = asyncio.create_task(nvml.ask_to_end()) if nvml is not None else None
        await recorder.stop()
        for session in sessions:
            session.stop()
        await _finish(reporting)
        if ending is not None:
            await ending
    finally:
        if runner is not None:
            await runner.cleanup()
        journals.close()
    log.info("stopped node=%s", config.node)
    return 0


def _sessions(
    config: AgentConfig, journals: Journals, inventory: Inventory, clock: SystemClock, readings: Readings
) -> list[Session]:
    draw = random.Random().random
    peers = [
        Peer(url, config.token_file, config.ca_file, config.insecure, config.reconnect_max_s)
        for url in config.aggregators
    ]
    version = options.version()
    return [Session(peer, config.node, version, journals, inventory, clock, readings, draw) for peer in peers]


def _nvml(config: AgentConfig, clock: SystemClock, inventory: Inventory, recorder: Recorder) -> NvmlSource | None:
    if config.nvml == "off":
        return None
    command = None
    if config.nvml == "start":
        options = [f"--sysfs={config.sysfs}", f"--linger-s={config.nvml_linger_s:g}"]
        if config.nvml_library is not None:
            options.append(f"--library={config.nvml_library}")
        command = process_command(config.nvml_socket, *options)

    def xids_wanted() -> bool:
        return not recorder.is_up(kernel_log.NAME)

    return NvmlSource(config.nvml_socket, command, config.nvml_probe_s, clock, inventory, xids_wanted)


def _sources(config: AgentConfig, clock: SystemClock) -> list[Source]:
    sources: list[Source] = [PciBus(config.sysfs, clock.boot_id, config.pci_interval_s)]
    kind, path = config.kernel_log
    if kind == "kmsg" and path is not None:
        sources.append(KmsgLog(clock.boot_id, path))
    elif kind == "file" and path is not None:
        sources.append(FileLog(path))
    elif kind == "journald":
        sources.append(JournaldLog())
    return sources


async def _until_stopped(stop: asyncio.Event, tasks: Sequence[asyncio.Task[None]]) -> None:
    """Wait for the signal. A task that ends before it has an error of ours, which ends the process loudly."""
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([stopping, *tasks], return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task.done():
                task.result()
                raise RuntimeError(f"task {task.get_name()} ended by itself")
    finally:
        stopping.cancel()


async def _end(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(STOP_S):
            await asyncio.gather(*tasks, return_exceptions=True)


async def _finish(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Let sessions send what is left, then cut them."""
    if tasks:
        await asyncio.wait(tasks, timeout=STOP_S)
        await _end(tasks)


if __name__ == "__main__":
    sys.exit(main())
