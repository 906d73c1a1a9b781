from rljob_cluster.node.image_sources import choose_missing, name_of, version_of

A, B, OTHER = "/images/trainer-aaaa.tar", "buildah:trainer-bbbb", "/images/reward-aaaa.tar"


def test_archive_and_stored_image_share_name_and_version_format() -> None:
    assert name_of(A) == name_of(B) == "trainer"
    assert (version_of(A), version_of(B)) == ("aaaa", "bbbb")


def test_loaded_image_is_not_loaded_again() -> None:
    assert choose_missing([A, OTHER], [A, OTHER]) == []
    assert choose_missing([], [A, OTHER]) == [A, OTHER]


def test_older_image_is_loaded_again_after_a_newer_one() -> None:
    assert choose_missing([A, OTHER, B], [A, OTHER]) == [A]
