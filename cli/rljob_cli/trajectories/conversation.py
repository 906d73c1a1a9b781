"""Shows a sample of the trajectory log: its prompt and answer, or its messages with tool calls and rewards of turns;
and what was trained.

Invariant: a mark follows from the log alone. The policy sampled the tokens of a span with a turn, and the update used
them if the turn has an advantage that is not 0.
"""

import json
from collections.abc import Mapping, Sequence

from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from rljob_api.run.trajectories import SampleRow, SegmentRow, TurnRow
from rljob_api.wire.base import Message
from rljob_cli.trajectories.tables import (
    describe_reward,
    format_content,
    format_prompt,
    name_sample,
    number,
    seconds,
    shorten,
)

TRAINED, SAMPLED = ">>", ">"
LEGEND = f"{TRAINED} changed the policy, {SAMPLED} sampled only (evaluation, or no advantage but 0); else context"
_STYLES = {TRAINED: "green", SAMPLED: "cyan", "": ""}
_ASIDE = "dim"
_EMPTY = (None, "", "{}")
_OTHER_BRANCHES = ("branch", "unmatched")
"""Causes of segments whose answers need not be a part of `messages`."""


def is_conversation(row: SampleRow) -> bool:
    return bool(row.messages)


def build_conversation(row: SampleRow, *, full: bool, messages: bool = True, tokens: bool = False) -> Group:
    """Return one sample: its head, its rewards, its messages, and with `tokens` the text of each span of tokens."""
    if not is_conversation(row):
        return Group(_build_head(row), *_build_rewards(row), build_answer(row, full=full), Text())
    body = [build(row, full=full) for build, has in ((build_messages, messages), (build_tokens, tokens)) if has]
    return Group(_build_head(row), *_build_rewards(row), *body, Text())


def _build_head(row: SampleRow) -> Text:
    parts = [f"step {row.step} {row.lane}, sample {name_sample(row)}"]
    if is_conversation(row):
        num_turns = len(row.turns or [])
        parts.append(f"{num_turns} turn{'s' if num_turns != 1 else ''}, ended by {row.end}")
    parts.append(f"score {number(row.score)}")
    if of_turns := [turn.reward for turn in row.turns or [] if turn.reward is not None]:
        parts.append(f"with the rewards of its turns {number((row.score or 0) + sum(of_turns))}")
    if row.advantage is not None:
        parts.append(f"advantage {number(row.advantage)}")
    if row.ground_truth is not None and is_conversation(row):
        parts.append(f"answer: {row.ground_truth}")
    parts.append(f"{row.num_sampled_tokens} of {row.num_tokens} tokens sampled")
    if row.weights and row.num_sampled_tokens:
        parts.append(f"weights {row.weights}")
    return Text(" | ".join(parts), style="bold")


def _build_rewards(row: SampleRow) -> list[Padding]:
    lines = [Text.assemble(f"{reward.name}: ", describe_reward(reward)) for reward in row.rewards]
    if row.own_reward is not None:
        lines.append(Text(f"runner's reward: {number(row.own_reward)}"))
    if row.failure:
        lines.append(Text(f"invalid: {row.failure}", style="red"))
    asides = {"state": row.state, "info": row.info, "ignored in requests": ", ".join(row.ignored)}
    lines += [Text(f"{name}: {text}", style=_ASIDE) for name, text in asides.items() if text not in _EMPTY]
    return [Padding(line, (0, 0, 0, 2), expand=False) for line in lines]


def build_answer(row: SampleRow, *, full: bool) -> Table:
    """Return a sample with one answer: [mark, prompt or completion, text]."""
    table = _build_grid(3)
    table.add_row("", "prompt", _text(format_prompt(row.prompt), full))
    if row.ground_truth is not None:
        table.add_row("", "answer", _text(row.ground_truth, full))
    mark = _mark(row)
    text = _text(row.completion, full, _STYLES[mark]) + Text(" [truncated]" if row.truncated else "")
    table.add_row(Text(mark, style=_STYLES[mark]), "completion", text)
    return table


def build_messages(row: SampleRow, *, full: bool) -> Table:
    """Return the conversation: [mark, role, text] for each message; below an answer what its turn brought.

    Answers that the conversation of the last one does not contain, of other branches of an episode, follow it.
    """
    table = _build_grid(3)
    messages, breaks, turns = json.loads(row.messages or "[]"), _find_breaks(row), row.turns or []
    turn_of = match_turns(row, messages)
    for index, message in enumerate(messages):
        if index in turn_of:
            _add_turn(table, turns, turn_of[index], breaks, full)
        else:
            role, name = str(message.get("role")), message.get("name")
            table.add_row("", f"{role} {name}" if name else role, _text(format_content(message.get("content")), full))
    for turn in sorted(set(range(len(turns))) - set(turn_of.values())):
        _add_turn(table, turns, turn, breaks, full, f" (turn {turn + 1}, elsewhere)")
    return table


