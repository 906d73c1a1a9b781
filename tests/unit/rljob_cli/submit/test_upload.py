"""The Pod that copies files to a claim."""

from __future__ import annotations

import io
import tarfile

import pytest

from rljob_api.errors import UserError
from rljob_api.manifest.job import RLJob
from rljob_api.read.load import load_manifests
from rljob_cli.cluster import pod_start
from rljob_cli.cluster.client import ClusterError, Ended
from rljob_cli.submit import upload
from rljob_cli.submit.sources import LocalSource, read_tree
from rljob_cli.submit.upload import count_bytes, stream
from rljob_core.plan.job import render_children

JOB = """\
apiVersion: rljob.dev/v1alpha1
kind: RLJob
metadata: {name: sums}
spec:
  model: {source: "pvc://sums-files/model"}
  data: {train: {source: "hf://org/data"}}
  rewards: [{name: r, function: {inline: "def compute_score(data_source, solution_str, ground_truth): return 1"}}]
  head:
    image: registry/trainer:1
    nodePool: {nodeSelector: {pool: cpu}, tolerations: [{key: pool, value: cpu, effect: NoSchedule}]}
    template: {spec: {imagePullSecrets: [{name: registry}]}}
"""


@pytest.fixture
def pod():
    [job] = load_manifests(JOB, "job.yaml")
    assert isinstance(job, RLJob)
    head = next(child for child in render_children(job, "token") if child["kind"] == "Job")
    return upload.build_upload(head["spec"]["template"], "sums", "sums-files")


def test_pod_starts_where_the_head_does_and_writes_to_the_claim(pod):
    spec, [container] = pod["spec"], pod["spec"]["containers"]
    assert (container["image"], spec["nodeSelector"]) == ("registry/trainer:1", {"pool": "cpu"})
    assert spec["tolerations"][0]["key"] == "pool"
    assert spec["imagePullSecrets"] == [{"name": "registry"}]
    assert spec["volumes"] == [{"name": "claim", "persistentVolumeClaim": {"claimName": "sums-files"}}]
    assert container["volumeMounts"] == [{"name": "claim", "mountPath": "/claim"}]


def test_pod_has_the_rights_of_the_head_and_no_token(pod):
    spec, [container] = pod["spec"], pod["spec"]["containers"]
    assert spec["securityContext"]["runAsNonRoot"]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert spec["automountServiceAccountToken"] is False
    assert spec["restartPolicy"] == "Never"


class FakeCluster:
    """Has one Pod, whose states are given."""

    def __init__(self, *states):
        self.states, self.deleted = list(states), []

    async def apply(self, resource, manifest):
        return manifest

    async def find(self, resource, name):
        return self.states.pop(0) if len(self.states) > 1 else self.states[0]

    async def delete(self, resource, name):
        self.deleted.append(name)

    async def execute(self, pod, command, stdin=()):
        return Ended(0, "")


PULL = {"waiting": {"reason": "ErrImagePull", "message": "not found"}}
BROKEN = {
    "metadata": {},
    "spec": {},
    "status": {"phase": "Pending", "containerStatuses": [{"name": "u", "state": PULL}]},
}


@pytest.mark.parametrize(("state", "reason"), [(BROKEN, "ErrImagePull: not found"), (None, "it was deleted")])
async def test_pod_that_does_not_start_is_reported_with_its_state_and_deleted(pod, monkeypatch, state, reason):
    monkeypatch.setattr(pod_start, "START_SECONDS", 0.0)
    cluster, shown = FakeCluster(state), []
    with pytest.raises(ClusterError, match=f"did not start: {reason}; pass --claim"):
        await upload.upload(cluster, pod, [], shown.append)
    assert cluster.deleted == [pod["metadata"]["name"]]
    assert reason in shown[0]


def test_progress_of_a_large_archive_is_reported_ten_times():
    lines = []
    chunks = list(upload.report_progress([bytes(1_000_000)] * 200, 200_000_000, lines.append))
    assert len(chunks) == 200
    assert lines == [f"  {20 * tenth} of 200 MB" for tenth in range(1, 11)]


def test_small_archive_is_sent_silently():
    lines = []
    assert len(list(upload.report_progress([b"x"] * 10, 10, lines.append))) == 10
    assert lines == []


def read(folder, path):
    return read_tree(LocalSource(("spec", "model", "source"), path, "model", "model"), folder)


@pytest.fixture
def model(tmp_path):
    """A folder with an empty file, a whole block, a long name and one that is not ASCII."""
    folder = tmp_path / "model"
    (folder / "deep").mkdir(parents=True)
    (folder / "empty").touch()
    (folder / "block").write_bytes(bytes(512))
    (folder / "deep" / ("n" * 150)).write_text("long name")
    (folder / "数学.json").write_text("{}")
    return folder


def test_archive_has_the_announced_size_and_all_files(model, tmp_path):
    tree = read(tmp_path, "model")
    data = b"".join(stream(tree))
    assert len(data) == count_bytes(tree)
    with tarfile.open(fileobj=io.BytesIO(data), mode="r|") as archive:
        found = {m.name: (archive.extractfile(m).read(), m.mode) for m in archive}
    assert found == {
        "model/block": (bytes(512), 0o644),
        f"model/deep/{'n' * 150}": (b"long name", 0o644),
        "model/empty": (b"", 0o644),
        "model/数学.json": (b"{}", 0o644),
    }


def test_single_file_has_no_folder(model, tmp_path):
    with tarfile.open(fileobj=io.BytesIO(b"".join(stream(read(tmp_path, "model/block")))), mode="r|") as archive:
        assert archive.getnames() == ["block"]


@pytest.mark.parametrize("now", [b"", b"more than before" * 1000])
def test_file_that_changes_while_it_is_copied_is_an_error(model, tmp_path, now):
    (model / "block").write_bytes(b"before")
    tree = read(tmp_path, "model/block")
    (model / "block").write_bytes(now)
    with pytest.raises(UserError, match="has changed while it was copied"):
        b"".join(stream(tree))
