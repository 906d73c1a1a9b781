"""Bodies of Tinker's wire to what the service works on, and its results to bodies. Pure.

forward_backward comes as protobuf, and its result and that of samples go as protobuf; everything else is JSON, whose
types are the SDK's own.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ValidationError
from tinker.proto import tinker_public_pb2 as pb
from tinker.types import SampleRequest
from tinker.types.optimizer import AdamParams
from tinker.types.topk_logprobs import MASK_LOGPROB

from rljob_api.manifest.roles import Sampling
from rljob_trainer.episodes.types import TOP, Completion, TrainRow
from rljob_trainer.tinker.losses import INPUTS, SETTINGS

MAX_SAMPLE_TOKENS = 16_384
"""Limit of an answer without max_tokens, which the context limits, too."""
_DTYPES = {pb.DTYPE_FLOAT32: np.float32, pb.DTYPE_INT64: np.int64, pb.DTYPE_INT32: np.int32}
_ADAM = dict.fromkeys(("beta1", "beta2"), (0.0, 1.0)) | {
    "eps": (1e-30, math.inf),
    "learning_rate": (-1e6, 1e6),
    "weight_decay": (0.0, math.inf),
    "grad_clip_norm": (0.0, math.inf),
}
"""From where, and below what, settings of AdamW may be."""
_NOT_SAMPLED = ("topk_sample_logprobs", "target_prompt_logprobs", "prompt_alt_tokens_k")
_MAX_LIKELIEST = 20
"""vLLM's own limit, unless --max-logprobs is another one."""


class RefusedError(ValueError):
    """What a client asked for is wrong, or not supported. The text is for the user."""


@dataclass(frozen=True)
class ModelLimits:
    context: int
    """Tokens of the longest sequence."""
    vocabulary: int


@dataclass(frozen=True)
class Batch:
    """The data of one forward or forward_backward."""

    loss: str
    settings: Mapping[str, float]
    backward: bool
    rows: list[TrainRow]
    facts: list[dict[str, NDArray[Any]]]
    """[rows] `targets` and the inputs of the loss, each [targets]."""


@dataclass(frozen=True)
class Asked:
    """What a client asks the rollouts for."""

    token_ids: list[int]
    num_samples: int
    sampling: Sampling
    seed: int | None
    extra: dict[str, Any]
    """Further sampling parameters of vLLM."""
    prompt_logprobs: bool
    num_likeliest: int
    """Tokens whose log-probs are wanted at each position of the prompt, the likeliest first."""
    last_n: int | None
    """How many of the prompt's log-probs are wanted, from its end; None: all."""


def parse(kind: type[BaseModel], data: Any) -> Any:
    """Return the JSON object as a type of the SDK."""
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the body"
        raise RefusedError(f"{where}: {first['msg']}; use the tinker SDK 0.38") from error


def parse_batch(body: bytes) -> Any:
    """Return the message, which names the model and the command. `read_batch` checks the rest, as a part of that."""
    request = pb.ForwardBackwardRequest()
    try:
        request.ParseFromString(body)
    except Exception as error:
        raise RefusedError(f"the body is no ForwardBackwardRequest: {error}; use the tinker SDK 0.38") from error
    return request


def read_batch(request: Any, limits: ModelLimits) -> Batch:
    settings = {  # a text would be 0
        name: value.number if value.HasField("number") else math.nan
        for name, value in request.loss_fn_config_v2.items()
    } or dict(request.loss_fn_config)
    rows, facts = [], []
    _check_loss(request.loss_fn, settings)
    for number, datum in enumerate(request.data):
        row, of_row = _read_datum(f"data[{number}]", datum, request.loss_fn, limits)
        rows.append(row)
        facts.append(of_row)
    if not rows:
        raise RefusedError("data: is empty; pass at least one datum")
    return Batch(request.loss_fn, settings, not request.forward_only, rows, facts)


def _check_loss(name: str, settings: Mapping[str, float]) -> None:
    if name == "custom":
        raise RefusedError("loss_fn: custom runs in the client here; call forward_backward_custom with a function")
    if name not in INPUTS:
        raise RefusedError(f"loss_fn: {name} is not supported; use {', '.join(INPUTS)} or forward_backward_custom")
    if unknown := settings.keys() - SETTINGS[name].keys():
        known = ", ".join(SETTINGS[name]) or "none"
        raise RefusedError(f"loss_fn_config: {name} has no {min(unknown)}; it has {known}")
    if wrong := [each for each, value in settings.items() if not math.isfinite(value)]:
        raise RefusedError(f"loss_fn_config.{wrong[0]}: must be a finite number")


