"""A real runner, for environments whose packages are installed by environment.packages, and a scripted model."""

from tests.support.reward_servers import start_server
from tests.support.scripted_model import scripted_model

__all__ = ["scripted_model", "start_server"]
