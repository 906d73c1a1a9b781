"""What must hold of the checks of `make accept-gpu`."""

from __future__ import annotations

import json

import pytest
from acceptance import judgements
from acceptance.judgements import BrokenError, Ended

from rljob_api.run.folder import FILE_METRICS
from rljob_api.run.summaries import RunSummary

SUMMARY = {"name": "j", "phase": "Succeeded", "steps": 4, "total_steps": 4, "logprob_difference": [1e-5, 2e-5]}
OK = [Ended(0, "first\nlast\n\n")]


@pytest.fixture
def run(tmp_path):
    """Write the files of a run."""

    def write(norms=(1.0, 0.5), **summary):
        document = RunSummary.model_validate(SUMMARY | summary).model_dump_json()
        (tmp_path / "summary.json").write_text(document)
        lines = [{"type": "step", "step": step, "grad_norm": norm} for step, norm in enumerate(norms, 1)]
        (tmp_path / FILE_METRICS).write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        return tmp_path

    return write


def test_failed_job_is_described_by_its_reason():
    with pytest.raises(BrokenError, match=r"command 1 ended with 1: .*Failed: no room"):
        judgements.succeed([Ended(1, "[   13s] Failed: no room\nlogs: there\n")])


def test_commands_succeed_with_their_last_line_or_name_the_one_that_failed():
    assert judgements.succeed(OK) == "last"
    with pytest.raises(BrokenError, match="command 2 ended with 3: why"):
        judgements.succeed([*OK, Ended(3, "why\n")])


@pytest.mark.parametrize(
    ("summary", "dtype", "problem"),
    [
        ({}, "float32", None),
        ({"phase": "Failed", "steps": 1}, "float32", "Failed after step 1"),
        ({"steps": 3}, "float32", "Succeeded after step 3"),
        ({"logprob_difference": [0.02]}, "float32", "differ by 0.02"),
        ({"logprob_difference": [0.02]}, "bfloat16", None),
        ({"logprob_difference": []}, "bfloat16", "no difference of log-probs was measured"),
    ],
)
def test_run_has_its_steps_and_log_probs_that_agree(run, summary, dtype, problem):
    judge = judgements.check_run(run(**summary), 4, dtype)
    if problem is None:
        assert judge(OK).startswith("4 steps")
    else:
        with pytest.raises(BrokenError, match=problem):
            judge(OK)


def test_demo_learns(run):
    found = judgements.check_learning(run(accuracy_before=0.1, accuracy_after=0.5), 4, "float32")(OK)
    assert found.endswith("accuracy 0.100 -> 0.500")
    with pytest.raises(BrokenError, match=r"from 0.500 to 0.500"):
        judgements.check_learning(run(accuracy_before=0.5, accuracy_after=0.5), 4, "float32")(OK)


def test_resumed_run_says_so_and_repeats_no_step(run):
    ended = [OK[0], Ended(0, "resumes after step 1, the last checkpoint in x\n")]
    assert judgements.check_resume(run(), 1, 2)(ended)
    with pytest.raises(BrokenError, match="did not say"):
        judgements.check_resume(run(), 1, 2)([OK[0], OK[0]])
    with pytest.raises(BrokenError, match=r"the steps are \[1, 2\]"):
        judgements.check_resume(run(), 1, 4)(ended)


@pytest.mark.parametrize(
    ("digests", "problem"),
    [
        ({"trainer": "a", "rollout": "a"}, None),
        ({"trainer": "a", "rollout": "b"}, "differ"),
        ({"a": "a"}, "1 pr"),
    ],
)
def test_digests_are_of_two_processes_and_equal(run, digests, problem):
    judge = judgements.check_digests(run(weight_digests=digests))
    if problem is None:
        assert judge([]) == "2 processes agree"
    else:
        with pytest.raises(BrokenError, match=problem):
            judge([])


def test_gradient_norms_are_those_of_the_first_step(tmp_path):
    folders = []
    for name, norm in (("a", 1.0), ("b", 1.01), ("c", 1.2)):
        (tmp_path / name).mkdir()
        line = json.dumps({"type": "step", "step": 1, "grad_norm": norm})
        (tmp_path / name / FILE_METRICS).write_text(f"{line}\n")
        folders.append(tmp_path / name)
    assert judgements.check_norms(folders[:2])(OK) == "gradient norms 1, 1.01"
    with pytest.raises(BrokenError, match="differ"):
        judgements.check_norms(folders)(OK)


def test_out_of_memory_is_an_error_of_the_user_that_names_the_field():
    said = "spec.trainer.microBatchTokens: a rank ran out of GPU memory in accumulate: ..."
    assert judgements.check_out_of_memory([Ended(1, said)])
    for ended in (Ended(0, said), Ended(1, "something else")):
        with pytest.raises(BrokenError):
            judgements.check_out_of_memory([ended])


def test_judgements_of_the_same_commands_all_hold():
    assert judgements.both(judgements.succeed, lambda ended: "more")(OK) == "last; more"
    with pytest.raises(BrokenError, match="command 1 ended"):
        judgements.both(lambda ended: "more", judgements.succeed)([Ended(1, "")])


def test_figures_of_benchmarks_are_read_from_their_last_json_and_have_bounds():
    policy = {"result": {"tokens_per_second": 1000, "share_of_peak": 0.4, "peak_memory_bytes": 2**30}}
    said = [Ended(0, f"text\n{json.dumps(policy)}\n")]
    assert judgements.check_policy(0.4)(said) == "1,000 tokens/s, 40% of the peak, 1.0 GiB"
    with pytest.raises(BrokenError, match=r"is 0\.400, and at least 0\.41 is expected"):
        judgements.check_policy(0.41)(said)
    with pytest.raises(BrokenError, match="printed no JSON"):
        judgements.check_policy(0)(OK)
    weights = {"results": [{"gigabytes": 0.1, "copy_seconds": 0.1, "seconds": {"both": 0.2}}]}
    sent = [Ended(0, json.dumps(weights))]
    assert judgements.check_weights(2)(sent) == "0.1 GB in 0.20 s, 2.0 memory copies"
    with pytest.raises(BrokenError, match=r"took 2\.0 memory copies, and at most 1\.5"):
        judgements.check_weights(1.5)(sent)


PARTS = [
    {"part": "start", "seconds": 60.0, "runner": "model runner V2"},
    {"part": "version 1", "seconds": 2.0, "logprob_difference": 0.004},
    {"part": "sleep", "seconds": 1.0, "level": 2, "awake_bytes": 24 * 2**30, "asleep_bytes": 2**30},
]


def test_engine_is_described_by_its_parts_and_a_failure_by_the_last_one_that_ended():
    lines = [json.dumps(part) for part in PARTS]
    found = judgements.check_engine([Ended(0, "\n".join(["INFO of vLLM", *lines]))])
    assert found == "model runner V2; log-probs differ by 0.004; level 2: 24.0 -> 1.0 GiB; 63 s"
    with pytest.raises(BrokenError, match="after version 1: AssertionError: it moved"):
        judgements.check_engine([Ended(1, "\n".join([*lines[:2], "AssertionError: it moved"]))])
    with pytest.raises(BrokenError, match="before its first part: ImportError"):
        judgements.check_engine([Ended(1, "ImportError: x")])
