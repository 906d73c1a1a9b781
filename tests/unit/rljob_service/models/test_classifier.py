"""A classifier on a fake vLLM. tests/integration/test_judges_real.py uses a real one."""

from __future__ import annotations

import asyncio
import math
import tempfile
from pathlib import Path
from typing import Any

import pytest

from rljob_api.errors import UserError
from rljob_api.wire.contract import ENV_VLLM_SOCKET
from rljob_service.models import upstream, vllm_sidecar
from rljob_service.models.classifier import activate, find_label_problem
from tests.support.fake_vllm import FakeVllm
from tests.support.waiting import DEADLINE_SECONDS


@pytest.mark.parametrize("logit", [-1000.0, -1.5, 0.0, 2.0, 1000.0])
def test_activations_are_exact_and_do_not_overflow(logit):
    assert activate([logit], 0, "none") == logit
    expected = 0.0 if logit < -700 else 1 / (1 + math.exp(-logit))
    assert activate([logit], 0, "sigmoid") == pytest.approx(expected)
    assert activate([0.0, logit], 1, "softmax") == pytest.approx(expected)


def test_softmax_is_over_all_labels():
    values = [activate([1.0, 2.0, 3.0], label, "softmax") for label in range(3)]
    assert sum(values) == pytest.approx(1)
    assert values == sorted(values)


def test_label_must_exist_and_be_set_when_there_are_several():
    assert find_label_problem(None, 1) == ""
    assert "must be set: the model has 3 outputs" in find_label_problem(None, 3)
    assert "at most 2, got 3" in find_label_problem(3, 3)
    assert find_label_problem(2, 3) == ""


@pytest.fixture
def start_vllm(monkeypatch):
    """start_vllm(*outputs): a FakeVllm on the socket of the sidecar."""
    monkeypatch.setattr(vllm_sidecar, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(upstream, "FIRST_DELAY_SECONDS", 0.01)
    running: list[FakeVllm] = []
    with tempfile.TemporaryDirectory(prefix="rm-") as folder:  # the path of a socket must be short
        monkeypatch.setenv(ENV_VLLM_SOCKET, f"{folder}/socket")

        def start(*outputs: float) -> FakeVllm:
            Path(folder, "socket").unlink(missing_ok=True)
            running.append(FakeVllm(f"{folder}/socket", *outputs))
            return running[-1]

        yield start
        for vllm in running:
            vllm.close()


def classifier(timeout_seconds: float = 5, **model: Any) -> dict[str, Any]:
    return {"name": "test", "model": {"source": "/m", **model}, "timeoutSeconds": timeout_seconds}


async def until(condition):
    async with asyncio.timeout(DEADLINE_SECONDS):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def test_requests_are_chat_conversations_without_truncation(make_reward, start_vllm):
    vllm = start_vllm(0.5)
    result = await (await make_reward(classifier())).score("four")
    assert (result.score, result.valid) == (0.5, True)
    sent = vllm.requests[-1]
    assert sent["messages"] == [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "four"}]
    assert sent["use_activation"] is False
    assert "truncation_side" not in sent
    assert "chat_template_kwargs" not in sent


async def test_requests_have_the_variables_of_the_chat_template(make_reward, start_vllm):
    vllm = start_vllm(0.5)
    await (await make_reward(classifier(chatTemplateArguments={"enable_thinking": False}))).score("four")
    assert vllm.requests[-1]["chat_template_kwargs"] == {"enable_thinking": False}


async def test_text_label_activation_and_truncation_follow_the_settings(make_reward, start_vllm):
    vllm = start_vllm(0.0, 0.0)
    settings = classifier(template="text", label=1, activation="softmax", tooLong="truncateLeft")
    reward = await make_reward(settings)
    assert (await reward.score("four")).score == 0.5
    sent = vllm.requests[-1]
    assert sent["input"] == "2+2?four"
    assert (sent["truncation_side"], sent["truncate_prompt_tokens"]) == ("left", -1)
    vllm.status = 400
    result = await reward.score("x" * 100)
    assert result.reason == "exception"
    assert "too long: 4000 tokens" in result.message


async def test_pool_serves_only_while_vllm_is_up(make_reward, start_vllm):
    starting = asyncio.create_task(make_reward(classifier(1)))
    await asyncio.sleep(0.05)
    assert not starting.done(), "startup waits for vLLM"
    vllm = start_vllm(0.5)
    reward = await starting
    assert reward.executor.pool.can_serve
    vllm.close()
    await until(lambda: not reward.executor.pool.can_serve)
    result = await reward.score("five")
    assert (result.valid, result.reason) == (False, "unreachable"), "the driver sends it to another replica"
    start_vllm(0.25)
    await until(lambda: reward.executor.pool.can_serve)
    assert (await reward.score("six")).score == 0.25


@pytest.mark.parametrize(
    ("outputs", "status", "message"),
    [
        ([0.1, 0.2, 0.3], 200, "model.label must be set: the model has 3 outputs"),
        ([0.1], 400, "model: the warm-up request failed: the model's vLLM answered 400"),
    ],
)
async def test_model_that_cannot_score_is_rejected_at_startup(make_reward, start_vllm, outputs, status, message):
    start_vllm(*outputs).status = status
    with pytest.raises(UserError, match=message):
        await make_reward(classifier())


async def test_missing_socket_is_a_user_error(make_reward, monkeypatch):
    monkeypatch.delenv(ENV_VLLM_SOCKET, raising=False)
    with pytest.raises(UserError, match="RLJOB_VLLM_SOCKET is not set; the operator"):
        await make_reward(classifier())


@pytest.mark.parametrize(
    ("outputs", "reason"), [([float("nan")], "not_finite"), ([0.1, 0.2], "bad_return"), ([], "bad_return")]
)
async def test_unusable_outputs_are_invalid(make_reward, start_vllm, outputs, reason):
    vllm = start_vllm(0.5)
    reward = await make_reward(classifier())
    vllm.outputs = outputs
    assert (await reward.score("x")).reason == reason
