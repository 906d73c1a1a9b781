"""The longest recorded tokens with which a prompt begins: the same as by comparing it with each sequence."""

from hypothesis import given
from hypothesis import strategies as st

from rljob_trainer.conversation.transcript import TokenIndex
from rljob_trainer.conversation.turns import TurnTree
from rljob_trainer.episodes.types import Completion
from tests.support.chat_templates import build_template

TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=4)


@given(
    steps=st.lists(st.tuples(st.integers(0, 99), TOKENS, TOKENS), max_size=12),
    prompts=st.lists(TOKENS.map(lambda t: t * 3)),
)
def test_the_longest_recorded_tokens_are_found(steps, prompts):
    tree = TurnTree(build_template("smollm2"))
    index, recorded = TokenIndex(tree), [[]]
    for number, added, sampled in steps:
        prompt = recorded[number % len(recorded)] + added
        found = index.find(prompt)
        expected = max((len(each) for each in recorded if prompt[: len(each)] == each), default=0)
        assert (0 if found is None else found.end) == expected
        plan = tree.plan_tokens(found, prompt)
        assert tree.read_prompt(plan) == prompt
        tree.record(plan, Completion(sampled, [0.0] * len(sampled), [0] * len(sampled), "", False), {})
        recorded.append(prompt + sampled)
    for prompt in prompts:
        found = index.find(prompt)
        expected = max((len(each) for each in recorded if prompt[: len(each)] == each), default=0)
        assert (0 if found is None else found.end) == expected
        assert found is None or tree.segments[found.segment].token_ids[: found.end].tolist() == prompt[: found.end]
