"""The process of a reader Pod: serves the files of a run on a claim, when no head does.

It listens on the loopback address, which the API server's port-forward reaches, and no other Pod. Invariant: it writes
nothing.
"""

import os
import signal
import sys
from pathlib import Path

from rljob_api.errors import RLJobError, UserError
from rljob_api.wire import contract
from rljob_trainer.run_folder.client import FILE_ID
from rljob_trainer.run_folder.server import RunFileServer

_HOST = "127.0.0.1"


def serve() -> RunFileServer:
    """Serve until the result is closed. Raise UserError if the folder is not that of a run."""
    run_dir, token = Path(os.environ[contract.ENV_RUN_DIR]), os.environ[contract.ENV_TOKEN]
    if not (run_dir / FILE_ID).is_file():
        raise UserError(f"{run_dir} has no run: the job has not started with this claim, or its files were deleted")
    return RunFileServer(run_dir, _HOST, token, Path(os.environ[contract.ENV_JOB_FILE]), is_read_only=True)


def main() -> int:
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT))  # before threads, which inherit it
    try:
        server = serve()
    except RLJobError as error:
        print(f"error: {error}", file=sys.stderr)
        return contract.ExitCode.USER
    signal.sigwait((signal.SIGTERM, signal.SIGINT))
    server.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
