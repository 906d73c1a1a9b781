"""Which value counts: the user's, the field of stored objects, or the type's default."""

import pytest

from rljob_trainer.algorithms.registry import ALGORITHMS, build_algorithm, resolve_settings
from tests.support.algorithms import algorithm_spec


def settings(**algorithm):
    return resolve_settings(algorithm_spec(**algorithm))


@pytest.mark.parametrize(
    ("type_", "clip", "level", "normalization"),
    [
        ("grpo", (0.2, 0.2), "token", "group"),
        ("drGrpo", (0.2, 0.2), "constant", "none"),
        ("dapo", (0.2, 0.28), "token", "group"),
        ("rloo", (None, None), "constant", "none"),
        ("reinforcePlusPlus", (0.2, 0.2), "token", "batch"),
        ("gspo", (3e-4, 4e-4), "sequence", "group"),
        ("cispo", (None, 4.0), "token", "group"),
    ],
)
def test_type_has_the_defaults_of_its_paper_unless_a_field_is_set(type_, clip, level, normalization):
    found = settings(type=type_)
    assert (found.clip_low, found.clip_high) == clip
    assert (found.level, found.normalization) == (level, normalization)
    assert (found.truncated, found.max_replacements) == (("shape", 192) if type_ == "dapo" else ("train", 0))
    loss, other = {"clipLow": 0.1, "clipHigh": 0.7, "level": "sequence"}, {"normalization": "batch"}
    found = settings(type=type_, loss=loss, advantages=other)
    assert (found.clip_low, found.clip_high, found.level) == (0.1, 0.7, "sequence")
    assert found.normalization == "batch"


def test_grpo_reads_the_fields_of_stored_objects():
    stored = {"clipLow": 0.1, "clipHigh": 0.3, "lossLevel": "sequence", "normalization": "none"}
    found = settings(**stored)
    assert (found.clip_low, found.clip_high) == (0.1, 0.3)
    assert (found.level, found.normalization) == ("sequence", "none")
    newer = settings(**stored, loss={"clipHigh": 0.5, "level": "constant"}, advantages={"normalization": "group"})
    assert (newer.clip_low, newer.clip_high) == (0.1, 0.5)
    assert (newer.level, newer.normalization) == ("constant", "group")


def test_other_types_ignore_the_stored_defaults_of_grpo():
    stored = {"clipLow": 0.2, "clipHigh": 0.2, "lossLevel": "token", "normalization": "group"}
    assert settings(type="drGrpo", **stored) == settings(type="drGrpo")
    assert settings(type="gspo", **stored).clip_low == 3e-4


def test_buffer_is_a_fifth_of_the_limit_and_at_most_the_limit():
    assert resolve_settings(algorithm_spec(type="dapo", max_tokens=512)).buffer_tokens == 103
    given = {"answers": "shape", "bufferTokens": 50}
    assert resolve_settings(algorithm_spec(truncated=given, max_tokens=512)).buffer_tokens == 50
    assert resolve_settings(algorithm_spec(truncated=given, max_tokens=20)).buffer_tokens == 20


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"type": "dapo", "dynamicSampling": {"enabled": False}}, 0),
        ({"dynamicSampling": {"enabled": True, "maxReplacements": 0.5}}, 32),
        ({"type": "dapo", "dynamicSampling": {"maxReplacements": 0}}, 0),
    ],
)
def test_replacements_are_bounded_per_step(given, expected):
    assert settings(**given).max_replacements == expected


@pytest.mark.parametrize("type_", [name for name in ALGORITHMS if name != "ppo"])
def test_algorithm_says_what_it_needs(type_):
    in_reward, in_loss = ({"coefficient": 0.1, "estimator": name} for name in ("k1", "k3"))
    assert build_algorithm(algorithm_spec(type=type_, kl=in_reward)).needs.reference
    assert not build_algorithm(algorithm_spec(type=type_, kl=in_loss)).needs.reference, "the loss has it"
    assert build_algorithm(algorithm_spec(type=type_)).needs.whole_step is (type_ == "reinforcePlusPlus")
    batch = build_algorithm(algorithm_spec(type=type_, advantages={"normalization": "batch"}))
    assert batch.needs.whole_step, "the deviation of the batch divides each advantage"
