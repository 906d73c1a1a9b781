"""What requests to all services have in common."""

from rljob_trainer.services.messages import busy_seconds


def test_busy_seconds_are_limited():
    assert busy_seconds("2") == 2.0
    assert busy_seconds("9999") == busy_seconds("Fri, 31 Dec 9999 23:59:59 GMT") == 60.0
    assert busy_seconds("0") == 0.05
    assert busy_seconds("nan") == busy_seconds(None) == 1.0
