"""The driver's version from the file of its kernel module, in the forms of the closed and the open module."""

import pytest

from rljob_inputs.machine.nvidia import read_driver_version


@pytest.mark.parametrize(
    ("line", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023", "535.104.05"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.158.01  Release Build  (dvs)", "570.158.01"),
        ("something else 1.2 3", None),
    ],
)
def test_version_is_read_from_the_first_line(tmp_path, line, version):
    path = tmp_path / "proc/driver/nvidia/version"
    path.parent.mkdir(parents=True)
    path.write_text(f"{line}\nGCC version:  gcc version 12.2.0 (Debian 12.2.0-14)\n")
    assert read_driver_version(tmp_path) == version


def test_node_without_a_driver_has_no_version(tmp_path):
    assert read_driver_version(tmp_path) is None
