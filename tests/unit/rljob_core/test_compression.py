"""Packed texts: whole, and small if they resemble their dictionary."""

from hypothesis import given
from hypothesis import strategies as st

from rljob_core.compression import MAX_DICTIONARY_BYTES, pack, unpack


@given(st.binary(), st.binary(max_size=64))
def test_text_is_unpacked_whole(text, dictionary):
    assert unpack(pack(text, dictionary)) == text


def test_text_that_resembles_its_dictionary_is_small_and_shares_it():
    dictionary = b" ".join(b"%d" % number**3 for number in range(3000))[:MAX_DICTIONARY_BYTES]
    packed = pack(dictionary.replace(b"3375", b"other"), dictionary)
    assert len(packed[0]) < len(dictionary) / 50
    assert packed[1] is dictionary
