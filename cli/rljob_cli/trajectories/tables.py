"""How `rljob trajectories` shows results, and two runs side by side.

Invariant: a cut text has a mark and keeps both ends; answers are at the end.
"""

import json
import statistics
from collections.abc import Sequence
from typing import Any

from rich.console import Group
from rich.text import Text

from rljob_api.manifest.evaluation import SHORT_FORM
from rljob_api.run.trajectories import ResultRow, SampleRow
from rljob_cli.output import to_text
from rljob_cli.tables import Column, FittedTable, build_table, make_console
from rljob_cli.trajectories.comparison import Comparison, Pair

_MAX_TEXT_CHARACTERS = 400
_CURVE = Column("curve", is_text=True, least=16, keep_end=True)


def name_sample(row: SampleRow) -> str:
    """Return group and sample; of an episode with seats, also the seat, and which of its trajectories it is."""
    return f"{row.group}/{row.sample}" + (f"/{row.trajectory} {row.seat}" if row.seat else "")


def describe_reward(reward: ResultRow) -> Text:
    """Return a reward's score, components and latency, or why the result is invalid."""
    if reward.valid:
        lines = [number(reward.score)]
        lines += [f"{name} {number(value)}" for name, value in reward.components.items()]
    else:
        lines = [f"invalid: {reward.reason}", *([reward.message] if reward.message else [])]
    attempts = reward.attempts or 0
    latency = reward.latency_seconds if reward.latency_seconds is not None else reward.execute_seconds
    lines.append(f"{seconds(latency)}{f', {attempts} attempts' if attempts > 1 else ''}")
    return Text(", ".join(lines), style="" if reward.valid else "red")


def print_comparison(
    comparison: Comparison,
    runs: Sequence[str],
    lane: str,
    steps: Sequence[int | None],
    *,
    limit: int | None,
    full: bool,
) -> None:
    """Print the differences over all prompts, then the prompts that differ most."""
    console = make_console()
    for letter, run, step in zip("ab", runs, steps, strict=True):
        where = f"{lane}, all steps" if step is None else f"{lane}, step {step}"
        console.print(f"{letter}: {run} ({where})", soft_wrap=True, highlight=False, markup=False)
    console.print(_summarize(comparison))
    others = [(comparison.num_only_a, "a"), (comparison.num_only_b, "b")]
    unmatched = "; ".join(f"{count} only in {letter}" for count, letter in others if count)
    console.print(f"{len(comparison.pairs)} prompts in both{f'; {unmatched}' if unmatched else ''}", highlight=False)
    pairs = comparison.pairs[:limit]
    for pair in pairs:
        console.print(_show_pair(pair, comparison.curves, full))
    if len(pairs) < len(comparison.pairs):
        console.print(f"\nthe {len(pairs)} that differ most; more with --limit (0: all)", highlight=False)


def _summarize(comparison: Comparison) -> FittedTable:
    rows = []
    for curve in comparison.curves:
        # Both runs have the curve for one prompt at least, or it would not be listed.
        found = [(pair.a.means[curve], pair.b.means[curve]) for pair in comparison.pairs if pair.has(curve)]
        before, after = (statistics.fmean(values) for values in zip(*found, strict=True))
        better, worse = sum(b > a for a, b in found), sum(b < a for a, b in found)
        rows.append([curve, number(before), number(after), signed(after - before), better, worse, len(found)])
    header = (_CURVE, "a", "b", "difference", "better in b", "worse in b", Column("prompts"))
    return build_table(header, [list(map(str, row)) for row in rows], header_style="bold")


def _show_pair(pair: Pair, curves: Sequence[str], full: bool) -> Group:
    answer = "" if pair.ground_truth is None else f"\nanswer: {pair.ground_truth}"
    prompt = Text(shorten(format_prompt(pair.prompt), full) + answer + _name_part(pair))
    sides = (pair.a, pair.b)
    rows = [
        [curve, *(number(side.means.get(curve)) for side in sides), signed(pair.difference(curve))] for curve in curves
    ]
    invalid = (f", {side.num_invalid} invalid" if side.num_invalid else "" for side in sides)
    rows.append(["samples", *(f"{side.num_samples}{text}" for side, text in zip(sides, invalid, strict=True)), ""])
    return Group("", prompt, build_table((_CURVE, "a", "b", Column("difference")), rows, header_style="bold"))


def _name_part(pair: Pair) -> str:
    """Return the evaluation set, unless it is that of data.eval, and the seat."""
    is_named = pair.set not in (None, SHORT_FORM)
    parts = ([f"set {pair.set}"] if is_named else []) + ([f"seat {pair.seat}"] if pair.seat else [])
    return f"\n{', '.join(parts)}" if parts else ""


def format_prompt(prompt: str) -> str:
    """Return a conversation, which the log has as JSON, as one `role: text` per message; other prompts unchanged."""
    if not prompt.startswith("[{"):
        return prompt
    try:
        messages = json.loads(prompt)
    except ValueError:
        return prompt
    is_chat = all(isinstance(message, dict) and {"role", "content"} <= message.keys() for message in messages)
    return "\n".join(f"{m['role']}: {format_content(m['content'])}" for m in messages) if is_chat else prompt


def format_content(content: Any) -> str:
    """Return the text of a message, whose parts may be listed; parts without text stay JSON."""
    if not isinstance(content, list):
        return to_text(content)
    texts = (part.get("text") if isinstance(part, dict) else None for part in content)
    return " ".join(to_text(part if text is None else text) for text, part in zip(texts, content, strict=True))


def shorten(text: str, full: bool) -> str:
    if full or len(text) <= _MAX_TEXT_CHARACTERS:
        return text
    half = _MAX_TEXT_CHARACTERS // 2
    return f"{text[:half]} [... {len(text) - 2 * half} characters ...] {text[-half:]}"


def number(value: Any) -> str:
    return "-" if value is None else f"{value:.4g}"


def signed(value: float | None) -> str:
    return "-" if value is None else f"{value:+.4g}" if value else "0"


def seconds(value: float | None) -> str:
    if value is None:
        return "-"
    if value < 100:
        return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    return f"{minutes} min {rest} s" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"
