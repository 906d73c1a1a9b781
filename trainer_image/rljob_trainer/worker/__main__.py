"""`python -m rljob_trainer.worker`: the program of a trainer Pod."""

import sys

from rljob_trainer.worker.main import main

sys.exit(main())
