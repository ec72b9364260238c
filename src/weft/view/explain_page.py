"""The costs of a run as one self-contained HTML page: memory over the step, roles, traffic, time, world check. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import Any

from weft.view.memory_chart import bars, memory_chart
from weft.view.quantity import count, short_time
from weft.view.quantity import memory as memory_text

Fields = Mapping[str, Any]
"""JSON of `weft explain --json`; docs/plan.md lists its fields."""

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 64em; margin: 2em auto; padding: 0 1em; color: #1f2328; }
h1 { font-size: 1.5em; margin-bottom: .2em; } h2 { font-size: 1.15em; margin: 1.8em 0 .4em; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th, td { text-align: left; padding: .25em .7em; border-bottom: 1px solid #e3e6ea; vertical-align: top; }
th { font-weight: 600; color: #57606a; } tr.most td { background: #fff8e1; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
pre { font: 12.5px/1.45 ui-monospace, monospace; background: #f6f8fa; padding: .8em; overflow-x: auto; border-radius: 6px; }
.badge { display: inline-block; padding: .15em .7em; margin: .2em .5em .2em 0; border-radius: 1em; font-size: 14px; }
.good { background: #dff3e4; color: #0a6b2d; } .bad { background: #fbe1e1; color: #a01515; }
.plain { background: #eef1f4; color: #424a53; }
.note { color: #57606a; font-size: 14px; } svg { max-width: 100%; height: auto; }
summary { cursor: pointer; color: #0b57d0; } details { margin: .6em 0; }
"""
NUMBER = "n"
KEPT = ("params", "gradients", "optimizer", "buffers")
MOST_CHARTS = 16
"""Roles besides the fullest one that get a chart."""


def explain_page(fields: Fields, *, title: str, layout: str) -> str:
    """The whole page; no scripts, nothing is fetched.

    Args:
        fields: of `weft explain --json`.
        layout: the text of the layout.
    """
    body = "\n".join(_body(fields, title, layout))
    name = escape(f"weft explain: {title}")
    head = f'<meta charset="utf-8"><title>{name}</title><style>{STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'


def _body(fields: Fields, title: str, layout: str) -> Iterator[str]:
    yield f"<h1>{escape(title)}</h1>"
    yield f"<p>{''.join(_badges(fields))}</p>"
    check = fields["world_check"]
    if check["problems"]:
        yield "<h2>Collectives that do not match</h2>"
        yield from (_problem(problem) for problem in check["problems"])
    yield from _memory(fields)
    if fields["worst_routing"]:
        yield from _routing(fields)
    yield from _traffic(_busiest(fields["roles"]))
    if "time" in fields:
        yield from _time(fields["time"])
    yield "<h2>Layout</h2>"
    yield f"<pre>{escape(layout)}</pre>"


def _badges(fields: Fields) -> Iterator[str]:
    peak = fullest(fields["roles"])["peak_bytes"]
    hardware = fields.get("hardware")
    if hardware is None:
        yield _badge("plain", f"peak {memory_text(peak)} a rank")
    elif hardware["left_bytes"] >= 0:
        left = memory_text(hardware["left_bytes"])
        yield _badge("good", f"fits {hardware['label']}: peak {memory_text(peak)}, {left} are left")
    else:
        missing = memory_text(-hardware["left_bytes"])
        text = f"does not fit {hardware['label']}: peak {memory_text(peak)}, {missing} too much"
        yield _badge("bad", text)
    check = fields["world_check"]
    ranks = f"{count(check['ranks'])} ranks"
    if check["holds"]:
        yield _badge("good", f"{ranks}: collectives match, no deadlock")
    else:
        yield _badge("bad", f"{ranks}: collectives do not match")
    if "time" in fields:
        time = fields["time"]
        step = f"step {short_time(time['step_s'])}, MFU {100 * time['mfu']:.0f}% (predicted)"
        yield _badge("plain", step)


def _badge(kind: str, text: str) -> str:
    return f'<span class="badge {kind}">{escape(text)}</span>'


def _problem(problem: Fields) -> str:
    if problem["kind"] == "deadlock":
        lines = [f"deadlock in {problem['region']}:", *problem["waits"]]
    else:
        where = f"over {problem['axis']}, call {problem['position']} in {problem['region']} differs"
        lines = [f"{where}:"]
        members = zip(problem["ranks"], problem["coordinates"], problem["calls"], strict=True)
        lines.extend(f"  rank {rank} ({place}): {call}" for rank, place, call in members)
    return f"<pre>{escape(chr(10).join(lines))}</pre>"


def fullest(roles: Sequence[Fields]) -> Fields:
    """The role with the largest peak."""
    return max(roles, key=lambda role: int(role["peak_bytes"]))


def _name(role: Fields) -> str:
    """`pp3`, from the first field of a role."""
    axis = next(iter(role))
    return f"{axis}{role[axis]}"


