"""`python -m rljob_trainer.tinker`: the program that takes the head's place in a training service."""

import sys

from rljob_trainer.tinker.main import main

sys.exit(main())
