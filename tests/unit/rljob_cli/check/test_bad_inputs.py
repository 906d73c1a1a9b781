"""What people get wrong is answered with its place and the fix, before anything starts."""

import pytest
import typer

from rljob_cli.main import app
from tests.support.bad_inputs import BAD_INPUTS

_WITHOUT_A_CALL = [bad for bad in BAD_INPUTS if not bad.calls]
_COMMAND = typer.main.get_command(app)


@pytest.mark.parametrize("bad", _WITHOUT_A_CALL, ids=lambda bad: bad.name)
def test_bad_input_is_answered_with_its_place_and_the_fix(bad, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.chdir(tmp_path)
    bad.write(tmp_path)
    with pytest.raises(SystemExit) as end:
        _COMMAND.main([*bad.command, "--no-call"])
    printed = "".join(capsys.readouterr())
    assert bad.message in printed
    assert end.value.code == 2
    assert "Traceback" not in printed
