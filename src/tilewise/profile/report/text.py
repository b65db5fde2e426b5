"""Render the profile as text: a summary line, two tables, and a sentence with advice."""

from __future__ import annotations

from collections.abc import Sequence

from tilewise.profile.machine import MachineFigures, active_isa
from tilewise.profile.report.results import ProfileResults, ProfileRow
from tilewise.profile.units import bytes_, count, seconds, share

HEADINGS = ("time", "share", "calls", "FLOPs", "FLOP/s", "of roofline", "moved", "allocated", "backend")


def text_report(results: ProfileResults, rows: int = 15) -> str:
    """Format tables by layer and by operation with their share of the roofline, and the bottleneck."""
    sections = [_head(results), ceilings(results.machine, results.threads)]
    if results.by_layer:
        sections += [_table("layer", list(results.by_layer.values()), results, rows)]
        sections += [_table("operation", list(results.by_op.values()), results, rows)]
    sections.append(verdict(results))
    if results.failed:
        sections.append(f"{results.failed} operations raised an error; their work is not counted.")
    return "\n\n".join(sections)


def verdict(results: ProfileResults) -> str:
    """Format the bottleneck and the other causes, one line each."""
    if not results.findings:
        return "Nothing was recorded: no operation of tilewise ran inside the context."
    first, *others = results.findings
    return "\n".join([f"Bottleneck: {first.sentence}", *(f"Also: {finding.sentence}" for finding in others)])


def _head(results: ProfileResults) -> str:
    return (
        f"{seconds(results.seconds)} in total, {seconds(results.outside_seconds)} of it outside layers and operations; "
        f"{count(results.flops)}FLOP in products at {count(results.flops_per_second)}FLOP/s, "
        f"{bytes_(results.bytes_moved)} moved (recording overhead of {seconds(results.recording_seconds)} excluded)"
    )


def ceilings(machine: MachineFigures, threads: int) -> str:
    """Format the machine's peak rates in one line."""
    cache, memory = machine.bandwidth(0.0, threads), machine.memory_bandwidth(threads)
    plural = "thread" if threads == 1 else "threads"
    doubtful = f" (doubtful: {machine.doubts[0]})" if machine.doubts else ""
    return (
        f"Ceilings ({machine.cpu}, {active_isa()}, {threads} {plural}, {machine.method}): "
        f"{count(machine.peak(threads))}FLOP/s; {count(cache)}B/s in cache, {count(memory)}B/s in memory{doubtful}"
    )


def _table(first: str, rows: list[ProfileRow], results: ProfileResults, max_rows: int) -> str:
    lines = [[row.title, *row_cells(row, results.seconds)] for row in rows[:max_rows] if row.seconds > 0]
    if len(rows) > max_rows:
        remaining = sum(row.seconds for row in rows[max_rows:])
        lines.append(
            [f"({len(rows) - max_rows} more)", seconds(remaining), share(remaining / results.seconds), *[""] * 7]
        )
    return aligned([first, *HEADINGS], lines)


def row_cells(row: ProfileRow, total: float) -> list[str]:
    """Format the cells of a row, in the order of `HEADINGS`."""
    allocated = row.allocated + row.own_allocated
    return [
        seconds(row.seconds),
        share(row.seconds / total if total else 0.0),
        str(row.calls),
        count(row.flops).strip() if row.flops else "",
        count(row.flops_per_second).strip() if row.flops else "",
        roofline_text(row.roofline_share) if row.roofline_seconds else "",
        bytes_(row.bytes_moved) if row.bytes_moved else "",
        bytes_(allocated) if allocated else "",
        ", ".join(row.backends),
    ]


def roofline_text(fraction: float) -> str:
    """Format a share of the roofline; Winograd convolutions exceed it, because they multiply less than is counted."""
    return share(fraction) if fraction <= 1.0 else "> 100 %"


def aligned(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a table with padded columns: the first and the last aligned left, numbers aligned right."""
    widths = [max(len(row[i]) for row in [headings, *rows]) for i in range(len(headings))]
    last = len(headings) - 1

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.ljust(width) if i in (0, last) else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return "  ".join(padded).rstrip()

    return "\n".join([line(headings), line(["-" * width for width in widths]), *(line(row) for row in rows)])
