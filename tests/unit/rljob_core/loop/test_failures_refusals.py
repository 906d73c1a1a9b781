"""When a refused manifest is sent again."""

import gc
import itertools
import weakref

import pytest

from rljob_api.errors import TransientError, UserError
from rljob_api.manifest.job import RLJob
from rljob_core.backend import FieldProblem, ForeignObjectError, RefusedError
from rljob_core.loop import failures
from rljob_core.loop.failures import FIRST_RETRY_SECONDS, MAX_RETRY_SECONDS, Refusals

MANIFEST = {"kind": "Job", "metadata": {"name": "n"}, "spec": {}}


def make_owner(generation=1, **annotations):
    spec = {
        "model": {"source": "/m"},
        "data": {"train": {"source": "/d"}},
        "rewards": [{"name": "r", "function": {"inline": "x"}}],
    }
    metadata = {"name": "n", "uid": "u", "generation": generation, "annotations": annotations}
    return RLJob.model_validate({"metadata": metadata, "spec": spec})


class Server:
    """Counts its calls, and refuses them."""

    def __init__(self, error):
        self.error, self.num = error, 0

    async def apply(self, manifest):
        self.num += 1
        if self.error:
            raise self.error


async def send(known, server, now, owner=None, manifest=MANIFEST):
    with pytest.raises(type(server.error), match=str(server.error)):
        await known.guard(owner or make_owner(), now, server.apply)(manifest)


async def test_retries_of_a_refused_manifest_come_ever_later():
    known, server, times = Refusals(), Server(UserError("no")), []
    for now in range(0, 1500, 10):
        before = server.num
        await send(known, server, float(now))
        times += [now] if server.num > before else []
    delays = [late - early for early, late in itertools.pairwise(times)]
    assert delays == [30, 60, 120, 240, 300, 300, 300]
    assert (delays[0], delays[-1]) == (FIRST_RETRY_SECONDS, MAX_RETRY_SECONDS)


@pytest.mark.parametrize("owner", [make_owner(generation=2), make_owner(retry="1")])
async def test_changed_spec_or_annotation_is_sent_at_once(owner):
    known, server = Refusals(), Server(UserError("no"))
    await send(known, server, 0.0)
    await send(known, server, 1.0)
    assert server.num == 1
    await send(known, server, 1.0, owner)
    await send(known, server, 1.0, manifest=MANIFEST | {"spec": {"a": 1}})
    assert server.num == 3


@pytest.mark.parametrize("error", [ForeignObjectError("taken"), TransientError("busy")])
async def test_what_may_be_granted_at_any_time_is_not_delayed(error):
    known, server = Refusals(), Server(error)
    await send(known, server, 0.0)
    await send(known, server, 0.0)
    assert server.num == 2


async def test_number_of_remembered_refusals_is_bounded(monkeypatch):
    monkeypatch.setattr(failures, "MAX_REFUSED", 2)
    known, server = Refusals(), Server(UserError("no"))
    for number in range(3):
        await send(known, server, 0.0, manifest=MANIFEST | {"spec": {"a": number}})
    await send(known, server, 1.0, manifest=MANIFEST | {"spec": {"a": 2}})
    assert server.num == 3
    await send(known, server, 1.0, manifest=MANIFEST | {"spec": {"a": 0}})
    assert server.num == 4, "the oldest is forgotten"


async def test_refusal_is_remembered_with_its_fields_and_without_the_manifest():
    class Tracked(dict):
        """A mapping that can be referred to weakly."""

    error = RefusedError("no", (FieldProblem("spec.a", "wrong"),))
    known, server, manifest = Refusals(), Server(error), Tracked(MANIFEST)
    for now in (0.0, 1.0):
        with pytest.raises(RefusedError, match="no") as raised:
            await known.guard(make_owner(), now, server.apply)(manifest)
        assert raised.value.fields == error.fields
    reference = weakref.ref(manifest)
    del manifest, raised, error, server
    gc.collect()
    assert reference() is None, "the traceback of an error has all that its frames refer to"
