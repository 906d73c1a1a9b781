"""A conversation of the policy with tools and a simulated user.

    next prompt --> generate --> calls of tools? --> all at once; their results, in order --> next prompt
                                 no calls?       --> the user: a reward of the turn, and its message, or the end

Owns what ends an episode. Leaves tokens to conversation/, and retries to the services. Invariant: each episode ends,
valid or with a reason: what the policy, a tool or the user does never ends the job. Only UserError (a configuration
that no retry can change) and TransientError (no server) leave `run`.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from pydantic import ValidationError

from rljob_api.errors import UserError
from rljob_api.manifest.agent import Agent
from rljob_api.manifest.services.user import USER_SERVICE
from rljob_api.phrases import list_some
from rljob_api.wire.base import InvalidReason, Message
from rljob_api.wire.calls import CallRequest, CallResult, UserCall, UserReply
from rljob_trainer import traces
from rljob_trainer.agents.base import AGENT, EpisodeTask, Services, ToolSet, describe_length
from rljob_trainer.concurrency import run_all
from rljob_trainer.conversation.template import ChatTemplate, TemplateError
from rljob_trainer.conversation.tool_calls import Answer, ParsedCall, ToolFormat, is_json, parse
from rljob_trainer.conversation.transcript import Conversation
from rljob_trainer.episodes.types import (
    Completion,
    ContextBreak,
    Episode,
    EpisodeEnd,
    EpisodeFailure,
    PromptTooLongError,
    ToolCall,
    Turn,
    prompt_segment,
)
from rljob_trainer.outages import deadline

_MAX_LISTED_FUNCTIONS = 20


_Called = tuple[ToolCall, str, EpisodeFailure | None]
"""A call with its outcome, what the model sees, and why the episode is invalid, if it is."""


class _EpisodeFailedError(Exception):
    def __init__(self, failure: EpisodeFailure) -> None:
        super().__init__(str(failure))
        self.failure = failure


@dataclass(eq=False)
class ConversationLoop:
    """`context_length`: the longest prompt with its answer, in tokens; None: the engine alone knows. `away`:
    returns the seconds of outages so far, which no episode pays for. Raise UserError if there are tools, and
    nothing says how the model writes calls."""

    spec: Agent
    services: Services
    template: ChatTemplate
    context_length: int | None
    _away: Callable[[], float] = lambda: 0.0

    def __post_init__(self) -> None:
        self.tool_format: ToolFormat = self.template.tool_format if self.spec.tools else "hermes"
        self.on_error = {tool.name: tool.on_error for tool in self.spec.tools}
        self.max_characters = {tool.name: tool.max_result_characters for tool in self.spec.tools}
        self.paths = {tool.name: f"spec.agent.tools[{index}]" for index, tool in enumerate(self.spec.tools)}
        self.sandboxes = {
            tool.name
            for tool in self.spec.tools
            if tool.sandbox is not None and tool.sandbox.provider == "agentSandbox"
        }
        """Tools that hold a sandbox for each episode that calls them."""
        self.code_tools = {tool.name for tool in self.spec.tools if tool.sandbox is not None}
        """Tools whose calls fail only if the sandbox does, whatever the policy writes."""

    async def run(self, task: EpisodeTask) -> list[Episode]:
        tools = await self.services.tools()
        play = _Play(self, task, tools)
        try:
            async with deadline(self.spec.episode_seconds, self._away) as scope:
                await play.run()
        except TimeoutError:
            if not scope.expired():
                raise
            message = f"the episode took more than {self.spec.episode_seconds:g} s, while it {play.waits_for}"
            play.fail(EpisodeFailure(AGENT, "spec.agent.episodeSeconds", str(InvalidReason.DEADLINE), message))
        except _EpisodeFailedError as error:
            play.fail(error.failure)
        finally:  # also of an episode that is cancelled
            for tool in sorted(play.called_tools & self.sandboxes):
                self.services.end_episode(tool, task.id, task.lane)
        return [play.finish()]


@dataclass
class _Play:
    """One episode under way."""

    loop: ConversationLoop
    task: EpisodeTask
    tools: ToolSet
    episode: Episode = field(init=False)
    conversation: Conversation = field(init=False)
    is_over: bool = False
    num_replies: int = 0
    """Messages of the user after the prompt."""
    waits_for: str = "waited for a completion"
    called_tools: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        task = self.task
        self.episode = Episode(task.prompt.index, task.group, task.sample)
        assert isinstance(task.prompt.prompt, list), "data.format is chat with loop"
        self.conversation = Conversation(self.loop.template, task.prompt.prompt, self.tools.schemas)

    async def run(self) -> None:
        while not self.is_over:
            with traces.begin_turn(len(self.episode.turns)):
                await self._play_turn()

    async def _play_turn(self) -> None:
        """Get an answer, and what follows from it: results of tools, or the user's reply."""
        prompt = self._next_prompt()
        length = self.loop.context_length
        room = None if length is None else length - len(prompt)
        self.waits_for = "waited for a completion"
        try:
            if length is not None and len(prompt) >= length:
                raise PromptTooLongError(len(prompt), length)
            completion = await self.task.generate(prompt, room)
        except PromptTooLongError as error:
            if self.episode.turns:
                self._end(EpisodeEnd.CONTEXT)
            else:
                self.fail(describe_length(error))
            return
        await self._record_answer(completion, room)

    def fail(self, failure: EpisodeFailure) -> None:
        self.episode.failure, self.episode.end, self.is_over = failure, EpisodeEnd.FAILED, True

    def finish(self) -> Episode:
        episode, conversation = self.episode, self.conversation
        episode.messages = conversation.messages
        episode.segments, episode.whole = conversation.segments, conversation.read_whole()
        episode.breaks = [ContextBreak(each.cause.value, each.difference) for each in conversation.breaks]
        if not episode.segments:  # failed before the first answer: one row, on which nothing trains
            episode.segments = [prompt_segment(self.task.prompt)]
        return episode

    def _next_prompt(self) -> list[int]:
        """Return the next prompt. A template that refuses what the data has is a UserError; a template that refuses
        what was said since then fails the episode."""
        try:
            return self.conversation.next_prompt()
        except TemplateError as error:
            if not self.episode.turns:
                raise UserError(f"spec.model.source: {error}") from error
            failure = EpisodeFailure(AGENT, "spec.model.source", str(InvalidReason.EXCEPTION), str(error))
            raise _EpisodeFailedError(failure) from error

    def _end(self, end: EpisodeEnd) -> None:
        self.episode.end, self.is_over = end, True

    async def _record_answer(self, completion: Completion, room: int | None) -> None:
        """Record an answer, and do what follows from it."""
        answer = parse(completion.text, self.loop.tool_format) if self.tools.schemas else Answer(completion.text)
        if completion.truncated:
            answer = Answer(completion.text)  # the half of a call is none
        number, turn = len(self.episode.turns), Turn(completion.text, completion.truncated)
        turn.tool_calls = [_plan_call(call, f"call_{number}_{i}") for i, call in enumerate(answer.calls)]
        self.conversation.add_answer(completion, _describe_answer(completion, answer, turn))
        self.episode.turns.append(turn)
        self.episode.generation = completion.generation
        is_last = len(self.episode.turns) >= self.loop.spec.turn_limit
        if completion.truncated:
            self._end(EpisodeEnd.CONTEXT if len(completion.token_ids) == room else EpisodeEnd.TRUNCATED)
        elif turn.tool_calls and is_last:
            reason = "it was not called: the episode has reached maxAssistantTurns"
            turn.tool_calls = [replace(call, error=call.error or reason) for call in turn.tool_calls]
            self._end(EpisodeEnd.MAX_TURNS)
        elif turn.tool_calls:
            await self._call_tools(turn)
        elif self.loop.spec.user is None:
            self._end(EpisodeEnd.ANSWERED)
        else:
            await self._ask_user(turn, is_last=is_last)

    async def _call_tools(self, turn: Turn) -> None:
        names = ", ".join(dict.fromkeys(call.name for call in turn.tool_calls if call.name))
        self.waits_for = f"waited for the tools: {names}"
        results = await run_all([self._call_tool(call) for call in turn.tool_calls])
        turn.tool_calls = [call for call, _, _ in results]
        for _, _, failure in results:
            if failure is not None:
                raise _EpisodeFailedError(failure)
        self.conversation.add(
            [{"role": "tool", "tool_call_id": call.id, "name": call.name, "content": text} for call, text, _ in results]
        )

    async def _call_tool(self, call: ToolCall) -> _Called:
        tool = self.tools.owners.get(call.name, "")
        error = call.error or ("" if tool else self._describe_unknown(call.name))
        if error or call.arguments is None:
            return replace(call, error=error), f"Error: {error}", None
        request = CallRequest(
            id=f"{self.task.id}/{call.id}",
            lane=self.task.lane,
            function=call.name,
            episode=self.task.id,
            arguments=call.arguments,
        )
        self.called_tools.add(tool)
        result, seconds = await self.loop.services.call(tool, request)
        limit = self.loop.max_characters[tool]
        if result.valid:
            text = result.value if isinstance(result.value, str) else json.dumps(result.value, ensure_ascii=False)
            return replace(call, tool=tool, seconds=seconds), text[:limit], None
        call, failure = replace(call, error=f"{result.reason}: {result.message}", tool=tool, seconds=seconds), None
        if result.reason is not InvalidReason.BAD_REQUEST:
            found = EpisodeFailure(tool, self.loop.paths[tool], str(result.reason), result.message)
            if self.loop.on_error[tool] == "invalid":
                failure = found
            elif tool in self.loop.code_tools:
                self.episode.sandbox_failures.append(found)
        return call, f"Error: {result.message}"[:limit], failure

    def _describe_unknown(self, name: str) -> str:
        listed = list_some(list(self.tools.owners), _MAX_LISTED_FUNCTIONS)
        return f"there is no function {name}; the functions are {listed}"

    async def _ask_user(self, turn: Turn, *, is_last: bool) -> None:
        """Get the user's reply. It also rewards an answer after its last reply."""
        self.waits_for = "waited for the user"
        prompt, limit = self.task.prompt, self.loop.spec.max_user_turns
        call = UserCall(
            messages=list(self.conversation.messages),
            state=self.episode.state,
            turn=self.num_replies,
            episode=self.task.id,
            prompt=prompt.prompt,
            ground_truth=prompt.ground_truth,
            data_source=prompt.data_source,
            extra_info=prompt.extra_info,
        )
        request = CallRequest(
            id=f"{self.task.id}/user_{len(self.episode.turns) - 1}", lane=self.task.lane, arguments=call.model_dump()
        )
        result, turn.user_seconds = await self.loop.services.call(USER_SERVICE, request)
        reply = _read_reply(result)
        turn.reward, turn.user_info, self.episode.state = reply.reward, reply.info, reply.state
        if reply.text is None:
            self._end(EpisodeEnd.USER)
        elif is_last or (limit is not None and self.num_replies >= limit):
            self._end(EpisodeEnd.MAX_TURNS)
        else:
            self.num_replies += 1
            self.conversation.add([{"role": "user", "content": reply.text}])


