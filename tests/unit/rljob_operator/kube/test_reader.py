"""Objects of CRDs that are newer than the operator: their defaults are no matter, a wish is refused with its remedy."""

import copy

import pytest
import yaml

from rljob_operator.kube.client import ApiError
from rljob_operator.kube.invalid import InvalidRewardModelError
from rljob_operator.kube.reader import Reader
from rljob_operator.loop.reconcile import InvalidJobError
from tests.paths import ROOT

CRDS = ROOT / "crds"
JOB = {
    "apiVersion": "rljob.dev/v1alpha1",
    "kind": "RLJob",
    "metadata": {"name": "sums", "namespace": "research", "uid": "u1"},
    "spec": {
        "model": {"source": "hf://a/b"},
        "data": {"train": {"source": "hf://a/b"}},
        "rewards": [{"name": "correct", "function": {"inline": "def reward(): ..."}}],
    },
}
MODEL = JOB | {"kind": "RewardModel", "spec": {"function": {"inline": "def reward(): ..."}}}
TEMPO = {"type": "object", "default": {}, "properties": {"kind": {"type": "string", "default": "even"}}}
REMEDY = "the cluster's CRDs take it: upgrade the operator to their version, or change it"


class Api:
    """CRDs of tomorrow: rewards have a tempo, and specs a mood."""

    def __init__(self, code=200):
        self.code, self.num_asked = code, 0

    async def request(self, method, path):
        self.num_asked += 1
        if self.code != 200:
            raise ApiError(self.code, "Forbidden", "no")
        crd = yaml.safe_load((CRDS / f"{path.rpartition('/')[2]}.yaml").read_text())
        spec = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
        spec["mood"] = {"type": "string", "nullable": True}
        spec["tempo"] = TEMPO
        if "rewards" in spec:
            spec["rewards"]["items"]["properties"]["tempo"] = TEMPO
        return crd


def changed(manifest, **fields):
    manifest = copy.deepcopy(manifest)
    manifest["spec"] |= fields
    return manifest


async def test_defaults_that_a_newer_crd_fills_in_ask_for_nothing():
    api = Api()
    reader = Reader(api)
    tomorrow = changed(JOB, tempo={"kind": "even"})
    tomorrow["spec"]["rewards"][0]["tempo"] = {"kind": "even"}
    tomorrow["status"] = {"mood": "fine", "phase": "Running"}
    before = copy.deepcopy(tomorrow)
    job = await reader.read_job(tomorrow)
    assert job.spec == (await reader.read_job(JOB)).spec
    assert (job.status.phase, tomorrow) == ("Running", before)
    assert await reader.read_model(changed(MODEL, tempo={"kind": "even"}))
    assert api.num_asked == 2, "each CRD once, and not at all where every field is known"


@pytest.mark.parametrize("wish", [{"tempo": {"kind": "odd"}}, {"mood": "grim"}, {"mood": None}])
async def test_a_wish_that_this_operator_does_not_know_is_refused_with_its_remedy(wish):
    with pytest.raises(InvalidJobError) as job:
        await Reader(Api()).read_job(changed(JOB, **wish))
    assert job.value.problems == [f"spec.{next(iter(wish))} is unknown to this operator; {REMEDY}"]
    with pytest.raises(InvalidRewardModelError, match="is unknown to this operator"):
        await Reader(Api()).read_model(changed(MODEL, **wish))


async def test_a_value_that_only_a_newer_crd_takes_is_told_in_plain_words():
    with pytest.raises(InvalidJobError) as raised:
        await Reader(Api()).read_job(changed(JOB, algorithm={"type": "ppo"}, schedule={"miniBatches": 0}))
    assert raised.value.problems == [
        f'spec.algorithm.type must be grpo, got "ppo"; {REMEDY}',
        f"spec.schedule.miniBatches must be at least 1, got 0; {REMEDY}",
    ]


async def test_without_the_right_to_read_crds_every_unknown_field_is_a_wish():
    api = Api(code=403)
    reader = Reader(api)
    for _ in range(3):
        with pytest.raises(InvalidJobError, match=r"spec\.tempo is unknown"):
            await reader.read_job(changed(JOB, tempo={"kind": "even"}))
    assert api.num_asked == 1, "not in each look"
