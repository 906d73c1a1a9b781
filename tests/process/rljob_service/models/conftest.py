from tests.support.judge_servers import endpoint, start_judge, start_user

__all__ = ["endpoint", "start_judge", "start_user"]
