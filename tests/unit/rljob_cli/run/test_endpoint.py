"""The file that says where the head of a run answers."""

import stat

from rljob_cli.run.endpoint import Endpoint, read_endpoint, remove_endpoint, write_endpoint


def test_only_the_user_reads_the_token(tmp_path):
    assert read_endpoint(tmp_path) is None
    for token in ("secret", "another"):
        write_endpoint(tmp_path, Endpoint("http://127.0.0.2:1", token))
    assert read_endpoint(tmp_path) == Endpoint("http://127.0.0.2:1", "another")
    [file] = tmp_path.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    remove_endpoint(tmp_path)
    remove_endpoint(tmp_path)
    assert read_endpoint(tmp_path) is None


def test_damaged_file_is_no_endpoint(tmp_path):
    write_endpoint(tmp_path, Endpoint("u", "t"))
    [file] = tmp_path.iterdir()
    for text in ("", "[]", "{}"):
        file.write_text(text)
        assert read_endpoint(tmp_path) is None
