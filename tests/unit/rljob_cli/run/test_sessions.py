"""The sessions of a run."""

from rljob_api.run.sessions import read_sessions
from rljob_cli.run.sessions import SessionLog
from tests.support.records import container_failure


def test_sessions_of_a_folder_are_kept_in_order(tmp_path):
    SessionLog(tmp_path, 0).update(seconds=10.0, phase="Interrupted", last_step=3, restarts={"head": 1})
    log = SessionLog(tmp_path, 2)
    log.update(seconds=5.0, last_step=2)
    log.update(seconds=7.5, last_step=4, restarts={"head": 2})
    first, second = read_sessions(tmp_path)
    assert (first.phase, first.last_step, first.restarts) == ("Interrupted", 3, {"head": 1})
    assert (second.after_step, second.phase, second.last_step, second.seconds) == (2, "", 4, 7.5)
    assert log.sessions == [first, second]


def test_session_has_the_versions_of_this_environment(tmp_path):
    SessionLog(tmp_path, 0).update(seconds=0.0, last_step=0)
    [session] = read_sessions(tmp_path)
    assert {"python", "rljob", "torch"} <= session.versions.keys()


def test_failures_of_a_crash_loop_are_bounded(tmp_path):
    failures = [container_failure(exit_code=code) for code in range(1000)]
    SessionLog(tmp_path, 0).update(seconds=1.0, last_step=0, failures=failures)
    [session] = read_sessions(tmp_path)
    assert [failure.exit_code for failure in session.failures] == list(range(50))
