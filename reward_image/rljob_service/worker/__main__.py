"""`python -m rljob_service.worker FD PARENT_PID HANDOVER_FD STACK_FD BOARD_FD`: one worker process."""

import sys

from rljob_service.worker.main import main

sys.exit(main(sys.argv[1:]))
