from tests.support.judge_servers import endpoint, make_judge, make_reward, make_user

__all__ = ["endpoint", "make_judge", "make_reward", "make_user"]