def _plan_call(call: ParsedCall, call_id: str) -> ToolCall:
    if call.arguments is None or not call.name:
        error = "the call is not a JSON object with a name and an object of arguments"
        return ToolCall(call_id, call.name, None, error)
    if not is_json(call.arguments):
        return ToolCall(call_id, call.name, None, "the arguments must be JSON, without NaN and deep nesting")
    return ToolCall(call_id, call.name, call.arguments)


def _describe_answer(completion: Completion, answer: Answer, turn: Turn) -> Message:
    """Return the answer as a message. One with a call that cannot be read stays text, as the policy wrote it."""
    if not turn.tool_calls or any(call.arguments is None for call in turn.tool_calls):
        return {"role": "assistant", "content": completion.text}
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in turn.tool_calls
    ]
    return {"role": "assistant", "content": answer.content, "tool_calls": calls}


def _read_reply(result: CallResult) -> UserReply:
    """Return the user's reply. Raise _EpisodeFailedError without one: no reply is not the end of the conversation."""
    reason, message = str(result.reason), result.message
    if result.valid:
        try:
            return UserReply.model_validate(result.value, extra="ignore")
        except ValidationError as error:
            reason, message = str(InvalidReason.BAD_RETURN), f"not a user's reply: {error.errors()[0]['msg']}"
    raise _EpisodeFailedError(EpisodeFailure(USER_SERVICE, "spec.agent.user", reason, message))
