"""Kubeconfigs as users have them: each mistake is one line that names the remedy."""

from types import SimpleNamespace

import pytest

from rljob_cli.cluster.client import Cluster, ClusterError, Target

CONFIG = """
apiVersion: v1
kind: Config
current-context: %s
clusters: [{name: c, cluster: {server: "http://127.0.0.1:1"}}]
users: [{name: u, user: {}}]
contexts:
- {name: here, context: {cluster: c, user: u, namespace: research}}
- {name: there, context: {cluster: c, user: u}}
"""


def connect(tmp_path, text, context=None):
    file = tmp_path / "config"
    file.write_text(text)
    return Cluster(Target(str(file), context))


@pytest.mark.parametrize(
    "text", ["garbage: [", "5", "- a", "contexts: 5", "contexts: [5]", "contexts: [{}]", "", "a: b"]
)
@pytest.mark.parametrize("context", [None, "here"])
def test_a_file_that_is_no_kubeconfig_is_told_in_one_line(tmp_path, text, context):
    with pytest.raises(ClusterError, match=r"no cluster: .*--kubeconfig") as raised:
        connect(tmp_path, text, context)
    assert "\n" not in str(raised.value)


def test_a_context_by_name_needs_no_current_one(tmp_path):
    for current in ('""', "gone"):
        assert connect(tmp_path, CONFIG % current, "here").namespace == "research"
    assert connect(tmp_path, CONFIG % "here").namespace == "research"


def test_a_context_that_is_not_there_is_told_with_those_that_are(tmp_path):
    with pytest.raises(ClusterError, match="no context gone; it has here, there"):
        connect(tmp_path, CONFIG % "gone")
    with pytest.raises(ClusterError, match="no current context; it has here, there"):
        connect(tmp_path, CONFIG % '""')


def test_a_kubeconfig_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ClusterError, match=r"there is no kubeconfig .*nope"):
        Cluster(Target(str(tmp_path / "nope")))


def test_a_page_in_place_of_an_answer_is_told_in_one_line(tmp_path, monkeypatch):
    cluster = connect(tmp_path, CONFIG % "here")
    page = SimpleNamespace(data=b"<html>log in</html>")
    monkeypatch.setattr(cluster._jobs, "list_namespaced_custom_object", lambda *_, **__: page.data.decode())
    monkeypatch.setattr(cluster._core, "list_namespaced_pod", lambda *_, **__: page)
    for ask in (cluster.list_jobs, lambda: cluster.list_pods("a=b")):
        with pytest.raises(ClusterError, match="answers as no API server does"):
            ask()
