"""Names in certificates, which Kubernetes reads users, groups and hosts from."""

from rljob_cluster.control_plane import pki


def test_groups_become_organizations_and_the_user_the_common_name() -> None:
    assert pki.subject("ada", ["a", "b"]) == "/O=a/O=b/CN=ada"


def test_slash_in_a_name_is_escaped() -> None:
    assert pki.subject("team/ada", []) == "/CN=team\\/ada"


def test_subject_alternatives_distinguish_addresses_from_names() -> None:
    assert pki.subject_alternative("127.0.3.1") == "IP:127.0.3.1"
    assert pki.subject_alternative("kubernetes.default.svc") == "DNS:kubernetes.default.svc"
