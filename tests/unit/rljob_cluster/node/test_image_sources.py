from rljob_cluster.node.image_sources import choose_missing, name_of, version_of

A, B, OTHER = "/images/trainer-aaaa.tar", "buildah:trainer-bbbb", "/images/reward-aaaa.tar"


def test_an_archive_and_a_stored_image_of_one_name_are_the_same_image() -> None:
    assert name_of(A) == name_of(B) == "trainer"
    assert (version_of(A), version_of(B)) == ("aaaa", "bbbb")


def test_what_a_node_has_is_not_taken_again() -> None:
    assert choose_missing([A, OTHER], [A, OTHER]) == []
    assert choose_missing([], [A, OTHER]) == [A, OTHER]


def test_going_back_to_an_older_image_takes_it_again() -> None:
    assert choose_missing([A, OTHER, B], [A, OTHER]) == [A]
