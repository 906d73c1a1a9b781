"""The settings that a job leaves to its model, filled in from the model's own files. Pure.

    config.json, generation_config.json, chat template --> OwnSettings
    OwnSettings + the job's spec --> the resolved spec, and what was taken from where

Leaves reading the files to own_settings.py. Every program resolves a job once, at its start; nothing else guesses.
Invariants: what the manifest sets stays; a resolved spec has no null maxTokens and no null evaluation.sampling, and
resolving it again changes nothing; the same job and model give the same spec in every program.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rljob_api.manifest.evaluation import Evaluation, EvaluationSet
from rljob_api.manifest.job import RLJob, RLJobSpec
from rljob_api.manifest.roles import Sampling
from rljob_inputs.models.architectures import text_config
from rljob_inputs.models.chat_template import TemplateSource
from rljob_inputs.models.config import Config, find_context_length, overrides_length

MAX_TOKENS = 512
"""Limit of an answer, for models that do not think."""
MAX_THINKING_TOKENS = 16384
"""For models that think: half of what Qwen3's model card recommends for most questions. A group of longer answers needs
memory that a first job may not have, and `rljob validate` shows the limit."""
_ROLLOUT, _EVALUATION = "spec.rollout.sampling", "spec.evaluation.sampling"
_FILE = "generation_config.json"
_MAX_TEMPERATURE, _MAX_TOP_K = 100.0, 1 << 20
"""No model is sampled with more: such values are left out."""


@dataclass(frozen=True)
class OwnSettings:
    """What a model's files say about its use. Empty: the file is missing, or does not say."""

    config: Config
    """config.json."""
    generation: Mapping[str, Any] = field(default_factory=dict)
    """generation_config.json."""
    template: TemplateSource | None = None
    """The chat template in use: that of the job, else the model's."""
    template_place: str = ""
    """Where it is: model.chatTemplate, chat_template.jinja, tokenizer_config.json."""
    eos_token: str | None = None
    """The tokenizer's end-of-sequence token."""
    special_tokens: Mapping[str, int] = field(default_factory=dict)
    """Ids of the tokenizer's special tokens, by text."""

    @property
    def end_ids(self) -> list[int]:
        """The ids that end an answer in vLLM: the tokenizer's, and those of generation_config.json, or of config.json
        if there is no such file."""
        holder = self.generation or text_config(self.config)
        given = holder.get("eos_token_id")
        ids = [given] if isinstance(given, int) else given if isinstance(given, list) else []
        own = self.special_tokens.get(self.eos_token or "")
        return list(dict.fromkeys(each for each in (own, *ids) if isinstance(each, int)))


@dataclass(frozen=True)
class FromModel:
    """One setting that the model's files decide."""

    field: str
    """Field of the manifest, such as spec.rollout.sampling.maxTokens."""
    value: Any
    """As the manifest would have it."""
    source: str
    """The file and the reason."""


@dataclass(frozen=True)
class Resolved:
    spec: RLJobSpec
    from_model: list[FromModel]
    """For people. Empty if the model's files are unknown."""


def resolve_job(job: RLJob, own: OwnSettings | None) -> RLJob:
    return job.model_copy(update={"spec": resolve(job.spec, own).spec})


