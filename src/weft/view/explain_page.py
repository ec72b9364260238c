"""The costs of a run as one self-contained HTML page: memory over the step, roles, traffic, time, world check. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from weft.view.memory_chart import bars, memory_chart
from weft.view.quantity import count, percent, short_time
from weft.view.quantity import memory as memory_text
from weft.view.static_page import scrolling, static_page

Fields = Mapping[str, Any]
"""JSON of `weft explain --json`; docs/plan.md lists its fields."""

KEPT = ("params", "gradients", "optimizer", "buffers")
MOST_CHARTS = 16
"""Roles besides the fullest one that get a chart."""


def explain_page(fields: Fields, *, title: str, layout: str) -> str:
    """The whole page; no scripts, nothing is fetched.

    Args:
        fields: of `weft explain --json`.
        layout: the text of the layout.
    """
    return static_page(_body(fields, title, layout), title=f"weft explain: {title}")


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
    if fields.get("mesh_order", {}).get("note"):
        yield f"<p>{escape(fields['mesh_order']['note'])}</p>"
    yield "<h2>Layout</h2>"
    yield f"<pre>{escape(layout)}</pre>"


def _badges(fields: Fields) -> Iterator[str]:
    yield _memory_badge(fields)
    check = fields["world_check"]
    ranks = f"{count(check['ranks'])} ranks"
    if check["holds"]:
        yield _badge("good", f"{ranks}: collectives match, no deadlock")
    else:
        yield _badge("bad", f"{ranks}: collectives do not match")
    if "time" in fields:
        time = fields["time"]
        step = short_time(time["step_s"])
        yield _badge("plain", f"step {step}, MFU {percent(time['mfu'])} (predicted)")


def _memory_badge(fields: Fields) -> str:
    most = fullest(fields["roles"])
    peak = memory_text(most["peak_bytes"])
    hardware = fields.get("hardware")
    if hardware is None:
        return _badge("plain", f"peak {peak} a rank")
    label = hardware["label"]
    left_bytes = hardware["left_bytes"]
    if left_bytes >= 0:
        left = memory_text(left_bytes)
        return _badge("good", f"fits {label}: peak {peak}, {left} are left")
    missing = memory_text(-left_bytes)
    return _badge("bad", f"does not fit {label}: peak {peak}, {missing} too much")


def _badge(kind: str, text: str) -> str:
    return f'<span class="badge {kind}">{escape(text)}</span>'


def _problem(problem: Fields) -> str:
    region = problem["region"]
    if problem["kind"] == "deadlock":
        lines = [f"deadlock in {region}:", *problem["waits"]]
    else:
        axis = problem["axis"]
        position = problem["position"]
        lines = [f"over {axis}, call {position} in {region} differs:"]
        members = zip(problem["ranks"], problem["coordinates"], problem["calls"], strict=True)
        for rank, place, call in members:
            lines.append(f"  rank {rank} ({place}): {call}")
    text = "\n".join(lines)
    return f"<pre>{escape(text)}</pre>"


def fullest(roles: Sequence[Fields]) -> Fields:
    """The role with the largest peak."""

    def peak(role: Fields) -> int:
        return int(role["peak_bytes"])

    return max(roles, key=peak)


def _name(role: Fields) -> str:
    """`pp3`, from the first field of a role."""
    axis = next(iter(role))
    return f"{axis}{role[axis]}"


def _memory(fields: Fields) -> Iterator[str]:
    roles = fields["roles"]
    most = fullest(roles)
    limit = None
    if "hardware" in fields:
        limit = fields["hardware"]["memory_bytes"]
    yield f"<h2>Memory of {_name(most)} over a step</h2>"
    yield scrolling(memory_chart(most, limit_bytes=limit))
    yield f'<p class="note">{escape(_cause(most))}</p>'
    others = [role for role in roles if role is not most]
    if others:
        charts = ""
        for role in others[:MOST_CHARTS]:
            charts += f"<h3>{_name(role)}</h3>"
            charts += scrolling(memory_chart(role, limit_bytes=limit))
        summary = "<summary>the other ranks of the pipeline</summary>"
        yield f"<details>{summary}{charts}</details>"
    yield "<h2>Memory by role</h2>"
    yield _table(
        ("rank", "ranks", *KEPT, "in flight", "workspace", "peak", "at"),
        [_memory_cells(role) for role in roles],
        numbers=range(1, 9),
        marked=roles.index(most),
    )


def _cause(role: Fields) -> str:
    """When the peak is, and what of the workspace it includes."""
    peak = memory_text(role["peak_bytes"])
    text = f"The peak, {peak}, is at {role['peak_at']}."
    parts = []
    for name, num_bytes in role["workspace_parts"].items():
        size = memory_text(num_bytes)
        if size != "0 B":
            parts.append(f"{size} of {name}")
    if not parts:
        return text
    return f"{text} It includes {', '.join(parts)}."


def _memory_cells(role: Fields) -> list[str]:
    cells = [_name(role), count(role["ranks"])]
    for kind in (*KEPT, "in_flight", "workspace", "peak"):
        num_bytes = role[f"{kind}_bytes"]
        cells.append(memory_text(num_bytes))
    cells.append(role["peak_at"])
    return cells


def _routing(fields: Fields) -> Iterator[str]:
    yield "<h2>Routing of tokens to experts</h2>"
    yield _table(
        ("routing", "peak", "sent to experts and back", "FLOPs of the rank"),
        [
            _routing_cells("expected: an even load", fields["roles"]),
            _routing_cells("worst: all on one rank", fields["worst_routing"]),
        ],
        numbers=range(1, 4),
    )


def _routing_cells(name: str, roles: Sequence[Fields]) -> list[str]:
    most = fullest(roles)
    routed_bytes = max(_routed_bytes(role) for role in roles)
    flops = max(role["flops"] for role in roles)
    return [name, memory_text(most["peak_bytes"]), memory_text(routed_bytes), f"{flops:.4g}"]


def _routed_bytes(role: Fields) -> int:
    total = 0
    for each in role["traffic"]:
        if each["op"] == "all_to_all":
            total += each["sent_bytes"]
    return total


def _busiest(roles: Sequence[Fields]) -> Fields:
    """The role that sends most."""

    def sent_bytes(role: Fields) -> int:
        return sum(each["sent_bytes"] for each in role["traffic"])

    return max(roles, key=sent_bytes)


def _traffic(role: Fields) -> Iterator[str]:
    if not role["traffic"]:
        return
    yield f"<h2>Traffic of {_name(role)} in a step</h2>"
    by_axis: dict[str, int] = {}
    for each in role["traffic"]:
        axis = each["axis"]
        by_axis[axis] = by_axis.get(axis, 0) + each["sent_bytes"]
    yield scrolling(bars(_above_zero(by_axis), text=memory_text))
    yield _table(
        ("axis", "operation", "times", "sent", "payload", "hidden behind"),
        [_traffic_cells(each) for each in role["traffic"]],
        numbers=range(2, 5),
    )
    yield (
        '<p class="note">Exposed: waited for before another kernel starts. Hidden: kernels of the named phase run'
        " between the start and the wait.</p>"
    )


def _traffic_cells(each: Fields) -> list[str]:
    return [
        each["axis"],
        each["op"],
        count(each["operations"]),
        memory_text(each["sent_bytes"]),
        memory_text(each["payload_bytes"]),
        _overlap_text(each["overlap"]),
    ]


def _above_zero(sizes: Mapping[str, float]) -> dict[str, float]:
    return {name: size for name, size in sizes.items() if size > 0}


def _overlap_text(shares: Fields) -> str:
    """The phase that hides the operations, or all of them with their number, most first."""
    if len(shares) == 1:
        return next(iter(shares))

    def num_operations(name: str) -> int:
        return int(shares[name]["operations"])

    names = sorted(shares, key=num_operations, reverse=True)
    texts = []
    for name in names:
        times = count(num_operations(name))
        texts.append(f"{name} {times}")
    return ", ".join(texts)


def _time(time: Fields) -> Iterator[str]:
    step = short_time(time["step_s"])
    yield f"<h2>Predicted time of a step: {step}</h2>"
    idle_s = time["bubble"] * time["pipeline_s"]
    waits_s = sum(time["exposed_s"].values())
    parts = {
        "kernels": time["pipeline_s"] - idle_s - waits_s,
        "waits for collectives": waits_s,
        "pipeline idle": idle_s,
        "reduce": time["reduce_s"],
        "update": time["update_s"],
    }
    yield scrolling(bars(_above_zero(parts), text=short_time))
    low = short_time(time["low_s"])
    high = short_time(time["high_s"])
    tokens_per_s = count(time["tokens_per_s"])
    source = escape(str(time["efficiency"]["source"]))
    yield (
        f'<p class="note">Expected range {low} to {high}; {tokens_per_s} tokens/s over all devices;'
        f" MFU {percent(time['mfu'])}; waits are those of the rank that waits most; shares of the published"
        f" speeds: {source}.</p>"
    )


def _table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    numbers: Sequence[int],
    marked: int | None = None,
) -> str:
    """A table; columns of `numbers` are aligned to the right, the row `marked` stands out."""
    lines = _row("th", header, numbers)
    for index, row in enumerate(rows):
        attributes = ' class="most"' if index == marked else ""
        lines += _row("td", row, numbers, attributes)
    return scrolling(f"<table>{lines}</table>")


def _row(tag: str, cells: Sequence[str], numbers: Sequence[int], attributes: str = "") -> str:
    text = ""
    for column, cell in enumerate(cells):
        kind = ' class="n"' if column in numbers else ""
        text += f"<{tag}{kind}>{escape(cell)}</{tag}>"
    return f"<tr{attributes}>{text}</tr>"