def _add_turn(
    table: Table, turns: Sequence[TurnRow], turn: int, breaks: Mapping[int, Sequence[str]], full: bool, where: str = ""
) -> None:
    for cause in breaks.get(turn, ()):
        table.add_row("", "", Text(cause, style="yellow"))
    found = turns[turn]
    mark = _mark(found)
    text = _text(found.text + (" [truncated]" if found.truncated else ""), full, _STYLES[mark])
    table.add_row(Text(mark, style=_STYLES[mark]), f"assistant{where}", text)
    for line in _describe_turn(found, full):
        table.add_row("", "", line)


def match_turns(row: SampleRow, messages: Sequence[Message]) -> dict[int, int]:
    """Return the turn of each message that is an answer of the policy, by their positions.

    The last messages of the assistant are the turns, unless a program has played several branches: then by their text,
    from the last one.
    """
    turns = row.turns or []
    answers = [index for index, message in enumerate(messages) if message.get("role") == "assistant"]
    if not any(segment.cause in _OTHER_BRANCHES for segment in row.segments or []):
        return dict(zip(answers[-len(turns) :] if turns else [], range(len(turns)), strict=False))
    found, last = {}, len(turns)
    for index in reversed(answers):
        turn = next((turn for turn in reversed(range(last)) if _is_answer(messages[index], turns[turn].text)), None)
        if turn is not None:
            found[index] = last = turn
    return found


def _is_answer(message: Message, text: str) -> bool:
    """Whether a message is what the policy wrote, as an API returned it: perhaps without its calls and reasoning."""
    content, text = format_content(message.get("content") or "").strip(), text.strip()
    if message.get("tool_calls") and text.startswith(content):
        return True
    return content == text or ("</think>" in text and text.endswith(content))


def build_tokens(row: SampleRow, *, full: bool) -> Table:
    """Return the tokens as the model saw and sampled them: [positions, mark, turn, text] for each span."""
    table, turns = _build_grid(4), row.turns or []
    for position, segment in enumerate(row.segments or []):
        if segment.cause:
            table.add_row("", "", "", Text(_describe_break(segment), style="yellow"))
        for span in segment.spans:
            turn = turns[span.turn] if span.turn >= 0 else None
            mark = _mark(turn) if turn else ""
            where = f"{position + 1}:{span.start}-{span.end - 1}" if span.end > span.start else ""
            text = "" if span.text is None else span.text.replace("\n", "\\n")
            what = f"turn {span.turn + 1}" if turn else "context"
            table.add_row(where, Text(mark, style=_STYLES[mark]), what, _text(text, full, _STYLES[mark] or _ASIDE))
    return table


def _build_grid(num_columns: int) -> Table:
    """Only the last column is folded."""
    table = Table.grid(padding=(0, 1))
    for _ in range(num_columns - 1):
        table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    return table


def _mark(part: TurnRow | SampleRow) -> str:
    return TRAINED if part.advantage else SAMPLED


def _describe_turn(turn: TurnRow, full: bool) -> list[Text]:
    """Return what followed an answer: its tool calls, and the simulated user's verdict."""
    lines = []
    for call in turn.tool_calls:
        arguments = "arguments that are not a JSON object" if call.arguments is None else call.arguments
        # A program calls its own tools, whose times are not known.
        where = f", tool {call.tool}, {seconds(call.seconds)}" if call.tool else ""
        lines.append(Text(shorten(f"calls {call.name}({arguments}){where}", full), _ASIDE))
        if call.error:
            lines.append(Text(shorten(f"failed: {call.error}", full), style="red"))
    facts = [] if turn.reward is None else [f"reward {number(turn.reward)}"]
    facts += [] if turn.advantage is None else [f"advantage {number(turn.advantage)}"]
    facts += [] if turn.user_seconds is None else [f"user {seconds(turn.user_seconds)}"]
    facts += [shorten(turn.user_info, full)] if turn.user_info else []
    return [*lines, *([Text(", ".join(facts), style=_ASIDE)] if facts else [])]


def _find_breaks(row: SampleRow) -> dict[int, list[str]]:
    """Return the segments after the first one by the turn with which they begin."""
    found: dict[int, list[str]] = {}
    for segment in (row.segments or [])[1:]:
        turns = [span.turn for span in segment.spans if span.turn >= 0]
        found.setdefault(min(turns, default=-1), []).append(_describe_break(segment))
    return found


def _describe_break(segment: SegmentRow) -> str:
    difference = f"; first difference: {shorten(segment.difference, False)}" if segment.difference else ""
    return f"a new segment: {segment.cause}{difference}"


def _text(text: str, full: bool, style: str = "") -> Text:
    return Text(shorten(text, full), style=style)
