"""Volumes that all roles share."""

from rljob_operator.children import build_children
from rljob_operator.defaults import DEFAULTS
from tests.support.job_simulation import make_job


def test_claim_with_model_and_checkpoints_is_one_writable_volume():
    job = make_job(
        model={"source": "pvc://all/model"},
        data={"train": {"source": "pvc://all/train.jsonl"}, "eval": {"source": "pvc://other/eval.jsonl"}},
        checkpoint={"persistentVolumeClaim": {"claimName": "all"}},
    )
    head = next(child for child in build_children(job, "token", DEFAULTS) if child["kind"] == "Job")
    spec = head["spec"]["template"]["spec"]
    claims = {v["name"]: v["persistentVolumeClaim"] for v in spec["volumes"] if "persistentVolumeClaim" in v}
    assert sorted(claims.values(), key=str) == [{"claimName": "all"}, {"claimName": "other", "readOnly": True}]
    mounts = {mount["mountPath"]: mount for mount in spec["containers"][0]["volumeMounts"]}
    assert mounts["/var/lib/rljob"] == {"name": "run", "mountPath": "/var/lib/rljob", "subPath": "gsm8k"}
    assert mounts["/mnt/pvc/all"] == {"name": "run", "mountPath": "/mnt/pvc/all", "readOnly": True}
