import json

from chaos.report import Outcome, Report

KILLED = Outcome("kill rank", 4, 2.0, "restarts", 12.0, 1)
FROZEN = Outcome("freeze head", 9, 31.0, "hung", 61.0, 0)
LOST = Outcome("freeze rank", 12, None, "", None, 0)


def test_report_has_medians_of_what_was_seen():
    report = json.loads(Report(7, [KILLED, FROZEN, LOST], 0.8).to_json())
    assert report["median_detected_seconds"] == 16.5
    assert report["median_recovered_seconds"] == 36.5
    assert (report["num_faults"], report["num_not_recovered"], report["training_share"]) == (3, 1, 0.8)
    assert report["faults"][0]["num_lost_steps"] == 1


def test_fault_without_recovery_is_a_failure_and_a_dash():
    report = Report(7, [KILLED, LOST], None)
    assert report.failures() == ["freeze rank"]
    assert report.to_table().splitlines()[-1].split()[:5] == ["freeze", "rank", "12", "-", "-"]
