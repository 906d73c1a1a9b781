"""`python -m rljob_service`: serve one reward, a simulated user, tools, or episodes.

Exit codes are those of rljob_api.wire.contract.ExitCode.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rljob_api.errors import RLJobError, UserError
from rljob_api.wire import contract
from rljob_api.wire.discovery import listening_port
from rljob_api.wire.logs import configure_logging
from rljob_api.wire.termination import end_program
from rljob_service.worker.settings import SCORE, SERVES

if TYPE_CHECKING:
    from rljob_service.server.served_service import ServedService


def main() -> int:
    # Process 1 of a container has no default action for SIGTERM: without a handler the signal would be lost.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(contract.ExitCode.SUCCEEDED))
    options = _parse(sys.argv[1:])
    configure_logging(text="%(asctime)s %(levelname)s %(message)s")
    try:
        _serve(options)
    except RLJobError as error:
        is_user_error = isinstance(error, UserError)
        return end_program(str(error), contract.ExitCode.USER if is_user_error else contract.ExitCode.INFRASTRUCTURE)
    return contract.ExitCode.SUCCEEDED


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m rljob_service", description="Serve one reward, a simulated user, tools, or episodes over HTTP."
    )
    parser.add_argument(
        "--config",
        type=Path,
        default=Path(contract.PATH_CONFIG, contract.FILE_SERVICE),
        help="the settings of the service as YAML (default: %(default)s)",
    )
    parser.add_argument("--serves", choices=SERVES, default=SCORE, help="the kind of service (default: %(default)s)")
    parser.add_argument(
        "--framework", default="", help="with --serves episodes: the project of the environment (default: a program)"
    )
    parser.add_argument("--function", type=Path, help="source of the function (default: function.py next to --config)")
    parser.add_argument("--host", help=f"address to listen on (default: ${contract.ENV_POD_IP})")
    parser.add_argument(
        "--port", type=int, default=listening_port(contract.PORT_SERVICE), help="(default: %(default)s)"
    )
    parser.add_argument(
        "--scratch",
        type=Path,
        default=Path(contract.PATH_SCRATCH),
        help="folder for the workers' directories (default: %(default)s; if that is missing, one in $TMPDIR)",
    )
    parser.add_argument(
        "--grace",
        type=float,
        default=25.0,
        metavar="SECONDS",
        help="time for accepted requests after SIGTERM (default: 25)",
    )
    parser.add_argument("--check", action="store_true", help="load the function, print its signature, and exit")
    return parser.parse_args(arguments)


def _serve(options: argparse.Namespace) -> None:
    import uvloop

    from rljob_service.server import lifecycle
    from rljob_service.server.served_service import load_service
    from rljob_service.server.traces import tracing_requests

    images = os.environ.get(contract.ENV_REWARD_IMAGES, "")
    served = load_service(options.config, options.function, images, options.serves, options.framework)
    service = _prepare(served, options.scratch)
    if options.check:
        started = uvloop.run(lifecycle.check(service))
        form = f"signature {started.signature}"
        print(f"{service.config.name}: {started.entrypoint}, {form}, version {service.version[:12]}")
        return
    host = options.host or os.environ.get(contract.ENV_POD_IP)
    token = os.environ.get(contract.ENV_TOKEN)
    if not host:
        raise UserError(f"no address to listen on; set {contract.ENV_POD_IP} or pass --host")
    if not token:
        raise UserError(f"{contract.ENV_TOKEN} is not set: a server never runs without a token")
    with tracing_requests(service), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(lifecycle.run(service, host, options.port, token, options.grace))


def _prepare(service: ServedService, scratch: Path) -> ServedService:
    """Prepare what a function's workers need before the first can start."""
    from rljob_service.pool import requirements
    from rljob_service.pool.isolation import protect_server
    from rljob_service.worker.settings import FunctionSettings

    protect_server()
    if not isinstance(service.backend, FunctionSettings):
        return service
    lines, version = service.backend.requirements, service.config.python
    python = requirements.ensure_environment(lines, version) if lines or not requirements.is_own(version) else ""
    return service._replace(backend=service.backend._replace(python=python, scratch=str(scratch)))


if __name__ == "__main__":
    sys.exit(main())