def resolve(spec: RLJobSpec, own: OwnSettings | None) -> Resolved:
    """Fill in what the spec leaves to the model. `own`: None if its files cannot be read from here; then the values are
    those of a model that says nothing."""
    limit = _choose_max_tokens(spec, own)
    end = [] if own is None else _find_unknown_end(spec, own)
    before = spec.rollout.sampling
    rollout = before.model_copy(update={"max_tokens": limit.value, "stop": [*before.stop, *end]})
    evaluation, has_default = spec.evaluation, spec.evaluation.sampling is None
    sampling = _resolve_evaluation(evaluation.sampling, own, rollout, end, evaluation.samples_per_prompt)
    sets = [_resolve_set(each, evaluation, own, rollout, end) for each in evaluation.sets]
    resolved = evaluation.model_copy(update={"sampling": sampling, "sets": sets})
    changed = {
        "rollout": spec.rollout.model_copy(update={"sampling": rollout}),
        "evaluation": resolved,
    }
    found: list[FromModel] = []
    if own is not None:
        found += _describe_context(spec, own)
        found += [limit] if before.max_tokens is None else []
        found += _describe_temperature(before, own)
        found += _describe_ends(own, end)
        if spec.held_out_sets and resolved.sampling and has_default:
            found.append(_describe_evaluation(resolved.sampling, own, evaluation.samples_per_prompt))
        elif spec.held_out_sets and evaluation.sampling and evaluation.sampling.max_tokens is None:
            found.append(FromModel(f"{_EVALUATION}.maxTokens", limit.value, "as rollout.sampling.maxTokens"))
    return Resolved(spec.model_copy(update=changed), found)


