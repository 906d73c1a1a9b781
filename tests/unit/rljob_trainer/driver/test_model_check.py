"""The trainer and a rollout score fixed texts: what differs ends the job, with its likely cause."""

import numpy as np
import pytest

from rljob_api.errors import UserError
from rljob_trainer.driver.model_check import MAX_TOKENS, ModelCheck, find_causes, find_limit, measure
from rljob_trainer.written_tokenizer import TEXTS
from tests.support.algorithms import algorithm_spec

CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}


def spec(dtype="float32", arguments=(), gpus=0):
    made = algorithm_spec()
    rollout = made.rollout.model_copy(update={"extra_args": list(arguments), "gpus_per_replica": gpus})
    return made.model_copy(update={"rollout": rollout, "trainer": made.trainer.model_copy(update={"dtype": dtype})})


def tokenizer(texts, add_special_tokens):
    assert not add_special_tokens
    return {"input_ids": [list(text.encode()) for text in texts]}


class Trainer:
    async def score(self, rows):
        self.rows = rows
        return [np.where(row.loss_mask, -row.token_ids / 100, 0.0).astype(np.float32) for row in rows]


class Rollouts:
    def __init__(self, shift=0.0, first=0, ids=None, refuses=False):
        self.shift, self.first, self.ids, self.refuses = shift, first, ids, refuses

    async def tokenize(self, text):
        return None if self.refuses else self.ids or list(text.encode())

    async def score(self, ids):
        positions = np.arange(1, len(ids))
        return None if self.refuses else -np.array(ids[1:]) / 100 + self.shift * (positions >= self.first)


async def check(rollouts, config=CONFIG, context_length=256, **options):
    checked, trainer = ModelCheck(spec(**options), config, tokenizer, context_length), Trainer()
    await checked.compare(await checked.score(trainer), rollouts)
    return trainer.rows


@pytest.mark.parametrize(("context_length", "longest"), [(64, 63), (None, MAX_TOKENS), (4096, MAX_TOKENS)])
async def test_a_short_and_a_long_text_are_scored_within_the_context(context_length, longest):
    short, long = await check(Rollouts(), context_length=context_length)
    assert short.token_ids.tolist() == list(TEXTS[0].encode())[:longest]
    assert len(long.token_ids) == longest
    assert not long.loss_mask[0]
    assert long.loss_mask[1:].all()


@pytest.mark.parametrize(
    ("dtype", "gpus", "passes"), [("float32", 0, 1e-4), ("float32", 1, 4e-3), ("bfloat16", 0, 0.1)]
)
async def test_a_difference_ends_the_job_if_it_is_above_that_of_the_data_type(dtype, gpus, passes):
    await check(Rollouts(shift=passes), dtype=dtype, gpus=gpus)
    with pytest.raises(
        UserError, match=f"differ by .* on average \\(at most {find_limit(spec(dtype, gpus=gpus)):g} in"
    ):
        await check(Rollouts(shift=3 * passes), dtype=dtype, gpus=gpus)


async def test_the_message_has_the_first_token_that_differs_and_the_likely_causes():
    config = {**CONFIG, "rope_parameters": {"rope_type": "longrope"}, "attn_logit_softcapping": 50.0}
    with pytest.raises(UserError) as raised:
        await check(Rollouts(shift=0.5, first=20), config, arguments=["--kv-cache-dtype=fp8", "--seed", "1"])
    text = str(raised.value)
    assert "by up to 0.5, from token 20 on; likely causes: spec.rollout.extraArgs has --kv-cache-dtype=fp8" in text
    assert "its rope is of the type longrope: set spec.rollout.maxModelLen" in text
    assert "(attn_logit_softcapping): set spec.trainer.attention to eager" in text


async def test_log_probs_that_are_not_numbers_end_the_job():
    with pytest.raises(UserError, match="differ by nan"):
        await check(Rollouts(shift=float("nan")))


async def test_another_tokenizer_of_the_rollouts_ends_the_job():
    with pytest.raises(
        UserError, match=r"the rollouts' tokenizer is not that of spec.model: 'The train to the coa.* \[7\] there"
    ):
        await check(Rollouts(ids=[7]), arguments=["--tokenizer", "other"])


async def test_an_engine_that_computes_no_log_probs_of_prompts_is_logged(caplog):
    await check(Rollouts(refuses=True))
    assert "vLLM gives no log-probs of prompts" in caplog.text


def test_without_a_likely_cause_the_architecture_is_named():
    assert list(find_causes(spec(), CONFIG)) == []
    assert [*find_causes(spec(), {**CONFIG, "quantization_config": {}, "sliding_window": 8})] == [
        "the model is quantized (quantization_config): use it in bfloat16, float16 or float32",
        "it has windows of 8 tokens (sliding_window): set spec.trainer.attention to eager",
    ]


def test_the_mean_counts_all_tokens_of_all_texts():
    found = measure([np.zeros(2), np.zeros(4)], [np.zeros(2), np.array([0, 0, 3.0, 0])], 0.1)
    assert found == (0.5, 3.0, 3)
