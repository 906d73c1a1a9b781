"""`python -m rljob_trainer.doctor [--gpus N] [--output json]`. The exit code is 1 if a check failed."""

import sys

from rljob_trainer.doctor.main import main

if __name__ == "__main__":  # processes of the all-reduce import this module, too
    sys.exit(main())
