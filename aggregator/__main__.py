"""The process `headway-aggregator`: reads its configuration, connects, runs until it is told to stop."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys
from collections.abc import Sequence

from aggregator.app import Aggregator, crash_on_write_errors
from aggregator.config import AggregatorConfig, load
from aggregator.kube.client import KubeClient, KubeConfigError
from headway.options import ConfigError

log = logging.getLogger("aggregator")


async def run(config: AggregatorConfig) -> int:
    """Exit code: 0 stopped by a signal, 1 an error."""
    loop = asyncio.get_running_loop()
    async with await KubeClient.connect(
        str(config.kubeconfig) if config.kubeconfig else None, config.context
    ) as client:
        aggregator = Aggregator(config, client)
        errors = crash_on_write_errors(aggregator, loop)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, aggregator.stopping.set)
        # What exists now lives as long as the process: the collector need not walk it with every collection.
        gc.collect()
        gc.freeze()
        log.info("starting epoch=%s kubernetes=%s", aggregator.epoch, client.server)
        await aggregator.run()
        return 1 if errors else 0


def main(argv: Sequence[str] | None = None) -> int:
    try:
        config, given = load(sys.argv[1:] if argv is None else argv, os.environ)
    except ConfigError as error:
        print(f"headway-aggregator: {error}", file=sys.stderr)
        return 2
    if given.print_config:
        print("\n".join(config.lines()))
        return 0
    logging.basicConfig(
        level=config.log_level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
    try:
        return asyncio.run(run(config))
    except (KubeConfigError, OSError) as error:
        # An address in use, a certificate that cannot be read, no way to Kubernetes: people can mend these.
        print(f"headway-aggregator: {error}", file=sys.stderr)
        return 1
    except BaseExceptionGroup as group:
        if all(isinstance(error, OSError) for error in group.exceptions):
            print(f"headway-aggregator: {'; '.join(str(error) for error in group.exceptions)}", file=sys.stderr)
            return 1
        raise


if __name__ == "__main__":
    sys.exit(main())
