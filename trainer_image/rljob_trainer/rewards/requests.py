"""From an episode to the request that its rewards get. rljob_inputs.score_requests defines what that is."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rljob_api.manifest.agent import CompletionChoice
from rljob_api.wire.base import Lane
from rljob_api.wire.scores import ScoreRequest, WholeCompletion
from rljob_inputs import score_requests
from rljob_inputs.prompts import Prompt
from rljob_inputs.score_requests import Answer, Conversation, Decoder
from rljob_trainer.episodes.types import NOT_SAMPLED, Episode, Segment, Turn, Whole


@dataclass
class RequestBuilder:
    """`choice`: spec.agent.completion. `total_steps`: spec.schedule.steps."""

    decoder: Decoder
    choice: CompletionChoice = "auto"
    total_steps: int = 0

    def build(
        self, request_id: str, lane: Lane, prompt: Prompt, episode: Episode, finished_steps: int = 0
    ) -> ScoreRequest:
        """Return the request for an episode. A conversation adds its messages, turns, state and end to extra_info, and
        one of several seats the name of its seat. `finished_steps`: before it began."""
        segment, (start, end) = _find_last_answer(episode.segments)
        answer = Answer(
            text=episode.text,
            truncated=episode.truncated,
            num_tokens=episode.num_sampled,
            prompt_ids=segment.token_ids[:start].tolist(),
            completion_ids=segment.token_ids[start:end].tolist(),
        )
        conversation = None
        if episode.messages:
            conversation = Conversation(
                messages=episode.messages,
                turns=[_describe_turn(turn) for turn in episode.turns],
                state=episode.state,
                end=episode.end.value,
                whole=None if episode.whole is None or self.choice == "last" else self._decode(episode.whole),
            )
        request = score_requests.build_request(request_id, lane, prompt, answer, conversation, self.choice)
        extra = {**request.extra_info, "seat": episode.seat} if episode.seat else request.extra_info
        steps = {"finished_steps": finished_steps, "total_steps": self.total_steps}
        return request.model_copy(update={"extra_info": extra, **steps})

    def _decode(self, whole: Whole) -> WholeCompletion:
        prompt_ids, completion_ids = whole.prompt_ids.tolist(), whole.completion_ids.tolist()
        text = self.decoder.decode(completion_ids, skip_special_tokens=True)
        return WholeCompletion(text=text, messages=whole.messages, prompt_ids=prompt_ids, completion_ids=completion_ids)


def _describe_turn(turn: Turn) -> dict[str, object]:
    calls = [{"name": call.name, "arguments": call.arguments, "error": call.error} for call in turn.tool_calls]
    return score_requests.describe_turn(turn.text, turn.reward, calls)


def _find_last_answer(segments: Sequence[Segment]) -> tuple[Segment, tuple[int, int]]:
    """Return the segment of the last turn, and where its tokens begin and end. It is not always the last segment: a
    program may continue an earlier one."""
    last = max(int(segment.turns.max(initial=NOT_SAMPLED)) for segment in segments)
    if last == NOT_SAMPLED:
        segment = segments[-1]
        return segment, (len(segment.turns), len(segment.turns))
    segment = next(segment for segment in segments if last in segment.turns)
    is_last = segment.turns == last
    start = int(is_last.argmax())
    return segment, (start, start + int(np.count_nonzero(is_last)))
