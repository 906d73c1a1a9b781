"""`python -m rljob_operator`: command line, logging and signals. Leaves the work to `operator`."""

import argparse
import asyncio
import gc
import logging
import signal
import sys
from pathlib import Path

from rljob_api.errors import RLJobError, UserError
from rljob_api.wire.contract import ExitCode
from rljob_api.wire.logs import configure_logging, print_last_line
from rljob_core.defaults import load_defaults
from rljob_operator.operator import run_operator
from rljob_operator.settings import Settings

_GC_ALLOCATIONS = 50_000
"""Allocations between garbage collections. A page of a LIST makes as many dicts and lists, which reference counts free;
with Python's 700, collections took half of the time of a LIST of 50,000 objects, and stopped the loop for 0.2 s."""


def parse(argv: list[str] | None = None) -> Settings:
    """Raises UserError for a wrong file of defaults."""
    default = Settings()
    parser = argparse.ArgumentParser("rljob_operator", description="The operator of RLJobs and RewardModels.")
    parser.add_argument("--kubeconfig", help="default: in-cluster, else ~/.kube/config")
    parser.add_argument("--namespace", nargs="+", action="extend", default=[], metavar="NS", help="default: all")
    parser.add_argument("--workers", type=int, default=default.workers)
    parser.add_argument("--resync-seconds", type=float, default=default.resync_seconds)
    parser.add_argument("--lease-namespace", metavar="NS", help="default: the Pod's own")
    parser.add_argument("--lease-name", default=default.lease_name)
    parser.add_argument(
        "--lease-seconds", type=int, default=default.lease_seconds, help="a dead leader is replaced after this"
    )
    parser.add_argument("--no-lease", action="store_true", help="for one replica outside a cluster")
    parser.add_argument("--metrics-port", type=int, default=default.metrics_port)
    parser.add_argument("--health-port", type=int, default=default.health_port)
    parser.add_argument(
        "--defaults", type=Path, metavar="FILE", help="YAML with defaults for all jobs (docs/install.md)"
    )
    parser.add_argument("--trainer-image", metavar="IMAGE", help="takes precedence over the file")
    parser.add_argument("--reward-image", metavar="IMAGE", help="takes precedence over the file")
    parser.add_argument("--log-level", default=default.log_level, choices=["debug", "info", "warning", "error"])
    given = vars(parser.parse_args(argv))
    namespaces, no_lease = tuple(given.pop("namespace")), given.pop("no_lease")
    images = {name: given.pop(name) for name in ("trainer_image", "reward_image")}
    file: Path | None = given.pop("defaults")
    defaults = load_defaults(file) if file else default.defaults
    defaults = defaults.model_copy(update={name: image for name, image in images.items() if image})
    return Settings(**given, namespaces=namespaces, lease=not no_lease, defaults=defaults)


async def _run(settings: Settings) -> None:
    loop = asyncio.get_running_loop()

    def end_on_signals() -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, task.cancel)

    # Again after kopf has started: it installs signal handlers that end only its watches.
    task = asyncio.create_task(run_operator(settings, on_watching=end_on_signals))
    end_on_signals()
    try:
        await task
    except asyncio.CancelledError:
        logging.getLogger(__name__).info("stopped")


def main(argv: list[str] | None = None) -> int:
    try:
        settings = parse(argv)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return ExitCode.USER
    level = settings.log_level.upper()
    configure_logging(level, settings.defaults.log_format)
    gc.freeze()  # imported objects stay: garbage collections need not scan half a million objects
    gc.set_threshold(_GC_ALLOCATIONS, *gc.get_threshold()[1:])
    logging.getLogger("kopf").setLevel(max(logging.WARNING, logging.getLevelName(level)))
    try:
        asyncio.run(_run(settings))
    except RLJobError as error:
        print_last_line(f"error: {error}", settings.defaults.log_format)
        return 75
    return 0


if __name__ == "__main__":
    sys.exit(main())
