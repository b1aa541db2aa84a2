"""`headway demo`: a small cluster on this machine; GPUs fail by seed; what is published is held against what was done.

Nothing is faked above the hardware boundary: real agents read a fake libnvidia-ml.so.1 through the real nvidia-ml-py, a
kernel log and a PCI tree; one real aggregator takes their reports over TLS with tokens and writes to a Kubernetes API,
embedded or real. The faults come from a process that shares no code with the summary below, which reads only what
stands in Kubernetes and the injector's own account of what it did.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from aggregator.kube.client import KubeClient, KubeConfigError, KubeError, Unreachable
from fakes.nvml.build import build
from headway.commands.demo_cluster import READY_S, LocalCluster, Settings
from headway.commands.demo_judge import Judge, Summary
from headway.commands.demo_processes import Child, ChildEnded
from headway.commands.demo_view import View
from headway.commands.http import get_json
from headway.names import Names

HELP = "run a small cluster on this machine, make GPUs fail, watch what is published"
LEVELS = ("observe", "advise", "fence")
#: After the last fault: what is to be published has this long, and what is to clear too.
SETTLE_S = 15.0
MAX_NODES = 64
POLL_S = 0.1


class DemoError(Exception):
    """The demo could not be run; the text says why."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--nodes", type=int, default=4, metavar="N", help="default: %(default)s")
    add("--gpus-per-node", type=int, default=8, metavar="N", help="1 to 8 (default: %(default)s)")
    add("--seconds", type=float, default=30.0, metavar="S", help="time over which faults come (default: %(default)g)")
    add("--level", choices=LEVELS, default="fence", help="policy level (default: %(default)s)")
    add("--seed", type=int, default=None, metavar="N", help="same seed, same faults (default: a new one, printed)")
    add("--classes-off", default="", metavar="LIST", help="fault classes switched off in the policy, e.g. memory,bus")
    add("--kubeconfig", metavar="FILE", help="a real cluster: touches only Nodes and a namespace that the demo makes")
    add("--dir", type=Path, metavar="DIR", help="where its files go, kept afterwards (default: a temporary folder)")
    add("--stay", action="store_true", help="after the summary keep the cluster running until Ctrl-C")
    add("--json", action="store_true", help="print one JSON object instead of the live view")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = (
        "Exit codes: 0 every harmful fault was published and cleared when it should, and nothing healthy was blamed;\n"
        "1 otherwise, and the summary says what; 2 the demo could not run; 130 ended by Ctrl-C.\n"
        "--json: {seed, nodes, gpus, level, first_taint_s, faults: [{kind, node, uuid, harmful, published_s,\n"
        "cleared_s, ok}], blamed: [{node, uuid, verdict}], ok, kubeconfig}; times are seconds after the\n"
        "fault, null = never."
    )


