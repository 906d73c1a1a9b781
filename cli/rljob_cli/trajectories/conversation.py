"""Shows a sample of the trajectory log as a conversation: messages, tool calls, rewards of turns, what was trained.

Invariant: a mark follows from the log alone. The policy sampled the tokens of a span with a turn, and the update used
them if the turn has an advantage.
"""

import json

from rich.console import Group
from rich.table import Table
from rich.text import Text

from rljob_cli.trajectories.log import Row
from rljob_cli.trajectories.tables import describe_reward, format_content, number, seconds, shorten

TRAINED, SAMPLED = ">>", ">"
LEGEND = f"{TRAINED} sampled and trained, {SAMPLED} sampled and not trained (evaluation, or no advantage); else context"
_STYLES = {TRAINED: "green", SAMPLED: "cyan", "": ""}
_ASIDE = "dim"


def is_conversation(row: Row) -> bool:
    return bool(row["messages"])


def build_conversation(row: Row, *, full: bool, messages: bool = True, tokens: bool = False) -> Group:
    """Return one sample: its head, its rewards, its messages, and with `tokens` the text of each span of tokens."""
    body = [build(row, full=full) for build, has in ((build_messages, messages), (build_tokens, tokens)) if has]
    return Group(_build_head(row), *_build_rewards(row), *body, Text())


def _build_head(row: Row) -> Text:
    parts = [f"step {row['step']} {row['lane']}, sample {row['group']}/{row['sample']}"]
    parts.append(f"{len(row['turns'])} turn{'s' if len(row['turns']) != 1 else ''}, ended by {row['end']}")
    parts.append(f"score {number(row['score'])}")
    if row["advantage"] is not None:
        parts.append(f"advantage {number(row['advantage'])}")
    if row["ground_truth"] is not None:
        parts.append(f"answer: {row['ground_truth']}")
    parts.append(f"{row['num_sampled_tokens']} of {row['num_tokens']} tokens sampled")
    if row["weights"]:
        parts.append(f"weights {row['weights']}")
    return Text(" | ".join(parts), style="bold")


def _build_rewards(row: Row) -> list[Text]:
    lines = [
        Text.assemble(f"  {reward['name']}: ", describe_reward(reward, separator=", "), no_wrap=True)
        for reward in row["rewards"]
    ]
    if row["failure"]:
        lines.append(Text(f"  invalid: {row['failure']}", style="red"))
    if row["state"] not in (None, "{}"):
        lines.append(Text(f"  state of the user: {row['state']}", style=_ASIDE))
    return lines


def build_messages(row: Row, *, full: bool) -> Table:
    """Return the conversation: [mark, role, text] for each message; below an answer what its turn brought."""
    table = _build_grid(3)
    messages = json.loads(row["messages"])
    answers = [index for index, message in enumerate(messages) if message.get("role") == "assistant"]
    turn_of = dict(zip(answers[-len(row["turns"]) :] if row["turns"] else [], range(len(row["turns"])), strict=False))
    breaks = _find_breaks(row)
    for index, message in enumerate(messages):
        turn = turn_of.get(index)
        if turn is None:
            role, name = str(message.get("role")), message.get("name")
            table.add_row("", f"{role} {name}" if name else role, _text(format_content(message.get("content")), full))
            continue
        for cause in breaks.get(turn, ()):
            table.add_row("", "", Text(cause, style="yellow"))
        found = row["turns"][turn]
        mark = _mark(found)
        text = _text(found["text"] + (" [truncated]" if found["truncated"] else ""), full, _STYLES[mark])
        table.add_row(Text(mark, style=_STYLES[mark]), "assistant", text)
        for line in _describe_turn(found, full):
            table.add_row("", "", line)
    return table


def build_tokens(row: Row, *, full: bool) -> Table:
    """Return the tokens as the model saw and sampled them: [positions, mark, turn, text] for each span."""
    table = _build_grid(4)
    for position, segment in enumerate(row["segments"]):
        if segment["cause"]:
            table.add_row("", "", "", Text(_describe_break(segment), style="yellow"))
        for span in segment["spans"]:
            turn = row["turns"][span["turn"]] if span["turn"] >= 0 else None
            mark = _mark(turn) if turn else ""
            where = f"{position + 1}:{span['start']}-{span['end'] - 1}" if span["end"] > span["start"] else ""
            text = "" if span["text"] is None else span["text"].replace("\n", "\\n")
            what = f"turn {span['turn'] + 1}" if turn else "context"
            table.add_row(where, Text(mark, style=_STYLES[mark]), what, _text(text, full, _STYLES[mark] or _ASIDE))
    return table


def _build_grid(num_columns: int) -> Table:
    """Only the last column is folded."""
    table = Table.grid(padding=(0, 1))
    for _ in range(num_columns - 1):
        table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    return table


def _mark(turn: Row) -> str:
    return SAMPLED if turn["advantage"] is None else TRAINED


def _describe_turn(turn: Row, full: bool) -> list[Text]:
    """Return what followed an answer: its tool calls, and the simulated user's verdict."""
    lines = []
    for call in turn["tool_calls"]:
        arguments = "arguments that are not a JSON object" if call["arguments"] is None else call["arguments"]
        where = f", tool {call['tool']}" if call["tool"] else ""
        lines.append(
            Text(shorten(f"calls {call['name']}({arguments}){where}, {seconds(call['seconds'])}", full), _ASIDE)
        )
        if call["error"]:
            lines.append(Text(shorten(f"failed: {call['error']}", full), style="red"))
    facts = [] if turn["reward"] is None else [f"reward {number(turn['reward'])}"]
    facts += [] if turn["advantage"] is None else [f"advantage {number(turn['advantage'])}"]
    facts += [] if turn["user_seconds"] is None else [f"user {seconds(turn['user_seconds'])}"]
    facts += [shorten(turn["user_info"], full)] if turn["user_info"] else []
    return [*lines, *([Text(", ".join(facts), style=_ASIDE)] if facts else [])]


def _find_breaks(row: Row) -> dict[int, list[str]]:
    """Return the segments after the first one by the turn with which they begin."""
    found: dict[int, list[str]] = {}
    for segment in row["segments"][1:]:
        turns = [span["turn"] for span in segment["spans"] if span["turn"] >= 0]
        found.setdefault(min(turns, default=-1), []).append(_describe_break(segment))
    return found


def _describe_break(segment: Row) -> str:
    difference = f"; first difference: {shorten(segment['difference'], False)}" if segment["difference"] else ""
    return f"a new segment: {segment['cause']}{difference}"


def _text(text: str, full: bool, style: str = "") -> Text:
    return Text(shorten(text, full), style=style)