def _read_datum(path: str, datum: Any, loss: str, limits: ModelLimits) -> tuple[TrainRow, dict[str, NDArray[Any]]]:
    tokens = np.concatenate([np.zeros(0, np.int32), *_read_chunks(path, datum.model_input)])
    count = len(tokens)
    if not 1 <= count <= limits.context:
        raise RefusedError(f"{path}.model_input: has {count} tokens; from 1 to {limits.context} are possible")
    wanted = ("target_tokens", *INPUTS[loss])
    given = datum.loss_fn_inputs
    if loss == "cross_entropy" and "weights" not in given:
        wanted = ("target_tokens",)
    if missing := [name for name in wanted if name not in given]:
        raise RefusedError(f"{path}.loss_fn_inputs: {loss} needs {missing[0]}")
    if unknown := sorted(given.keys() - {*wanted}):
        raise RefusedError(f"{path}.loss_fn_inputs: {loss} has no {unknown[0]}; it has {', '.join(wanted)}")
    facts = {name: _read_tensor(f"{path}.loss_fn_inputs.{name}", given[name], count) for name in wanted}
    targets = facts.pop("target_tokens")
    for name, ids in (("model_input", tokens), ("loss_fn_inputs.target_tokens", targets)):
        if ids.min() < 0 or ids.max() >= limits.vocabulary or (ids % 1).any():
            raise RefusedError(f"{path}.{name}: the model has the tokens 0 to {limits.vocabulary - 1}")
    facts.setdefault("weights", np.ones(count, np.float32)) if loss == "cross_entropy" else None
    mask = np.ones(count + 1, np.bool_)
    mask[0] = False
    zeros = np.zeros(count + 1, np.float32)
    row = TrainRow(
        token_ids=np.append(tokens, targets[-1]).astype(np.int32),
        loss_mask=mask,
        rollout_logprobs=zeros,
        advantages=zeros,
        versions=np.zeros(count + 1, np.int32),
    )
    return row, {**facts, "targets": targets.astype(np.int32)}


def _read_chunks(path: str, chunks: Any) -> Iterator[NDArray[np.int32]]:
    for chunk in chunks:
        if chunk.WhichOneof("chunk") != "encoded_text":
            raise RefusedError(f"{path}.model_input: only tokens are supported, not images or sounds")
        yield np.frombuffer(chunk.encoded_text.tokens, np.int32)


def _read_tensor(path: str, tensor: Any, count: int) -> NDArray[Any]:
    if tensor.WhichOneof("encoding") != "dense" or len(tensor.shape) > 1:
        raise RefusedError(f"{path}: must have one dimension; several targets for a token are not supported")
    if tensor.dtype not in _DTYPES:
        raise RefusedError(f"{path}: must be float32, int32 or int64")
    values = np.frombuffer(tensor.dense, _DTYPES[tensor.dtype])
    if len(values) != count:
        raise RefusedError(f"{path}: must have a value for each token of model_input, {count}, got {len(values)}")
    if not np.isfinite(values).all():
        raise RefusedError(f"{path}: must be finite numbers")
    return values


def write_batch(logprobs: Sequence[NDArray[np.float32]], loss_sum: float) -> bytes:
    """Return the result of a batch.  logprobs  # [rows], each [targets]"""
    output = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics={"loss:sum": loss_sum})
    record = output.loss_fn_outputs.add(num_datums=len(logprobs))
    field = record.fields["logprobs"]
    field.data, field.dtype = b"".join(each.astype(np.float32).tobytes() for each in logprobs), pb.DTYPE_FLOAT32
    field.offsets = np.cumsum([0, *(each.size * 4 for each in logprobs)], dtype=np.int64).tobytes()
    return output.SerializeToString()


def read_adam(params: Any) -> dict[str, float]:
    """Return the settings of an update, with which no finite gradient makes the weights NaN."""
    if not isinstance(params, AdamParams):
        raise RefusedError(f"optim_params: {params.type} is not supported; pass AdamParams")
    given: dict[str, float] = params.model_dump()
    for name, (low, end) in _ADAM.items():
        if not low <= given[name] < end:
            raise RefusedError(
                f"optim_params.{name}: must be at least {low:g} and less than {end:g}, got {given[name]}"
            )
    return given


