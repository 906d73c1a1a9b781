from __future__ import annotations

import pytest

from rljob_api.generate import __main__ as files


def test_generated_files_are_up_to_date(capsys):
    assert files.main(["--check"]) == 0, capsys.readouterr().err


def test_table_between_the_comments_is_replaced_and_the_rest_stays():
    page = "# A\n<!-- generated: step, by x -->\n| old |\n<!-- end: step -->\nB\n"
    changed = files.replace_table(page, "step", "| new |\n")
    assert changed == page.replace("old", "new")
    assert files.replace_table(changed, "step", "| new |\n") == changed
    for broken in ("", page.replace("generated", "x"), page.replace("end", "x")):
        with pytest.raises(ValueError, match="needs the comments `<!-- generated: step"):
            files.replace_table(broken, "step", "")


def test_check_fails_and_writes_nothing_when_a_file_drifts(tmp_path, monkeypatch, capsys):
    (tmp_path / "crds").mkdir()
    (tmp_path / "docs").mkdir()
    monkeypatch.setattr(files, "_ROOT", tmp_path)
    monkeypatch.setattr(files, "build_files", lambda: {"crds/a.yaml": "a", "docs/page.md": "b"})
    assert files.main(["--check"]) == 1
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    assert "crds/a.yaml is out of date" in capsys.readouterr().err
    assert files.main([]) == 0
    assert files.main(["--check"]) == 0
    (tmp_path / "docs" / "page.md").write_text("old")
    assert files.main(["--check"]) == 1
