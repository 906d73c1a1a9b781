"""`python -m rljob_trainer.rehearsal SETTINGS.json`: the program that takes the head's place in a rehearsal."""

import sys

from rljob_trainer.rehearsal.main import main

sys.exit(main())