def _memory(fields: Fields) -> Iterator[str]:
    roles = fields["roles"]
    most = fullest(roles)
    limit = fields["hardware"]["memory_bytes"] if "hardware" in fields else None
    yield f"<h2>Memory of {_name(most)} over a step</h2>"
    yield memory_chart(most, limit_bytes=limit)
    yield f'<p class="note">{escape(_cause(most))}</p>'
    others = [role for role in roles if role is not most][:MOST_CHARTS]
    if others:
        charts = [
            f"<h3>{_name(role)}</h3>{memory_chart(role, limit_bytes=limit)}" for role in others
        ]
        yield f"<details><summary>the other ranks of the pipeline</summary>{''.join(charts)}</details>"
    yield "<h2>Memory by role</h2>"
    header = ("rank", "ranks", *KEPT, "in flight", "workspace", "peak", "at")
    rows = [_memory_cells(role) for role in roles]
    yield _table(header, rows, numbers=range(1, 9), marked=roles.index(most))


def _cause(role: Fields) -> str:
    text = f"The peak, {memory_text(role['peak_bytes'])}, is at {role['peak_at']}."
    parts = [f"{memory_text(size)} of {name}" for name, size in role["workspace_parts"].items()]
    known = [part for part in parts if not part.startswith("0 B")]
    return f"{text} It includes {', '.join(known)}." if known else text


def _memory_cells(role: Fields) -> tuple[str, ...]:
    sizes = [role[f"{kind}_bytes"] for kind in (*KEPT, "in_flight", "workspace", "peak")]
    return (_name(role), count(role["ranks"]), *map(memory_text, sizes), role["peak_at"])


def _routing(fields: Fields) -> Iterator[str]:
    yield "<h2>Routing of tokens to experts</h2>"
    rows = []
    for name, key in (
        ("expected: an even load", "roles"),
        ("worst: all on one rank", "worst_routing"),
    ):
        roles = fields[key]
        routed = max(map(_routed_bytes, roles))
        flops = max(role["flops"] for role in roles)
        peak = fullest(roles)["peak_bytes"]
        rows.append((name, memory_text(peak), memory_text(routed), f"{flops:.4g}"))
    header = ("routing", "peak", "sent to experts and back", "FLOPs of the rank")
    yield _table(header, rows, numbers=range(1, 4))


def _routed_bytes(role: Fields) -> int:
    sent = [each["sent_bytes"] for each in role["traffic"] if each["op"] == "all_to_all"]
    return sum(sent)


def _busiest(roles: Sequence[Fields]) -> Fields:
    return max(roles, key=lambda role: sum(each["sent_bytes"] for each in role["traffic"]))


def _traffic(role: Fields) -> Iterator[str]:
    if not role["traffic"]:
        return
    yield f"<h2>Traffic of {_name(role)} in a step</h2>"
    by_axis: dict[str, int] = {}
    rows = []
    for each in role["traffic"]:
        by_axis[each["axis"]] = by_axis.get(each["axis"], 0) + each["sent_bytes"]
        rows.append(
            (
                each["axis"],
                each["op"],
                count(each["operations"]),
                memory_text(each["sent_bytes"]),
                memory_text(each["payload_bytes"]),
                _overlap_text(each["overlap"]),
            )
        )
    yield bars({axis: size for axis, size in by_axis.items() if size}, text=memory_text)
    header = ("axis", "operation", "times", "sent", "payload", "hidden behind")
    yield _table(header, rows, numbers=range(2, 5))
    yield (
        '<p class="note">Exposed: waited for before another kernel starts. Hidden: kernels of the named phase run'
        " between the start and the wait.</p>"
    )


def _overlap_text(shares: Fields) -> str:
    if len(shares) == 1:
        return next(iter(shares))
    by_number = sorted(shares.items(), key=lambda item: -int(item[1]["operations"]))
    return ", ".join(f"{name} {count(share['operations'])}" for name, share in by_number)


def _time(time: Fields) -> Iterator[str]:
    step = time["step_s"]
    yield f"<h2>Predicted time of a step: {short_time(step)}</h2>"
    idle = time["bubble"] * time["pipeline_s"]
    waits = sum(time["exposed_s"].values())
    parts = {
        "kernels": time["pipeline_s"] - idle - waits,
        "waits for collectives": waits,
        "pipeline idle": idle,
        "reduce": time["reduce_s"],
        "update": time["update_s"],
    }
    yield bars({name: seconds for name, seconds in parts.items() if seconds > 0}, text=short_time)
    interval = f"{short_time(time['low_s'])} to {short_time(time['high_s'])}"
    yield (
        f'<p class="note">Expected range {interval}; {count(time["tokens_per_s"])} tokens/s;'
        f" MFU {100 * time['mfu']:.0f}%; waits are those of the rank that waits most; shares of the published"
        f" speeds: {escape(str(time['efficiency']['source']))}.</p>"
    )


def _table(
    header: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    numbers: Iterable[int],
    marked: int | None = None,
) -> str:
    """A table; columns of `numbers` are aligned to the right."""
    right = set(numbers)
    lines = [_row("th", header, right, "")]
    for index, row in enumerate(rows):
        lines.append(_row("td", row, right, ' class="most"' if index == marked else ""))
    return f"<table>{''.join(lines)}</table>"


def _row(tag: str, cells: Sequence[str], right: set[int], attributes: str) -> str:
    text = ""
    for column, cell in enumerate(cells):
        kind = ' class="n"' if column in right else ""
        text += f"<{tag}{kind}>{escape(cell)}</{tag}>"
    return f"<tr{attributes}>{text}</tr>"