def _choose_max_tokens(spec: RLJobSpec, own: OwnSettings | None) -> FromModel:
    path = f"{_ROLLOUT}.maxTokens"
    if (given := spec.rollout.sampling.max_tokens) is not None:
        return FromModel(path, given, "")
    wanted, source = _find_wanted_tokens(spec, own)
    room, prompt = _find_room(spec, own), spec.data.max_prompt_tokens
    if room is None:
        return FromModel(path, wanted, source)
    longest = max(1, room // 2 if prompt is None else room - prompt)
    if wanted > longest:
        name = f"{'rollout.maxModelLen' if spec.rollout.max_model_len is not None else 'the context'} {room}"
        source += f"; half of {name}" if prompt is None else f"; {name} - data.maxPromptTokens {prompt}"
    return FromModel(path, min(wanted, longest), source)


def _find_wanted_tokens(spec: RLJobSpec, own: OwnSettings | None) -> tuple[int, str]:
    """Return the limit of an answer if there is room for it, and why."""
    if own is None:
        return MAX_TOKENS, "the model's files are unknown"
    if isinstance(given := own.generation.get("max_new_tokens"), int) and given > 0:
        return given, f"{_FILE}: max_new_tokens"
    arguments = spec.data.chat_template_arguments
    if own.template is None or spec.data.format == "text":
        return MAX_TOKENS, "prompts without a chat template"
    if own.template.can_think(arguments):
        return MAX_THINKING_TOKENS, f"{own.template_place}: the model may think before it answers"
    if arguments and own.template.can_think({}):
        return MAX_TOKENS, f"{own.template_place}: data.chatTemplateArguments switches thinking off"
    return MAX_TOKENS, f"{own.template_place}: the model does not think"


def _find_room(spec: RLJobSpec, own: OwnSettings | None) -> int | None:
    """Return the longest prompt with its answer, in tokens; None if it is unknown."""
    if spec.rollout.max_model_len is not None:
        return spec.rollout.max_model_len
    if own is None or overrides_length(spec.rollout.extra_args, spec.rollout.env):
        return None
    return find_context_length(own.config)


def _find_unknown_end(spec: RLJobSpec, own: OwnSettings) -> list[str]:
    """Return the special token with which the chat template ends an answer, if it is not an end-of-sequence token: a
    base model with a chat template would otherwise continue after it, and write the next question, too."""
    if own.template is None or spec.data.format == "text":
        return []
    tail = own.template.find_tail(spec.data.chat_template_arguments)
    token = max((text for text in own.special_tokens if tail.startswith(text)), key=len, default=None)
    if token is None or own.special_tokens[token] in own.end_ids or token in spec.rollout.sampling.stop:
        return []
    return [token]


def _resolve_set(
    each: EvaluationSet, evaluation: Evaluation, own: OwnSettings | None, rollout: Sampling, end: Sequence[str]
) -> EvaluationSet:
    num_samples = each.samples_per_prompt or evaluation.samples_per_prompt
    sampling = _resolve_evaluation(each.sampling or evaluation.sampling, own, rollout, end, num_samples)
    return each.model_copy(update={"sampling": sampling})


def _resolve_evaluation(
    given: Sampling | None, own: OwnSettings | None, rollout: Sampling, end: Sequence[str], num_samples: int
) -> Sampling:
    if given is None:
        # Greedy answers to one prompt are identical.
        chosen = _find_recommended(own) or {"temperature": 0.0 if num_samples == 1 else rollout.temperature}
        return Sampling(max_tokens=rollout.max_tokens, stop=rollout.stop, **chosen)
    limit = rollout.max_tokens if given.max_tokens is None else given.max_tokens
    stop = [*given.stop, *(text for text in end if text not in given.stop)]
    return given.model_copy(update={"max_tokens": limit, "stop": stop})


def _find_recommended(own: OwnSettings | None) -> dict[str, Any]:
    """Return temperature, top_p and top_k of generation_config.json; empty if it says greedy, or nothing. As in vLLM,
    what it leaves out is off."""
    generation = own.generation if own is not None else {}
    temperature, top_p, top_k = generation.get("temperature", 1.0), generation.get("top_p"), generation.get("top_k")
    # Python writes Infinity and NaN into JSON, too.
    if generation.get("do_sample") is not True or not (
        isinstance(temperature, int | float) and 0 < temperature <= _MAX_TEMPERATURE
    ):
        return {}
    found: dict[str, Any] = {"temperature": float(temperature)}
    if isinstance(top_p, int | float) and 0 < top_p < 1:
        found["top_p"] = float(top_p)
    if isinstance(top_k, int) and 0 < top_k <= _MAX_TOP_K:
        found["top_k"] = top_k
    return found


def _describe_context(spec: RLJobSpec, own: OwnSettings) -> Iterator[FromModel]:
    room = _find_room(spec, own)
    if spec.rollout.max_model_len is None and room is not None:
        yield FromModel("spec.rollout.maxModelLen", room, "config.json: the model's context")


def _describe_temperature(sampling: Sampling, own: OwnSettings) -> Iterator[FromModel]:
    """Report that training does not sample as the model's authors recommend."""
    recommended = _find_recommended(own)
    if recommended and recommended != {"temperature": sampling.temperature}:
        values = ", ".join(f"{name} {value:g}" for name, value in recommended.items())
        source = f"training needs the whole distribution; {_FILE} has {values}"
        yield FromModel(f"{_ROLLOUT}.temperature", sampling.temperature, source)


def _describe_ends(own: OwnSettings, end: Sequence[str]) -> Iterator[FromModel]:
    texts = {number: text for text, number in own.special_tokens.items()}
    ends = [texts.get(each, str(each)) for each in own.end_ids]
    places = [f"{_FILE if own.generation else 'config.json'} and the tokenizer: end of sequence"] if ends else []
    places += [f"{own.template_place}: ends an answer with {end[0]}"] if end else []
    if places:
        yield FromModel(f"{_ROLLOUT}.stop", [*ends, *end], "; ".join(places))


def _describe_evaluation(resolved: Sampling, own: OwnSettings, num_samples: int) -> FromModel:
    values = {"temperature": resolved.temperature, "topP": resolved.top_p, "topK": resolved.top_k}
    off = {"topP": 1.0, "topK": 0}
    if _find_recommended(own):
        source = f"{_FILE}: do_sample"
    elif num_samples > 1:
        source = "as rollout.sampling: evaluation.samplesPerPrompt needs different answers"
    elif own.generation.get("do_sample") is True:
        source = f"greedy: {_FILE} has the temperature {own.generation.get('temperature')!r}"
    elif (given := own.generation.get("do_sample")) is not None:
        source = f"greedy: {_FILE} has do_sample {given!r}"
    else:
        source = f"greedy: {_FILE} has no do_sample"
    return FromModel(_EVALUATION, {name: value for name, value in values.items() if value != off.get(name)}, source)
