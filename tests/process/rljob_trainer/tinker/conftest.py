"""The fixtures of the policy's tests: the models of these are as tiny."""

from tests.process.rljob_trainer.policy.conftest import one_thread, outcome

__all__ = ["one_thread", "outcome"]
