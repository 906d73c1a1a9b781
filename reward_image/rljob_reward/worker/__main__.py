"""`python -m rljob_reward.worker FD PARENT_PID HANDOVER_FD`: one worker process."""

import sys

from rljob_reward.worker.main import main

sys.exit(main(sys.argv[1:]))
