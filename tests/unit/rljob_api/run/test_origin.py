"""The fields of a job that its checkpoints depend on, and what differs between two jobs."""

import pytest

from rljob_api.manifest.immutable_fields import FIXED, IMMUTABLE, read_resume_fields
from rljob_api.run.origin import FILE_ORIGIN, build_origin, find_changes, read_origin
from tests.support.job_simulation import make_job

MIX = [{"source": "/a.jsonl", "name": "a"}, {"source": "/b.jsonl", "name": "b"}]


def compare(before, now):
    fields = (read_resume_fields(make_job(**each).spec).fixed for each in (before, now))
    return [(each.path, each.text_before, each.text_now) for each in find_changes(*fields)]


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"model": {"source": "hf://a/b"}}, [("spec.model.source", '"/models/tiny"', '"hf://a/b"')]),
        (
            {"model": {"source": "/models/tiny", "revision": "v2"}},
            [("spec.model.revision", "its default", '"v2"')],
        ),
        ({"data": {"train": {"source": "/other"}}}, [("spec.data.train.source", '"/data/train.jsonl"', '"/other"')]),
        ({"algorithm": {"type": "rloo"}}, [("spec.algorithm.type", "its default", '"rloo"')]),
        ({"trainer": {"lora": {"rank": 4}}}, [("spec.trainer.lora", "its default", '{"rank": 4}')]),
        ({"schedule": {"seed": 7}}, [("spec.schedule.seed", "its default", "7")]),
    ],
)
def test_field_that_a_checkpoint_depends_on_is_found_with_both_values(change, found):
    assert compare({}, change) == found
    assert compare(change, change) == []


@pytest.mark.parametrize(
    "change",
    [
        {"schedule": {"steps": 9, "maxStepsWithoutSignal": 1}},
        {"rewards": [{"name": "other", "function": {"inline": "def reward(): ..."}}]},
        {"trainer": {"replicas": 4, "resources": {"limits": {"cpu": 2}}, "image": "x"}},
        {"rollout": {"replicas": 3}},
        {"data": {"train": {"source": "/data/train.jsonl"}, "maxPromptTokens": 9}},
        {"checkpoint": {"keep": 5, "storage": "s3://b/runs"}},
        {"head": {"env": {"A": "b"}}},
        {"suspend": True},
    ],
)
def test_other_fields_may_differ(change):
    assert compare({}, change) == []


def test_entry_of_a_list_is_named_and_a_list_of_another_length_is_one_change():
    first = {"source": "/data/train.jsonl", "name": "main"}

    def mixed(*mix):
        return {"data": {"train": first, "mix": list(mix)}}

    moved = MIX[1] | {"source": "/c.jsonl"}
    assert compare(mixed(*MIX), mixed(MIX[0], moved)) == [("spec.data.mix[1].source", '"/b.jsonl"', '"/c.jsonl"')]
    (change,) = compare(mixed(*MIX), mixed(MIX[0]))
    assert change[0] == "spec.data.mix"


def test_fields_are_those_that_an_rljob_may_never_change():
    never = {rule.field for rule in IMMUTABLE if rule.message.endswith("create a new RLJob instead")}
    assert set(FIXED) == never - {"managedBy", "service", "service.maxRank"}


def test_record_is_read_back_and_one_that_is_missing_or_damaged_is_told_apart(tmp_path):
    assert read_origin(tmp_path) is None
    origin = build_origin(*read_resume_fields(make_job().spec))
    (tmp_path / FILE_ORIGIN).write_text(origin.model_dump_json())
    assert read_origin(tmp_path) == origin
    (tmp_path / FILE_ORIGIN).write_text("{")
    with pytest.raises(ValueError, match="Origin"):
        read_origin(tmp_path)


def test_changes_are_recorded_with_the_step_and_those_of_lost_steps_removed():
    def fields(rate):
        return read_resume_fields(make_job(algorithm={"optimizer": {"learningRate": rate}}).spec)

    first = build_origin(*fields(1e-5))
    second = first.resume(4, fields(3e-6).recorded)
    assert [str(each) for each in second.changes] == [
        "after step 4: spec.algorithm.optimizer.learningRate is 3e-06; it was 1e-05"
    ]
    assert second.resume(4, fields(3e-6).recorded) == second
    assert [each.after_step for each in second.resume(6, fields(2e-6).recorded).changes] == [4, 6]
    assert [each.after_step for each in second.resume(2, fields(2e-6).recorded).changes] == [2]


def test_a_source_that_has_moved_is_the_same_and_one_with_other_contents_is_not(tmp_path):
    def fields(folder):
        return read_resume_fields(make_job(data={"train": {"source": f"{folder}/train.jsonl"}}).spec)

    before, moved, other = (tmp_path / name for name in ("before", "moved", "other"))
    for folder, text in ((before, "a"), (moved, "a"), (other, "b")):
        folder.mkdir()
        (folder / "train.jsonl").write_text(text)
    origin = build_origin(*fields(before))
    (before / "train.jsonl").unlink()
    assert origin.find_refused(fields(moved).fixed) == []
    assert origin.resume(2, {}).find_refused(fields(moved).fixed) == [], "it may move again"
    assert [each.path for each in origin.find_refused(fields(other).fixed)] == ["spec.data.train.source"]
    assert origin.find_refused(fields(tmp_path / "missing").fixed)


def test_a_reward_that_is_edited_in_place_is_a_change(tmp_path):
    file = tmp_path / "reward.py"
    file.write_text("a")
    recorded = {"spec.rewards": {"correct": {"function": {"file": str(file)}}}}
    origin = build_origin({}, recorded)
    assert origin.find_allowed(recorded) == []
    file.write_text("b")
    (change,) = origin.resume(2, recorded).changes
    assert (change.path, change.after_step) == ("spec.rewards.correct.function.file", 2)
    assert change.before != change.now
    assert origin.resume(2, recorded).find_allowed(recorded) == []


def test_long_value_is_cut():
    (change,) = find_changes({"spec.model": {"chatTemplate": "x" * 9999}}, {"spec.model": {}})
    assert len(change.text_before) <= 120
