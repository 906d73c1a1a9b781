"""The sessions of a run."""

from rljob_cli.run.sessions import SessionLog, read_sessions, total_restarts, total_seconds


def test_sessions_of_a_folder_are_kept_in_order(tmp_path):
    SessionLog(tmp_path, 0).update(seconds=10.0, phase="Interrupted", last_step=3, restarts={"head": 1})
    log = SessionLog(tmp_path, 2)
    log.update(seconds=5.0)
    log.update(seconds=7.5, restarts={"head": 2})
    first, second = read_sessions(tmp_path)
    assert (first.phase, first.last_step, second.after_step, second.phase) == ("Interrupted", 3, 2, "")
    assert total_seconds([first, second]) == 17.5
    assert total_restarts([first, second]) == {"head": 3}
    assert log.sessions[0] == first


def test_session_has_the_versions_of_this_environment(tmp_path):
    log = SessionLog(tmp_path, 0)
    log.update()
    [session] = read_sessions(tmp_path)
    assert {"python", "rljob-cli", "torch"} <= session.versions.keys()


def test_unreadable_sessions_are_unknown(tmp_path):
    assert read_sessions(tmp_path) == []
    (tmp_path / "sessions.json").write_text('[{"started": "now", "unknown": 1}]')
    assert read_sessions(tmp_path) == []


def test_failures_of_a_crash_loop_are_bounded(tmp_path):
    SessionLog(tmp_path, 0).update(failures=tuple({"exit_code": code} for code in range(1000)))
    [session] = read_sessions(tmp_path)
    assert len(session.failures) == 50
    assert session.failures[0] == {"exit_code": 0}
