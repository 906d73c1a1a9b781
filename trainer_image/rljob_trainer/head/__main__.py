"""`python -m rljob_trainer.head`: the program of the head Pod."""

import sys

from rljob_trainer.head.main import main

sys.exit(main())
