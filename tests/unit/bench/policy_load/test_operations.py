"""What an update needs, against a count by hand and against what torch counts."""

import numpy as np
import pytest
import torch
from policy_load.operations import count_work
from policy_load.rows import Load, build_rows
from policy_load.shapes import MODELS
from torch.utils.flop_counter import FlopCounterMode

from rljob_inputs.memory.shapes import read_shape

SHAPE = read_shape(MODELS["tiny"])


def rows_of(lengths, *, num_rows=4, prompt=8, answer=24):
    return build_rows(Load(lengths, num_rows, prompt, answer, group_size=4, vocabulary=512))


def test_operations_of_a_row_are_those_that_torch_counts():
    from transformers import AutoConfig, AutoModelForCausalLM

    length = 33
    config = AutoConfig.for_model(**MODELS["tiny"])
    network = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    # The last token predicts nothing, and only answers have logits: here, all others are answers.
    (row,) = rows_of("fixed", num_rows=1, prompt=1, answer=length - 1)
    with FlopCounterMode(display=False) as counter:
        network(input_ids=torch.tensor(row.token_ids[None, :-1])).logits.sum().backward()
    needed = count_work([row], SHAPE).operations
    # Eager attention computes the pairs that causality hides, too, and norms have no products.
    tokens = length - 1
    hidden_pairs = 3 * 4 * SHAPE.num_layers * SHAPE.query * tokens * (tokens - 1) // 2
    norms = 3 * 2 * SHAPE.num_layers * 2 * SHAPE.hidden * tokens
    assert counter.get_total_flops() == pytest.approx(needed + hidden_pairs - norms, rel=0.01)


def test_prompt_of_a_group_counts_once():
    alone, group = count_work(rows_of("fixed"), SHAPE), count_work(rows_of("groups"), SHAPE)
    assert (alone.needed_tokens, group.needed_tokens) == (4 * (8 + 23), 8 + 4 * 23)
    assert alone.row_tokens == group.row_tokens == 4 * 32
    assert group.operations < alone.operations


def test_lengths_of_mixed_rows_have_a_long_tail_within_the_limit():
    answers = [int(row.loss_mask.sum()) for row in rows_of("mixed", num_rows=400, answer=600)]
    assert max(answers) <= 600
    assert np.percentile(answers, 99) > 4 * np.median(answers)
