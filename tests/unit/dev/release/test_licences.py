"""The licences that packages name in their different ways."""

from email.message import Message

import pytest

from dev.release.licences import build_table, find_licence


@pytest.mark.parametrize(
    ("fields", "licence"),
    [
        ([("License-Expression", "MIT OR Apache-2.0"), ("License", "MIT")], "MIT OR Apache-2.0"),
        ([("Classifier", "License :: OSI Approved :: MIT License"), ("License", "x")], "MIT License"),
        ([("Classifier", "License :: OSI Approved"), ("License", "Apache-2.0")], "Apache-2.0"),
        ([("Classifier", "License :: Other/Proprietary License")], "not named in its metadata: see its files"),
        ([("License", "Copyright (c) 2026 " + "all rights " * 10)], "not named in its metadata: see its files"),
        ([], "not named in its metadata: see its files"),
    ],
)
def test_licence_is_what_the_metadata_says_most_precisely(fields, licence):
    metadata = Message()
    for name, value in fields:
        metadata[name] = value
    assert find_licence(metadata) == licence


def test_table_has_a_row_for_each_version_and_says_what_is_unknown():
    packages = {"operator": {"a": "1", "b": "2"}, "reward": {"a": "1", "b": "3"}}
    rows = build_table(packages, {"a": "MIT", "b": None}).splitlines()[-3:]
    assert rows[0] == "| a | 1 | MIT | operator, reward |"
    assert [
        row.startswith(f"| b | {version} | not installed") for row, version in zip(rows[1:], "23", strict=True)
    ] == [
        True,
        True,
    ]
