"""A picture of where the pauses go: one bar a row, a colour for each step. SVG: nothing is needed to make it."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

COLOURS = {
    "gate": "#7f7f7f", "unmap": "#bcbd22", "park": "#bcbd22", "lock": "#17becf", "checkpoint": "#d62728",
    "copy-wait": "#ff7f0e", "copy_in_pause": "#ff7f0e", "dump": "#8c564b", "restore": "#1f77b4",
    "unlock": "#9467bd", "map": "#2ca02c", "open": "#98df8a", "rest": "#dddddd",
}  # fmt: skip
WIDTH, LEFT, BAR, STEP = 1000, 330, 22, 40


def plot(bars: Sequence[tuple[str, dict[str, float], float | None]]) -> str:
    """Draws bars.

    Args:
        bars: for each its name, seconds by step, and the limit to mark or None.
    """
    longest = max(
        [sum(max(0.0, s) for s in steps.values()) for _, steps, _ in bars] + [m or 0 for *_, m in bars] + [0.1]
    )
    scale = (WIDTH - LEFT - 80) / longest
    names = [n for n in COLOURS if any(steps.get(n, 0) > 0.0005 for _, steps, _ in bars)]
    height = STEP * len(bars) + 70
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif" '
        'font-size="13">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
    ]
    for row, (name, steps, limit) in enumerate(bars):
        y, x = 12 + row * STEP, float(LEFT)
        out.append(f'<text x="{LEFT - 8}" y="{y + 16}" text-anchor="end">{escape(name)}</text>')
        for step, colour in COLOURS.items():
            wide = max(0.0, steps.get(step, 0.0)) * scale
            if wide > 0.2:
                out.append(
                    f'<rect x="{x:.1f}" y="{y}" width="{wide:.1f}" height="{BAR}" fill="{colour}">'
                    f"<title>{escape(step)} {steps[step] * 1e3:.0f} ms</title></rect>"
                )
                x += wide
        total = sum(max(0.0, seconds) for seconds in steps.values())
        out.append(f'<text x="{x + 6:.1f}" y="{y + 16}">{total:.2f} s</text>')
        if limit:
            at = LEFT + limit * scale
            out.append(f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{y - 5}" y2="{y + BAR + 5}" stroke="black"/>')
    x, y = 12, STEP * len(bars) + 30
    for name in names:
        out.append(f'<rect x="{x}" y="{y}" width="12" height="12" fill="{COLOURS[name]}"/>')
        out.append(f'<text x="{x + 16}" y="{y + 11}">{escape(name)}</text>')
        x += 26 + 8 * len(name)
    out.append(f'<text x="12" y="{y + 32}">The black line is the most that it must be.</text></svg>')
    return "\n".join(out) + "\n"
