"""RLJob's public types: what a user writes, what a status says, and what the parts say to each other.

Imports pydantic and PyYAML alone, so that every other package, however small, may depend on it.
"""

from typing import Final

API_GROUP: Final = "rljob.dev"
API_VERSION: Final = "rljob.dev/v1alpha1"
__version__ = "0.1.0"
