"""Texts of other programs: each pattern reads one of the version that was read last."""

import re
import tomllib

import pytest

from rljob_api import foreign_texts
from rljob_cluster.host.go_programs import KUBERNETES_VERSION
from tests.paths import ROOT

EXAMPLES = {
    "TYPED_PATCH": "failed to create typed patch object (x/p; apps/v1, Kind=Job): .spec.nam: field not declared",
    "NAMESPACE_ENDS": "unable to create new content in namespace term because it is being terminated",
    "MISSING_RIGHT": 'jobs.batch "p" is forbidden: User "op" cannot patch resource "jobs" in API group "batch"',
    "DENIED": 'admission webhook "p" denied the request: no',
    "SILENT_WEBHOOK": 'Internal error occurred: failed calling webhook "w": failed to call webhook: Post "https://w"',
    "NO_DRY_RUN": 'admission webhook "w" does not support dry run',
    "TOO_LARGE": "rpc error: trying to send message larger than max (3002901 vs. 2097152)",
    "QUOTA": 'pods "p" is forbidden: failed quota: q: must specify limits.cpu for: head',
    "EXCEEDED_QUOTA": "exceeded quota: q, requested: pods=1, used: pods=2, limited: pods=2",
    "LIMIT_RANGE": "cpu max limit to request ratio per Container is 2, but provided ratio is 4.000000",
    "REJECTED_POD": 'create Pod p-0 in StatefulSet p failed error: pods "p-0" is forbidden: ',
    "PULL_SECRETS": "Unable to retrieve some image pull secrets (registry); attempting to pull may not succeed.",
    "SLOW_KUBELET": 'MountVolume.SetUp failed for volume "c" : failed to sync configmap cache: timed out waiting for x',
    "HELD_VOLUME": "0/2 nodes are available: 1 node(s) had volume node affinity conflict.",
    "UNBOUND_CLAIM": '0/1 nodes are available: persistentvolumeclaim "runs" not found.',
    "NODE_SELECTOR": "0/1 nodes are available: 1 node(s) didn't match Pod's node affinity/selector.",
    "OVER_OWN_DISK": "Pod ephemeral local storage usage exceeds the total limit of containers 1Gi. ",
    "UNREACHABLE_INDEX": "error sending request for url (https://index.example/simple/sympy/)",
    "WRONG_REQUIREMENT": "Because rljobb was not found in the package registry and you require rljobb",
    "DISK_FULL": "error: No space left on device (os error 28)",
    "NO_SUBSET": "BuilderConfig 'x' not found. Available: ['main', 'socratic']",
    "NO_SPLIT": "Unknown split \"dev\". Should be one of ['train', 'test'].",
}
PATTERNS = {name: value for name, value in vars(foreign_texts).items() if isinstance(value, re.Pattern)}


def test_each_pattern_has_an_example():
    assert EXAMPLES.keys() == PATTERNS.keys()


@pytest.mark.parametrize("name", EXAMPLES)
def test_pattern_reads_its_example(name):
    found = PATTERNS[name].search(EXAMPLES[name])
    assert found
    assert found[0], "it matches some of the text"


def test_texts_are_those_of_the_versions_that_are_used():
    locked = {each["name"]: each["version"] for each in tomllib.loads((ROOT / "uv.lock").read_text())["package"]}
    used = {"kubernetes": KUBERNETES_VERSION.removeprefix("v")} | {name: locked[name] for name in ("datasets",)}
    assert used == foreign_texts.VERSIONS, "read the texts of the new version, then change VERSIONS"
