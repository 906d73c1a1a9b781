"""`python -m rljob_api.generate [--check]`: write the CRDs and the field reference, or report drift."""

import sys

from rljob_api.generate.files import main

sys.exit(main())
