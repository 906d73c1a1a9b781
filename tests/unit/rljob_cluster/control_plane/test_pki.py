"""Names in certificates, where Kubernetes looks for users, groups and hosts."""

from rljob_cluster.control_plane import pki


def test_groups_come_as_organizations_and_the_user_as_common_name() -> None:
    assert pki.subject("ada", ["a", "b"]) == "/O=a/O=b/CN=ada"


def test_a_slash_in_a_name_stays_in_the_name() -> None:
    assert pki.subject("team/ada", []) == "/CN=team\\/ada"


def test_addresses_and_names_are_told_apart() -> None:
    assert pki.subject_alternative("127.0.3.1") == "IP:127.0.3.1"
    assert pki.subject_alternative("kubernetes.default.svc") == "DNS:kubernetes.default.svc"
