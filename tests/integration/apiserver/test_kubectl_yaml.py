"""kubectl reads our YAML as we do."""

from __future__ import annotations

import json
import subprocess

import pytest

from rljob_api.read.documents import read_documents
from rljob_cluster.host.go_programs import find_or_build
from rljob_core.children.common import to_yaml
from tests.support.kubectl_scalars import AS_KUBECTL_READS


@pytest.fixture(scope="module")
def kubectl_reads():
    """Return the data of an object as kubectl reads it from YAML. It contacts no cluster."""
    program = find_or_build("kubectl") / "kubectl"

    def read(text: str) -> object:
        command = [program, "patch", "--local", "-f", "-", "--type=merge", "-p", "{}", "-o", "json"]
        done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)["spec"]

    return read


_HEADER = "apiVersion: example.com/v1\nkind: Thing\nmetadata: {name: a}\n"


def test_plain_scalars_are_read_alike(kubectl_reads):
    texts = list(AS_KUBECTL_READS)
    spec = "".join(f"- {text}\n" for text in texts)
    got = kubectl_reads(f"{_HEADER}spec:\n{spec}")
    assert dict(zip(texts, got, strict=True)) == AS_KUBECTL_READS
    (document,), _ = read_documents(f"{_HEADER}spec:\n{spec}")
    assert document.data["spec"] == got


def test_what_we_write_survives_kubectl(kubectl_reads):
    spec = {text: text for text in AS_KUBECTL_READS}
    spec |= {"number": 1e-06, "text": "a\nb\n", "odd": "  x: [y]  # z", "tab": "\t", "quote": "'\"", "emoji": "é🙂"}
    assert kubectl_reads(_HEADER + to_yaml({"spec": spec})) == spec
