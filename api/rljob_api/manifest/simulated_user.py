"""spec.agent.user: who answers the policy, which is a function or a chat model with a persona."""

from __future__ import annotations

from typing import Annotated, ClassVar, Final

from pydantic import Field

from rljob_api.manifest import base
from rljob_api.manifest.agent_service import AgentService
from rljob_api.manifest.base import LongText, Rule, Spec
from rljob_api.manifest.reward import PythonFunction, Reward, limits_suffice
from rljob_api.manifest.roles import Role
from rljob_api.manifest.scorers import JudgeEndpoint, JudgeSampling, ServedModel

USER_SERVICE: Final = "user"
"""Name of the service of spec.agent.user."""


class UserModel(Spec):
    """A chat model that plays the user: exactly one of model (served as a sidecar of the user's server) and
    endpoint."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        base.exactly_one(
            "model", "endpoint", remedy="set model to a checkpoint to serve, or endpoint to an existing endpoint"
        ),
    )

    model: ServedModel | None = None
    """A checkpoint to serve."""
    endpoint: JudgeEndpoint | None = None
    """An external OpenAI-compatible endpoint."""
    persona: LongText
    """Jinja template (sandboxed) of the system message: who the user is, what it wants, and when it is satisfied.
    Variables: `prompt` (text), `messages` (the conversation), `ground_truth`, `data_source`, `extra_info`, `turn`
    (number of its earlier replies)."""
    stop: Annotated[str, Field(min_length=1, max_length=256, pattern=r"\S")] | None = None
    """Text with which the model ends the conversation, such as `[DONE]`; the persona must say so. What precedes it is
    not sent to the policy. Null: only the limits of turns end it."""
    sampling: JudgeSampling = JudgeSampling()


class UserModelService(Reward):
    """The settings of the server of a user model, in the form of a reward. Not part of a manifest."""

    RULES: ClassVar[tuple[Rule, ...]] = Role.RULES

    user_model: UserModel
    """Who answers."""

    @property
    def is_served(self) -> bool:
        """Always true."""
        return True

    @property
    def kind(self) -> str:
        """Name of the field of agent.user."""
        return "model"

    @property
    def served_model(self) -> ServedModel | None:
        """The checkpoint that vLLM serves as a sidecar, if any."""
        return self.user_model.model

    @property
    def served_model_field(self) -> str:
        """Field of served_model, below agent.user."""
        return "model.model"

    @property
    def endpoint(self) -> JudgeEndpoint | None:
        """The OpenAI-compatible endpoint whose chat model plays the user, if any."""
        return self.user_model.endpoint


class SimulatedUser(AgentService):
    """A user that answers the policy, rewards its turns and ends the conversation: a function or class `respond`, or a
    chat model with a persona. See docs/agents.md."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        *Role.RULES,
        base.exactly_one("function", "model"),
        *limits_suffice("model"),
    )

    function: PythonFunction | None = None
    """The source."""
    model: UserModel | None = None
    """A chat model that plays the user. It gives no rewards: the job's rewards score the conversation."""

    def as_reward(self, name: str) -> Reward:
        """Return the settings of its server."""
        if self.model is not None:
            return UserModelService.model_validate({**self.shared_settings(name), "user_model": self.model})
        assert self.function is not None, "a rule requires one of the two"
        return self.settings(name, self.function)
