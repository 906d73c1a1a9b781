"""Keys of episode attempts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_trainer.gateway.episodes import AttemptKeys, AttemptName

KEYS = AttemptKeys(b"secret")
NAME = AttemptName("g1/train/3/0/1", 2)


@given(st.text(), st.integers(0, 1000))
def test_a_key_names_its_attempt(episode, attempt):
    name = AttemptName(episode.encode(errors="replace").decode(), attempt)
    key = KEYS.make(name)

    assert KEYS.read(key) == name
    assert key.isascii()
    assert not set(key) - set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.")


@given(st.data())
def test_a_key_with_any_other_character_is_unknown(data):
    key = KEYS.make(NAME)
    place = data.draw(st.integers(0, len(key) - 1))
    other = data.draw(st.characters().filter(lambda character: character != key[place]))

    assert KEYS.read(key[:place] + other + key[place + 1 :]) is None


@pytest.mark.parametrize(
    "key",
    ["", "sk-rljob", "sk-rljob..", "sk-rljob.a.1.", "EMPTY", "Ünï", "sk-rljob.\ud800.1.x", "sk-rljob.YQ.0.\udcff"],
)
def test_other_texts_are_unknown(key):
    assert KEYS.read(key) is None


def test_keys_of_another_gateway_are_unknown():
    assert AttemptKeys().read(AttemptKeys().make(NAME)) is None


def test_keys_of_two_attempts_differ():
    assert KEYS.make(NAME) != KEYS.make(AttemptName(NAME.episode, 3))
