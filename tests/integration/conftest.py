"""One token of Ray's for all tests of this process.

Ray reads its environment when it is imported, and which test imports it first is a matter of the alphabet.
"""

import os

from rljob_trainer.ranks.ray_node import ray_environment

os.environ |= ray_environment() | {"RAY_AUTH_TOKEN": "0123456789abcdef0123456789abcdef"}
