from tests.support.judge_servers import endpoint, start_judge

__all__ = ["endpoint", "start_judge"]
