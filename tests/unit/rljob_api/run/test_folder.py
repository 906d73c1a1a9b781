"""The files of a run's folder."""

from rljob_api.run.folder import checkpoint_folder, complete_checkpoints, last_checkpoint, list_trajectory_files


def complete(folder, step):
    checkpoint_folder(folder, step).mkdir(parents=True)
    (checkpoint_folder(folder, step) / "COMPLETE").touch()


def test_last_checkpoint_is_the_newest_complete_one(tmp_path):
    assert last_checkpoint(tmp_path) is None
    for step in (9, 1_000_000, 200_000):
        complete(tmp_path, step)
    checkpoint_folder(tmp_path, 2_000_000).mkdir()
    assert last_checkpoint(tmp_path) == 1_000_000
    assert list(complete_checkpoints(tmp_path)) == [9, 200_000, 1_000_000]


def test_files_of_the_trajectory_log_sort_by_age(tmp_path):
    names = ("step-1000000.train", "step-000002.train", "step-000002.eval", "step-000003.train.copy", "step-x.train")
    for name in (*(f"{name}.parquet" for name in names), ".step-000004.train.parquet.partial"):
        (tmp_path / name).touch()
    found = [(file.step, file.lane) for file in list_trajectory_files(tmp_path)]
    assert found == [(2, "eval"), (2, "train"), (1_000_000, "train")]
