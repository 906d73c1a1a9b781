import json

from chaos.report import Outcome, Report, read_report, summarize_runs

KILLED = Outcome("kill rank", 4, 2.0, "restarts", 12.0, 1)
FROZEN = Outcome("freeze head", 9, 31.0, "hung", 61.0, 0)
ALARMED = Outcome("slow rank", 20, 8.0, "hung", 25.0, 0, "hung")
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


def test_false_alarm_is_a_failure_of_a_fault_that_is_over():
    report = Report(7, [KILLED, ALARMED], None)
    assert report.failures() == ["slow rank: false alarm: hung"]
    assert "FALSE ALARM: hung" in report.to_table()
    assert json.loads(report.to_json())["num_false_alarms"] == 1


def test_several_runs_are_one_table():
    runs = [
        Report(7, [KILLED, LOST], 0.8),
        Report(8, [Outcome("kill rank", 3, 4.0, "restarts", 20.0, 2), ALARMED], 0.7),
    ]
    runs = [read_report(run.to_json()) for run in runs]
    table = [line.split() for line in summarize_runs(runs).splitlines()]
    assert ["kill", "rank", "2", "3.0", "s", "16.0", "s", "20.0", "s", "3", "0"] in table
    assert ["freeze", "rank", "1", "-", "-", "-", "0", "1"] in table
    assert table[-2] == ["all", "4", "4.0", "s", "20.0", "s", "25.0", "s", "3", "2"]
    assert table[-1][:5] == ["2", "runs,", "seeds", "7,", "8;"]
