"""`python -m rljob_trainer.rollout`: the program of a rollout Pod."""

import os
import sys

# Before torch is imported, whose OpenMP reads it then. On CPUs, threads that wait for the next operator would spin for
# milliseconds, and take the processors from trainers and rewards: about half of the engine's CPU time.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

from rljob_trainer.rollout.server import main

sys.exit(main())
