"""Samples that no rollout has produced, as the trainer would send them: for `rljob validate` and `rljob test-reward`.

Rows become prompts as in training, and the tokenizer of the job's model counts tokens. rljob_inputs.score_requests
builds the request.
"""

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rljob_api.errors import RLJobError
from rljob_api.manifest.job import RLJob
from rljob_api.wire.base import Message
from rljob_api.wire.scores import Rendered, ScoreRequest, WholeCompletion
from rljob_cli.check.token_ids import encode_answer, read_tokenizer
from rljob_inputs.data.prompts import build_prompt, render
from rljob_inputs.data.rows import Row
from rljob_inputs.findings import InputError
from rljob_inputs.models.tokenizer import LightTokenizer
from rljob_inputs.prompts import Prompt
from rljob_inputs.score_requests import Answer, Conversation, build_request, describe_turn

_OWN_FIELDS = ("completion", "prompt", "prompt_ids", "completion_ids")
"""Columns of a row of --file that are not in extra_info."""
_ANSWERS = ("answer", "ground_truth")


def load_job_tokenizer(job: RLJob) -> LightTokenizer | None:
    """Return the tokenizer of the job's model; None if it cannot be read, which the checks of the model report."""
    with contextlib.suppress(RLJobError):
        return read_tokenizer(job)
    return None


class SampleBuilder:
    def __init__(self, job: RLJob, tokenizer: LightTokenizer | None = None) -> None:
        """Without a tokenizer, samples have no `num_tokens`, and stand-ins for token ids."""
        self._job, self._tokenizer = job, tokenizer

    def build(self, request_id: str, prompt: Prompt, completion: str) -> ScoreRequest:
        """Return the request for a completion that no token limit cut off."""
        agent, num_tokens = self._job.spec.agent, None
        if self._tokenizer is not None:
            arguments = self._job.spec.data.chat_template_arguments
            num_tokens = len(encode_answer(prompt.prompt, completion, self._tokenizer, arguments))
        conversation = None if agent.type == "singleTurn" else self._describe_conversation(prompt, completion)
        answer = Answer(completion, num_tokens=num_tokens)
        request = build_request(request_id, "eval", prompt, answer, conversation, agent.completion)
        request = request.model_copy(update={"finished_steps": 0, "total_steps": self._job.spec.schedule.steps})
        return request if self._tokenizer is not None else _stand_in(request)

    def build_row(self, request_id: str, row: Mapping[str, Any], position: int) -> ScoreRequest:
        """Return the request for a row with a completion, and any of prompt, answer and other columns. The answer is
        that of the data's column, as in training, else that of `answer` or `ground_truth`."""
        source, place = self._job.spec.data.train, f"row {position + 1}"
        values = {name: value for name, value in row.items() if name not in _OWN_FIELDS}
        rendered = self._render(row.get("prompt") or row.get(source.prompt) or "", values, position)
        try:
            if source.answer is None:
                raise InputError("spec.data.train.answer", "is null")
            prompt = build_prompt(source, Row(values, position, place), rendered, [], "train", "spec.data.train")
        except InputError:
            values = {name: value for name, value in values.items() if name not in _ANSWERS}
            unanswered = source.model_copy(update={"answer": None})
            prompt = build_prompt(unanswered, Row(values, position, place), rendered, [], "train", "spec.data.train")
            answer_column = source.answer if source.answer and "." not in source.answer else ""
            truth = row.get("answer", row.get("ground_truth"))
            prompt = replace(prompt, ground_truth=truth, answer_column=answer_column)
        built = self.build(request_id, prompt, row["completion"])
        ids = {name: row[name] for name in ("prompt_ids", "completion_ids") if name in row}
        # A row may be of a recorded episode: what it says about itself counts.
        return built.model_copy(update={**ids, "extra_info": {**built.extra_info, **prompt.extra_info}})

    def _render(self, prompt: str | list[Message], values: Mapping[str, Any], position: int) -> str | list[Message]:
        data = self._job.spec.data
        source = data.train.model_copy(update={"prompt": "prompt"})
        try:
            return render(data, source, Row({**values, "prompt": prompt}, position, f"row {position + 1}"), "train")
        except InputError:  # no prompt, or no columns for the template: a reward may not need them
            is_text = data.format == "text" or isinstance(prompt, list)
            return prompt if is_text else [{"role": "user", "content": prompt}]

    def _describe_conversation(self, prompt: Prompt, completion: str) -> Conversation:
        agent = self._job.spec.agent
        asked = [{"role": "user", "content": prompt.prompt}] if isinstance(prompt.prompt, str) else prompt.prompt
        answer = {"role": "assistant", "content": completion}
        return Conversation(
            messages=[*asked, answer],
            turns=[describe_turn(completion)],
            state={},
            end="returned" if agent.is_hosted else "user" if agent.user else "answered",
            whole=WholeCompletion(text=completion, messages=[answer]),
        )


def _stand_in(request: ScoreRequest) -> ScoreRequest:
    """Return the request with texts and token ids of no model, for functions that read them."""
    prompt = request.prompt if isinstance(request.prompt, str) else "\n".join(map(_content, request.prompt))
    rendered = Rendered(prompt=prompt, query=f"{prompt}{request.completion}")
    ids = {"prompt_ids": [0], "completion_ids": [0]}
    whole = request.whole and request.whole.model_copy(update=ids)
    return request.model_copy(update={**ids, "rendered": rendered, "whole": whole})


def _content(message: Message) -> str:
    return str(message.get("content") or "")
