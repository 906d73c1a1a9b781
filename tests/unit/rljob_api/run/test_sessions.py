"""The sessions of a run, as a file."""

from rljob_api.run.sessions import Session, read_sessions, total_restarts, total_seconds, write_sessions
from tests.support.records import container_failure


def test_sessions_are_the_same_after_a_round_trip(tmp_path):
    first = Session(started="now", seconds=10.0, phase="Interrupted", last_step=3, restarts={"head": 1})
    second = Session(started="later", after_step=2, seconds=7.5, restarts={"head": 2}, failures=(container_failure(),))
    write_sessions(tmp_path, [first, second])
    assert read_sessions(tmp_path) == [first, second]
    assert [path.name for path in tmp_path.iterdir()] == ["sessions.json"]
    assert total_seconds([first, second]) == 17.5
    assert total_restarts([first, second]) == {"head": 3}


def test_unreadable_sessions_are_unknown_and_unknown_fields_are_ignored(tmp_path):
    assert read_sessions(tmp_path) == []
    (tmp_path / "sessions.json").write_text('[{"started": "now", "unknown": 1}]')
    assert read_sessions(tmp_path) == [Session(started="now")]
    (tmp_path / "sessions.json").write_text('[{"started": "n')
    assert read_sessions(tmp_path) == []
