"""`python -m rljob_trainer.rollout`: the program of a rollout Pod."""

import sys

from rljob_trainer.rollout.server import main

sys.exit(main())
