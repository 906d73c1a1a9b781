"""Names of the API and version of the packages."""

from typing import Final

API_GROUP: Final = "rljob.dev"
API_VERSION: Final = "rljob.dev/v1alpha1"
__version__ = "0.1.0"
