"""`python -m rljob_trainer.replay SETTINGS.json`: the program that takes the head's place in a replay.

Invariant: Ray's environment is set before the first import of Ray, which otherwise never sends the token.
"""

import asyncio
import logging
import os
import sys
from pathlib import Path

from rljob_api.errors import RLJobError
from rljob_api.wire.contract import ExitCode
from rljob_api.wire.logs import configure_logging
from rljob_api.wire.termination import end_program
from rljob_trainer.failures.configuration import explain_end
from rljob_trainer.head.environment import read_environment
from rljob_trainer.ranks.ray_node import ray_environment

log = logging.getLogger(__name__)


def main() -> int:
    configure_logging()
    os.environ.update(ray_environment())
    from rljob_trainer.replay.program import read_settings, replay  # here: it imports Ray

    try:
        asyncio.run(replay(read_environment(dict(os.environ)), read_settings(Path(sys.argv[1]))))
    except Exception as error:  # such as Ray's, which has dozens of types
        if not isinstance(error, RLJobError):
            log.exception("unexpected error")
        return end_program(*explain_end(error))
    return ExitCode.SUCCEEDED


sys.exit(main())
