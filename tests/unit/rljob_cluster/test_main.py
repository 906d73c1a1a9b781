from pathlib import Path

from rljob_cluster.__main__ import choose_missing

A, B, OTHER = Path("/images/trainer-aaaa.tar"), Path("/images/trainer-bbbb.tar"), Path("/images/reward-aaaa.tar")


def test_what_a_node_has_is_not_imported_again() -> None:
    assert choose_missing([str(A), str(OTHER)], [A, OTHER]) == []
    assert choose_missing([], [A, OTHER]) == [A, OTHER]


def test_going_back_to_an_older_image_imports_it_again() -> None:
    assert choose_missing([str(A), str(OTHER), str(B)], [A, OTHER]) == [A]
