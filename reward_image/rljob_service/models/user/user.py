"""A simulated user that is a chat model: a persona, the conversation from the other side, and a text that ends it.

A call is one question. It shares limits, retries and timeouts with judges. Invariant: a failure of the model is a
reason, never the end of a conversation.
"""

from collections.abc import Callable

from rljob_api.errors import RLJobError
from rljob_api.manifest.services.models import UserModel
from rljob_api.wire.calls import CallRequest, UserCall, UserReply
from rljob_service.models.chat import ChatBackend, ChatSettings
from rljob_service.models.execution import ExecutionProgress, NoScoreError
from rljob_service.models.metrics import UpstreamMetrics
from rljob_service.models.templates import Template, fields_of
from rljob_service.models.user.conversation import read_reply, swap_roles

_FIELD = "model"
"""Field of agent.user."""
_VARIABLES = ("prompt", "messages", "ground_truth", "data_source", "extra_info", "turn")


class ChatUser(ChatBackend):
    def __init__(
        self,
        user: UserModel,
        replicas: int,
        metrics: UpstreamMetrics,
        on_fatal_error: Callable[[RLJobError], None],
    ) -> None:
        """Raises UserError if the persona is invalid, or if the key or vLLM's socket is missing."""
        self._persona = Template(f"{_FIELD}.persona", user.persona, _VARIABLES)
        settings = ChatSettings(
            who="user", path=_FIELD, model=user.model, endpoint=user.endpoint, sampling=user.sampling
        )
        super().__init__(settings, replicas, metrics, on_fatal_error)
        self._stop = user.stop

    async def execute(self, body: bytes, progress: ExecutionProgress) -> list[UserReply]:
        call = UserCall.model_validate(CallRequest.model_validate_json(body).arguments)
        persona = self._persona.render(fields_of(call) | {"messages": call.messages, "turn": call.turn})
        messages = [{"role": "system", "content": persona}, *swap_roles(call.messages)]
        text, progress.used = await self.ask(messages, progress)
        if isinstance(text, NoScoreError):
            raise text
        return [read_reply(text, self._stop, call.state)]
