"""What is sent to a rank: each token once, and little more."""

import dataclasses
import pickle

import numpy as np

from rljob_inputs.memory.limits import ROW_BYTES_PER_TOKEN
from rljob_trainer.episodes.types import NOT_SAMPLED, TOP, TrainRow
from rljob_trainer.policy.layout import MASKED_TREES, PACKED_ROWS, PACKED_TREES, build_micro_batches, divide_rows


def rows_of(num_groups: int, group: int, prompt: int, answer: int) -> list[TrainRow]:
    generator = np.random.default_rng(0)
    rows = []
    for _ in range(num_groups):
        shared = generator.integers(0, 1000, prompt)
        for _ in range(group):
            tokens = np.concatenate([shared, generator.integers(0, 1000, answer)])
            sampled = np.arange(len(tokens)) >= prompt
            values = np.where(sampled, 0.5, 0).astype(np.float32)
            versions = np.where(sampled, 0, NOT_SAMPLED).astype(np.int32)
            rows.append(TrainRow(tokens, sampled, values, values, versions, 1.0, 0, values, values, values))
    return rows


def test_rows_take_the_planned_bytes_of_a_rank():
    (part,) = divide_rows(rows_of(4, 8, 100, 1000), num_ranks=1, micro_batch_tokens=4096)
    num_bytes = len(pickle.dumps(part, protocol=5))
    assert num_bytes < 1.02 * ROW_BYTES_PER_TOKEN * 32_000 + 4 * 4 * 100, "a prompt is sent once per tree"


def with_top(rows, teachers=2, top_k=3):
    """Rows with the likeliest tokens of teachers: of each sampled token its own number, plus 0, 1, 2."""
    for row in rows:
        own = row.token_ids[row.loss_mask, None, None] + np.arange(top_k)
        top = np.zeros((len(own), teachers, top_k), TOP)
        top["token"], top["logprob"] = own, -own
        yield dataclasses.replace(row, top=top)


def test_the_likeliest_tokens_take_the_planned_bytes_and_stay_with_their_targets():
    rows = [*with_top(rows_of(4, 8, 10, 100))]
    (part,) = divide_rows(rows, num_ranks=1, micro_batch_tokens=1000)
    num_bytes = len(pickle.dumps(part, protocol=5))
    assert num_bytes < 1.05 * (ROW_BYTES_PER_TOKEN + 6 * TOP.itemsize) * 3_200 + 4 * 4 * 10
    for batch in build_micro_batches(part):
        assert np.array_equal(batch.top["token"][:, 1, 2], batch.targets + 2)
        assert np.array_equal(batch.top["logprob"][:, 0, 0], -batch.targets)


def test_likeliest_tokens_train_without_an_advantage_and_an_idle_rank_has_none():
    rows = [dataclasses.replace(row, advantages=row.advantages * 0) for row in with_top(rows_of(1, 1, 10, 5))]
    parts = divide_rows(rows, num_ranks=2, micro_batch_tokens=100, without_advantage=False)
    found = [batch.top for part in parts for batch in build_micro_batches(part)]
    assert [None if top is None else top.shape for top in found] == [(5, 2, 3), None]


def test_micro_batches_are_written_from_read_only_rows_as_ray_gives_them():
    (part,) = divide_rows(rows_of(4, 4, 10, 20), num_ranks=1, micro_batch_tokens=256)
    buffers = []
    data = pickle.dumps(part, protocol=5, buffer_callback=buffers.append)
    sent = pickle.loads(data, buffers=[memoryview(bytes(buffer.raw())) for buffer in buffers])
    assert not sent.token_ids.flags.writeable
    for found, expected in zip(build_micro_batches(sent), build_micro_batches(part), strict=True):
        for name, values in vars(expected).items():
            np.testing.assert_array_equal(getattr(found, name), values)


def test_packed_micro_batches_are_full_and_not_padded():
    rows = rows_of(8, 8, 50, 30)
    for layout in (PACKED_TREES, PACKED_ROWS):
        (part,) = divide_rows(rows, num_ranks=1, micro_batch_tokens=1000, layout=layout)
        *full, _ = (batch.token_ids for batch in build_micro_batches(part))
        assert all(tokens.shape[0] == 1 for tokens in full)
        assert all(tokens.size > 700 for tokens in full)
    (part,) = divide_rows(rows, num_ranks=1, micro_batch_tokens=1000, layout=PACKED_TREES)
    assert sum(batch.token_ids.size for batch in build_micro_batches(part)) == 8 * (50 + 8 * 29), "prompts once"


def test_trees_of_packed_lines_are_longer_than_those_under_masks():
    rows = rows_of(1, 8, 500, 300)
    (packed,) = divide_rows(rows, num_ranks=1, micro_batch_tokens=16384, layout=PACKED_TREES)
    (masked,) = divide_rows(rows, num_ranks=1, micro_batch_tokens=16384, layout=MASKED_TREES)
    assert [[len(tree) for tree in line] for batch in packed.batches for line in batch] == [[8]]
    assert [len(tree) for batch in masked.batches for line in batch for tree in line] == [1] * 8
