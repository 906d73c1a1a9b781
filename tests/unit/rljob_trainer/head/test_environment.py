"""The head's environment variables."""

import pytest

from rljob_api.errors import UserError
from rljob_trainer.head.environment import read_environment


def test_missing_variables_are_listed():
    with pytest.raises(UserError, match=r"not set: RLJOB_RUN_DIR.*RLJOB_REWARD_SERVICES"):
        read_environment({"RLJOB_JOB_FILE": "/x"})
