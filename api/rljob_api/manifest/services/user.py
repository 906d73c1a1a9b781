"""spec.agent.user: who answers the policy, which is a function or a chat model with a persona."""

from typing import ClassVar, Final

from rljob_api.manifest import base
from rljob_api.manifest.base import Rule
from rljob_api.manifest.services.calls import AgentService, CallService
from rljob_api.manifest.services.function import PythonFunction
from rljob_api.manifest.services.models import UserModel, limits_suffice

USER_SERVICE: Final = "user"
"""Name of the service of spec.agent.user."""


class SimulatedUser(AgentService):
    """A user that answers the policy, rewards its turns and ends the conversation: a function or class `respond`, or a
    chat model with a persona. See docs/agents.md."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        *AgentService.RULES,
        base.exactly_one("function", "model"),
        *limits_suffice("model"),
    )

    function: PythonFunction | None = None
    """The source."""
    model: UserModel | None = None
    """A chat model that plays the user. It gives no rewards: the job's rewards score the conversation."""

    def build_service(self) -> CallService:
        """Return the settings of its server."""
        return self._build(USER_SERVICE, function=self.function, user_model=self.model)
