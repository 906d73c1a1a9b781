"""`python -m rljob_trainer.replay SETTINGS.json`: the program that takes the head's place in a replay."""

import sys

from rljob_trainer.replay.main import main

sys.exit(main())
