"""A simulated user that is a chat model: a persona, the conversation from the other side, and a text that ends it.

A call is one question. It shares limits, retries and timeouts with judges. Invariant: a failure of the model is a
reason, never the end of a conversation.

For the model, the user's messages are the assistant's, and what the policy wrote comes as messages of the user. Roles
alternate and the first message is the policy's, as many chat templates require.
"""

from collections.abc import Callable, Sequence
from typing import Any

from rljob_api.errors import RLJobError
from rljob_api.manifest.services.models import UserModel
from rljob_api.wire.base import InvalidReason, Message
from rljob_api.wire.calls import CallRequest, UserCall, UserReply
from rljob_service.models.chat import ChatBackend, ChatSettings
from rljob_service.models.execution import ExecutionProgress, NoScoreError
from rljob_service.models.metrics import UpstreamMetrics
from rljob_service.models.templates import Template, fields_of
from rljob_service.models.texts import content_of, drop_reasoning
from rljob_service.worker.forms.outcome import encodable

OPENING = "Hello! How can I help you?"
"""What the policy says before the user's first message."""
_EMPTY = "(an empty message)"
_SWAPPED = {"user": "assistant", "assistant": "user"}
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


def swap_roles(messages: Sequence[Message]) -> list[Message]:
    """Return the conversation for the model that plays the user. System messages, calls of tools and their results are
    not shown, nor the policy's reasoning."""
    swapped: list[Message] = []
    for message in messages:
        role = _SWAPPED.get(str(message.get("role")))
        text = drop_reasoning(content_of(message)) if role == "user" else content_of(message)
        if role is None or (not text and message.get("tool_calls")):
            continue
        text = text or _EMPTY
        if swapped and swapped[-1]["role"] == role:
            swapped[-1]["content"] += f"\n\n{text}"
        else:
            swapped.append({"role": role, "content": text})
    if not swapped or swapped[0]["role"] != "user":
        swapped.insert(0, {"role": "user", "content": OPENING})
    return swapped


def read_reply(text: str, stop: str | None, state: dict[str, Any]) -> UserReply:
    """Return the user's turn. Raises NoScoreError if the text has only reasoning."""
    text = encodable(drop_reasoning(text))
    if stop is not None and stop in text:
        return UserReply(text=None, state=state, info={"last_message": text})
    if not text:
        raise NoScoreError(InvalidReason.EMPTY, "the user's answer is empty, except for its reasoning")
    return UserReply(text=text, state=state)