def read_sample(request: SampleRequest, limits: ModelLimits) -> Asked:
    if asked := next((name for name in _NOT_SAMPLED if getattr(request, name)), None):
        raise RefusedError(f"{asked} is not supported; there are prompt_logprobs and topk_prompt_logprobs")
    if request.record_stability_info:
        raise RefusedError("record_stability_info is for loss_fn stable_reinforce, which is not supported")
    try:
        token_ids = request.prompt.to_ints()
    except ValueError as error:
        raise RefusedError("prompt: only tokens are supported, not images or sounds") from error
    given, room = request.sampling_params, limits.context - len(token_ids)
    if not token_ids or room < 1:
        raise RefusedError(f"prompt: has {len(token_ids)} tokens; from 1 to {limits.context - 1} are possible")
    if min(token_ids) < 0 or max(token_ids) >= limits.vocabulary:
        raise RefusedError(f"prompt: the model has the tokens 0 to {limits.vocabulary - 1}")
    if not 1 <= request.num_samples <= 1024:
        raise RefusedError(f"num_samples: must be from 1 to 1024, got {request.num_samples}")
    if not 0 <= request.topk_prompt_logprobs <= _MAX_LIKELIEST:
        raise RefusedError(
            f"topk_prompt_logprobs: must be at most {_MAX_LIKELIEST}, got {request.topk_prompt_logprobs}"
        )
    last_n = request.prompt_logprobs_last_n
    if last_n is not None and not 1 <= last_n < len(token_ids):
        raise RefusedError(
            f"prompt_logprobs_last_n: must be less than the prompt's {len(token_ids)} tokens, got {last_n}"
        )
    stop = [given.stop] if isinstance(given.stop, str) else list(given.stop or [])
    ids = [each for each in stop if isinstance(each, int)]
    # [] asks for an answer that nothing ends but its length.
    extra = ({"stop_token_ids": ids} if ids else {}) | ({"ignore_eos": True} if given.stop == [] else {})
    try:
        sampling = Sampling(
            temperature=given.temperature,
            top_p=given.top_p,
            top_k=max(given.top_k, 0),
            max_tokens=min(MAX_SAMPLE_TOKENS if given.max_tokens is None else given.max_tokens, room),
            stop=[each for each in stop if isinstance(each, str)],
        )
    except ValidationError as error:
        first = error.errors()[0]
        raise RefusedError(f"sampling_params.{first['loc'][0]}: {first['msg']}, got {first['input']!s:.99}") from error
    of_prompt = bool(request.prompt_logprobs), request.topk_prompt_logprobs, last_n
    return Asked(token_ids, request.num_samples, sampling, given.seed, extra, *of_prompt)


def write_sample(completions: Sequence[Completion], prompt: NDArray[Any] | None, asked: Asked) -> bytes:
    """`prompt`: what read_scores returns.  [tokens - 1]"""
    response = pb.SampleResponse()
    for each in completions:
        response.sequences.add(
            stop_reason=pb.STOP_REASON_LENGTH if each.truncated else pb.STOP_REASON_STOP,
            tokens=np.array(each.token_ids, np.int32).tobytes(),
            logprobs=np.array(each.logprobs, np.float32).tobytes(),
        )
    if prompt is None:
        return response.SerializeToString()
    first = 1 if asked.last_n is None else len(asked.token_ids) - asked.last_n
    own = np.full(len(asked.token_ids), np.nan, np.float32)
    own[first:] = (prompt["logprob"] if asked.num_likeliest else prompt)[first - 1 :]
    if asked.prompt_logprobs:
        response.prompt_logprobs = own.tobytes()
    if k := asked.num_likeliest:
        top = np.full((len(own), k), np.array((0, MASK_LOGPROB), TOP))
        top[first:] = prompt["top"][first - 1 :]
        parts = {name: top[name].tobytes() for name in ("token", "logprob")}
        likeliest = pb.TopkLogprobs(token_ids=parts["token"], logprobs=parts["logprob"], k=k, length=len(own))
        response.topk_prompt_logprobs.CopyFrom(likeliest)
    return response.SerializeToString()
