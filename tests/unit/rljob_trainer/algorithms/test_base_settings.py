"""Which value counts: the user's, or the type's default."""

import pytest

from rljob_trainer.algorithms.registry import ALGORITHMS, build_algorithm
from tests.support.algorithms import algorithm_spec


def settings(**algorithm):
    return build_algorithm(algorithm_spec(**algorithm)).settings


@pytest.mark.parametrize(
    ("type_", "clip", "level", "normalization"),
    [
        ("grpo", (0.2, 0.2, 3.0), "token", "group"),
        ("drGrpo", (0.2, 0.2, 3.0), "constant", "none"),
        ("dapo", (0.2, 0.28, 10.0), "token", "group"),
        ("rloo", (None, None, None), "constant", "none"),
        ("reinforcePlusPlus", (0.2, 0.2, 3.0), "token", "batch"),
        ("reinforcePlusPlusBaseline", (0.2, 0.2, 3.0), "token", "batch"),
        ("gspo", (3e-4, 4e-4, None), "sequence", "group"),
        ("cispo", (None, 4.0, None), "token", "group"),
        ("ppo", (0.2, 0.2, 3.0), "token", "batch"),
    ],
)
def test_type_has_the_defaults_of_its_paper_unless_a_field_is_set(type_, clip, level, normalization):
    found = settings(type=type_)
    assert (found.clip_low, found.clip_high, found.dual_clip) == clip
    assert (found.level, found.normalization) == (level, normalization)
    assert (found.truncated, found.max_replacements) == (("shape", 192) if type_ == "dapo" else ("train", 0))
    loss, other = {"clipLow": 0.1, "clipHigh": 0.7, "level": "sequence"}, {"normalization": "batch"}
    found = settings(type=type_, loss=loss, advantages=other)
    assert (found.clip_low, found.clip_high, found.level) == (0.1, 0.7, "sequence")
    assert found.normalization == "batch"


@pytest.mark.parametrize("type_", ["grpo", "rloo", "gspo", "ppo"])
def test_dual_clip_of_the_user_counts_with_every_type_that_has_a_ratio(type_):
    assert settings(type=type_, loss={"dualClip": 4}).dual_clip == 4


def test_buffer_is_a_fifth_of_the_limit_and_at_most_the_limit():
    assert build_algorithm(algorithm_spec(type="dapo", max_tokens=512)).settings.buffer_tokens == 103
    given = {"answers": "shape", "bufferTokens": 50}
    assert build_algorithm(algorithm_spec(truncated=given, max_tokens=512)).settings.buffer_tokens == 50
    assert build_algorithm(algorithm_spec(truncated=given, max_tokens=20)).settings.buffer_tokens == 20


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"type": "dapo", "dynamicSampling": {"enabled": "never"}}, 0),
        ({"dynamicSampling": {"enabled": "always", "maxReplacementFactor": 0.5}}, 32),
        ({"type": "dapo", "dynamicSampling": {"maxReplacementFactor": 0}}, 0),
    ],
)
def test_replacements_are_bounded_per_step(given, expected):
    assert settings(**given).max_replacements == expected


@pytest.mark.parametrize("type_", [name for name in ALGORITHMS if name != "ppo"])
def test_algorithm_says_what_it_needs(type_):
    in_reward, in_loss = ({"coefficient": 0.1, "estimator": name} for name in ("k1", "k3"))
    assert build_algorithm(algorithm_spec(type=type_, kl=in_reward)).needs.reference
    assert not build_algorithm(algorithm_spec(type=type_, kl=in_loss)).needs.reference, "the loss has it"
    assert build_algorithm(algorithm_spec(type=type_)).needs.whole_step is ("PlusPlus" in type_)
    batch = build_algorithm(algorithm_spec(type=type_, advantages={"normalization": "batch"}))
    assert batch.needs.whole_step, "the deviation of the batch divides each advantage"
