"""The doctor's table and JSON."""

import json

from rljob_trainer.doctor.report import Check, format_json, format_table, has_failed

PASSED = Check("versions", "ok", "torch 2.13.0")
WARNING = Check("open files", "warning", "1024", "raise the limit")
FAILED = Check("devices", "failed", "0 GPUs, asked for 2", "install the driver")


def test_table_has_what_to_do_below_each_check_that_did_not_pass():
    assert format_table([PASSED, WARNING, FAILED]).splitlines() == [
        "versions    ok       torch 2.13.0",
        "open files  WARNING  1024",
        "                     -> raise the limit",
        "devices     FAILED   0 GPUs, asked for 2",
        "                     -> install the driver",
        "1 of 3 checks failed",
    ]


def test_warnings_do_not_fail():
    assert not has_failed([PASSED, WARNING])
    assert format_table([PASSED, WARNING]).endswith("all 2 checks passed")
    assert json.loads(format_json([WARNING])) == {
        "ok": True,
        "checks": [{"name": "open files", "state": "warning", "found": "1024", "remedy": "raise the limit"}],
    }
    assert json.loads(format_json([FAILED]))["ok"] is False
