"""Real reward servers, for rewards whose packages are installed by function.requirements."""

from tests.support.reward_servers import start_server

__all__ = ["start_server"]
