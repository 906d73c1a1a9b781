"""Real reward servers of kind judge, for every test of this folder."""

from tests.support.judge_servers import endpoint, start_judge

__all__ = ["endpoint", "start_judge"]