def run(args: argparse.Namespace) -> int:
    if not 1 <= args.nodes <= MAX_NODES or not 1 <= args.gpus_per_node <= 8:
        print(f"headway demo: --nodes 1 to {MAX_NODES}, --gpus-per-node 1 to 8", file=sys.stderr)
        return 2
    seed = args.seed if args.seed is not None else random.SystemRandom().randrange(10_000)
    folder = args.dir or Path(tempfile.mkdtemp(prefix="headway-demo-"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return asyncio.run(_run(args, seed, folder.resolve()))
    except (DemoError, ChildEnded, KubeConfigError, KubeError, Unreachable, OSError, ValueError) as error:
        print(f"headway demo: {error}", file=sys.stderr)
        return 2
    finally:
        if args.dir is None:
            shutil.rmtree(folder, ignore_errors=True)


async def _run(args: argparse.Namespace, seed: int, folder: Path) -> int:
    began_s = time.time()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    async with contextlib.AsyncExitStack() as stack:
        kubeconfig = args.kubeconfig or await _embedded(stack, folder)
        client = await stack.enter_async_context(await KubeClient.connect(kubeconfig))
        cluster = LocalCluster(client, kubeconfig, _settings(args, folder))
        stack.push_async_callback(cluster.delete)
        stack.push_async_callback(cluster.stop)
        names = [f"gpu-node-{number}" for number in range(args.nodes)]
        if args.kubeconfig:
            names = [f"headway-demo-{cluster.id}-{number}" for number in range(args.nodes)]
            cluster.settings.namespace = f"headway-demo-{cluster.id}"
        cluster.settings.policy = policy(args, cluster.id)
        await cluster.create(names)
        keep = asyncio.create_task(cluster.keep_ready())
        stack.callback(keep.cancel)
        cluster.start_aggregator()
        for name in names:
            cluster.start_agent(name)
        await _until_ready(cluster, names, stop)
        judge = Judge(Names(), {name: cluster.hosts[name].uid for name in names}, folder / "truth.jsonl")
        watching = asyncio.create_task(judge.watch(client))
        stack.callback(watching.cancel)
        view = View(cluster, judge, kubeconfig, seed, began_s, quiet=args.json)
        summary = await _faults(args, seed, cluster, judge, view, stop)
        if summary is None:
            return 130
        view.finish(summary)
        if args.json:
            print(json.dumps(summary.as_object(seed, args, began_s, kubeconfig)))
        if args.stay and not stop.is_set():
            print("the cluster stays until Ctrl-C", file=sys.stderr)
            await stop.wait()
        return 0 if summary.ok else 1


def policy(args: argparse.Namespace, pool: str) -> str:
    off = [word for word in args.classes_off.split(",") if word]
    return (
        "version: 1\n"
        f"classes_off: [{', '.join(off)}]\n"
        "pools:\n"
        "- name: demo\n"
        f"  nodes: {{matchLabels: {{headway.dev/demo: {pool}}}}}\n"
        f"  level: {args.level}\n"
        "  fence: node\n"
        "  max_out: {percent: 100}\n"
        "  nvml_silent: {probes: 3, over_s: 4}\n"
        # On a real cluster no other node is touched, whatever stands there.
        "default: {level: 'off'}\n"
    )


def _settings(args: argparse.Namespace, folder: Path) -> Settings:
    library = build()
    return Settings(directory=folder, library=library, policy="", gpus=args.gpus_per_node)


async def _embedded(stack: contextlib.AsyncExitStack, folder: Path) -> str:
    where = folder / "kubernetes"
    where.mkdir(exist_ok=True)
    child = Child("embedded Kubernetes API", ["fakes.kube", "--dir", where], folder / "kubernetes.log")
    stack.push_async_callback(child.stop)
    deadline_s = time.monotonic() + READY_S
    while not child.log.read_text().startswith("ready "):
        child.check()
        if time.monotonic() > deadline_s:
            raise DemoError(f"the embedded Kubernetes API is not ready:\n{child.tail()}")
        await asyncio.sleep(POLL_S)
    return str(where / "kubeconfig")


async def _until_ready(cluster: LocalCluster, names: list[str], stop: asyncio.Event) -> None:
    """All agents report, and the aggregator knows every GPU."""
    wanted = len(names) * cluster.settings.gpus
    deadline_s = time.monotonic() + READY_S + len(names)
    while not stop.is_set():
        for child in cluster.children():
            child.check()
        with contextlib.suppress(OSError, ValueError):
            gpus = (await get_json(f"{cluster.api_url}/v1/gpus"))["items"]
            if sum(gpu["freshness"] == "fresh" for gpu in gpus) == wanted:
                return
        if time.monotonic() > deadline_s:
            logs = "\n".join(f"--- {child.name}\n{child.tail(5)}" for child in cluster.children())
            raise DemoError(f"the agents did not all report in time:\n{logs}")
        await asyncio.sleep(POLL_S)


async def _faults(
    args: argparse.Namespace, seed: int, cluster: LocalCluster, judge: Judge, view: View, stop: asyncio.Event
) -> Summary | None:
    """Inject, watch, and wait until all that should happen has, or its time is over. None: ended by a signal."""
    folders = [host.hardware.directory for host in cluster.hosts.values()]
    command: list[str | Path] = [
        "fakes.faults", "--nodes", *folders, "--gpus", str(args.gpus_per_node), "--truth", judge.truth_file,
        "--seed", str(seed), "--seconds", str(args.seconds),
    ]  # fmt: skip
    injector = Child("injector", command, cluster.settings.directory / "injector.log")
    settled_s = None
    try:
        while not stop.is_set():
            for child in cluster.children():
                child.check()
            view.refresh()
            if not injector.alive:
                if injector.process.returncode:
                    raise DemoError(f"the injector failed:\n{injector.tail()}")
                settled_s = settled_s or time.monotonic()
                fenced = args.level == "fence"
                if judge.summary(fenced).ok or time.monotonic() - settled_s > SETTLE_S:
                    # A healthy part that is blamed late is blamed: look a little longer.
                    await asyncio.sleep(1.0)
                    return judge.summary(fenced)
            await asyncio.sleep(POLL_S)
        return None
    finally:
        await injector.stop()
