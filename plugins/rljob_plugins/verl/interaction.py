"""verl's former interaction classes, unchanged: start_interaction, generate_response, finalize_interaction.

Such a class keeps each conversation in its process. Calls of an episode may run in different processes, so each call
starts the interaction again and repeats its earlier turns before the one that counts: a call takes as long as all turns
so far. The answers of repeated turns are discarded.
"""

import copy
import inspect
import itertools
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Final

from rljob_plugins.verl.signature import GENERATE_RESPONSE
from rljob_service.worker.forms import user
from rljob_service.worker.forms.binding import CallBinding
from rljob_service.worker.forms.inspection import read_parameters
from rljob_service.worker.forms.outcome import BAD_RETURN, CallOutcome, describe, failed_call
from rljob_service.worker.forms.stand_ins import provide_module

_EXPECTED: Final = "(should_terminate, response, score, extra), as verl's interactions do"
_INTERACTION_KWARGS: Final = "interaction_kwargs"
"""The key of extra_info whose entries verl passes to the methods."""
_START: Final = "start_interaction"
_FINALIZE: Final = "finalize_interaction"
_MODULE: Final = "verl.interactions.base"


class BaseInteraction:
    """The base class that verl removed in 0.9, for sources that import it."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.name: str = config.get("name", "interaction_agent")

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        return instance_id or str(uuid.uuid4())

    async def calculate_score(self, *args: Any, **kwargs: Any) -> float:
        return 0.0

    async def finalize_interaction(self, *args: Any, **kwargs: Any) -> None:
        """Release what start_interaction created."""


# Before the user's source runs: verl may be missing, or a version without it.
provide_module(_MODULE, {"BaseInteraction": BaseInteraction})


def bind(made: Any, name: str) -> CallBinding:
    """Bind an instance of an interaction class."""

    async def call(request: dict[str, Any]) -> Any:
        arguments = request["arguments"]
        instance_id = arguments.get("episode") or request["id"]
        options = _Options(instance_id, arguments)
        messages = arguments["messages"]
        await options.call(made, _START)
        try:
            for length in _earlier_turns(messages, arguments.get("turn", 0)):
                await options.call(made, GENERATE_RESPONSE, messages=copy.deepcopy(messages[:length]))
            return await options.call(made, GENERATE_RESPONSE, messages=copy.deepcopy(messages))
        finally:
            await options.call(made, _FINALIZE)

    return CallBinding(call, lambda value, request: _read(value, request["arguments"].get("state", {}), name))


class _Options:
    """The arguments of the methods: those that verl would pass, and by name whatever else `respond` may take."""

    def __init__(self, instance_id: str, arguments: dict[str, Any]) -> None:
        columns = user.columns_of(arguments)
        passed = columns.get(_INTERACTION_KWARGS)
        truth = {} if arguments.get("ground_truth") is None else {"ground_truth": arguments["ground_truth"]}
        self._given = {**truth, **(passed if isinstance(passed, dict) else columns)}
        self._named = {**user.read_values(arguments), **columns, **self._given, "instance_id": instance_id}

    async def call(self, made: Any, method: str, **own: Any) -> Any:
        """Call a method, if the object has it."""
        function = getattr(made, method, None)
        if function is None:
            return None
        parameters = read_parameters(method, function)
        named = {name: value for name, value in {**self._named, **own}.items() if name in parameters.named}
        others = {**self._given, **own, "instance_id": self._named["instance_id"]} if parameters.var_keyword else {}
        value = function(**{**others, **named})
        return await value if inspect.isawaitable(value) else value


def _earlier_turns(messages: Sequence[Mapping[str, Any]], num_turns: int) -> list[int]:
    """Return the lengths of the conversation at the earlier turns of the user. The prompt may have others before."""
    pairs = itertools.pairwise(messages)
    answered = [
        index + 1
        for index, (answer, reply) in enumerate(pairs)
        if answer.get("role") == "assistant" and reply.get("role") == "user"
    ]
    return answered[-num_turns:] if num_turns else []


def _read(value: Any, state: Any, name: str) -> CallOutcome:
    method = f"{name}.{GENERATE_RESPONSE}"
    if not isinstance(value, (tuple, list)) or len(value) != 4:
        return failed_call(BAD_RETURN, f"{method} returned {describe(value)}; expected {_EXPECTED}")
    ends, text, score, extra = value
    if type(ends).__name__ not in ("bool", "bool_"):
        return failed_call(BAD_RETURN, f"{method}: should_terminate is {describe(ends)}; expected a bool")
    if not isinstance(text, str) and not (ends and text is None):
        return failed_call(BAD_RETURN, f"{method}: response is {describe(text)}; expected a str")
    info = extra if extra is not None else {}
    if ends and text and isinstance(info, Mapping):
        info = {"response": text, **info}  # the conversation ends without it
    return user.read_reply(None if ends else text, score, info, state, method)
