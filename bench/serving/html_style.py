"""What the report's plots add to the style sheet of ``truedraft verify``'s report; light and dark."""

from __future__ import annotations

from bench.verify.html_style import style_sheet as base_style

# Told apart by people who see no red or no green, too; a test holds their contrast with the ground.
LIGHT = ("#1f6fb4", "#c25700", "#1a7a4c", "#8a4bb3", "#a8324a", "#0b7a84", "#7a6200", "#5a6470")
DARK = ("#6fb1f0", "#f39a4f", "#5fcf97", "#c79bea", "#f0869a", "#4fc7d1", "#d6bb4a", "#9aa6b3")

_RULES = """
body { max-width: 82rem }
table.figures { font-size: .8rem }
table.figures td, table.figures th { white-space: nowrap; padding: .22rem .38rem }
table.figures tr.cell th { padding-top: .9rem; border-bottom: 1px solid var(--line) }
table.figures tbody th { font-weight: 400 }
table.figures tr.cell th { font-weight: 600 }
table.figures thead th { vertical-align: bottom }
table.figures tr.group th { text-align: center; border-bottom: 0; color: var(--soft); font-weight: 400;
  border-left: 1px solid var(--line) }
table.figures td.first, table.figures th.first { border-left: 1px solid var(--line) }
td.bad { color: var(--failed); background: var(--failed-ground); font-weight: 600 }
td.fine { color: var(--passed); background: var(--passed-ground) }
.tiles { display: grid;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 17rem), 1fr)); gap: .6rem; margin: 1rem 0 }
.tile { background: var(--panel-ground); border: 1px solid var(--line); border-radius: .5rem; padding: .55rem .8rem }
.tile b { display: block; font-size: 1.3rem; line-height: 1.25; font-weight: 600; font-variant-numeric: tabular-nums }
.tile span { color: var(--soft); font-size: .85rem; display: block }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 25rem), 1fr)); gap: 1rem 1.4rem }
figure { margin: .4rem 0; min-width: 0 }
figcaption { font-size: .925rem; font-weight: 600 }
svg { width: 100%; height: auto; display: block; overflow: visible }
svg text { fill: var(--soft); font-size: 11px; text-anchor: middle; font-variant-numeric: tabular-nums }
svg text.tick, svg text.row { text-anchor: end }
svg text.row { fill: var(--page) }
svg text.end { text-anchor: start }
svg .grid { stroke: var(--line); stroke-width: 1 }
svg .line { fill: none; stroke: currentColor; stroke-width: 2 }
svg .whisker { stroke: currentColor; stroke-width: 1.5; opacity: .65 }
svg .dot, svg .area { fill: currentColor }
svg .reference { stroke: var(--soft); stroke-width: 1.25; stroke-dasharray: 4 3 }
svg .tail { stroke: var(--page); stroke-width: 1.25; opacity: .8 }
ul.keys { list-style: none; display: flex; flex-wrap: wrap; gap: .1rem .9rem; margin: .1rem 0 .3rem; padding: 0;
  font-size: .85rem }
.key { display: inline-block; width: .75em; height: .75em; border-radius: .15em; background: currentColor;
  margin-right: .4em }
@media (max-width: 40rem) { .tiles { grid-template-columns: 1fr 1fr } .tile b { font-size: 1.1rem } }
@media print { figure { break-inside: avoid } .plots { grid-template-columns: 1fr 1fr } }
"""


def style_sheet() -> str:
    """The whole style sheet."""
    light = "; ".join(f"--c{i}: {colour}" for i, colour in enumerate(LIGHT))
    dark = "; ".join(f"--c{i}: {colour}" for i, colour in enumerate(DARK))
    classes = "\n".join(f".c{i} {{ color: var(--c{i}) }}" for i in range(len(LIGHT)))
    return (
        f"{base_style()}\n:root {{ {light} }}\n"
        f"@media screen and (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n{classes}{_RULES}"
    )
