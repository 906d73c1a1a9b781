"""Sets one Ray token for all tests of a process, since Ray reads its environment at import."""

import os

from rljob_trainer.ranks.ray_node import ray_environment

os.environ |= ray_environment() | {"RAY_AUTH_TOKEN": "0123456789abcdef0123456789abcdef"}
