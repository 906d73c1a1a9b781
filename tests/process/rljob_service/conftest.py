"""Real reward servers, for every test of this folder."""

from tests.support.reward_servers import start_server

__all__ = ["start_server"]
