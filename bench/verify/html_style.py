"""The style sheet of the report: no external resource, light and dark, phone and paper."""

from __future__ import annotations

# (text, ground) of each thing that is told by colour, for both schemes; a test holds their contrast.
LIGHT = {
    "page": ("#1b2027", "#ffffff"),
    "soft": ("#525b66", "#ffffff"),
    "panel": ("#1b2027", "#f4f6f8"),
    "link": ("#0b57b0", "#ffffff"),
    "passed": ("#0c4a20", "#d3f2dc"),
    "failed": ("#7d0d0d", "#ffd9d6"),
    "error": ("#5d3900", "#ffe6b8"),
    "notrun": ("#3f4853", "#e4e9ee"),
    "mark": ("#7a3d00", "#ffffff"),
}
DARK = {
    "page": ("#e7ecf2", "#11161c"),
    "soft": ("#a3aebb", "#11161c"),
    "panel": ("#e7ecf2", "#1a2129"),
    "link": ("#86b9ff", "#11161c"),
    "passed": ("#a6efbb", "#123a20"),
    "failed": ("#ffc2bd", "#581616"),
    "error": ("#ffd991", "#4a3405"),
    "notrun": ("#c3ccd6", "#2a333d"),
    "mark": ("#ffb870", "#11161c"),
}
_LINES = {"light": "#c9d1d9", "dark": "#3a4551"}

_RULES = """
* { box-sizing: border-box }
html { -webkit-text-size-adjust: 100% }
body { margin: 0 auto; max-width: 68rem; padding: 1.25rem 1rem 3rem; background: var(--page-ground); color: var(--page);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif }
h1 { font-size: 1rem; font-weight: 600; margin: 0 0 .75rem; color: var(--soft) }
h2 { font-size: 1.25rem; margin: 2.25rem 0 .5rem; padding-top: .75rem; border-top: 1px solid var(--line) }
h3 { font-size: 1.05rem; margin: 0 0 .4rem }
h4 { font-size: .95rem; margin: 1.1rem 0 .3rem }
p { margin: .4rem 0; max-width: 46rem; overflow-wrap: anywhere }
a { color: var(--link) }
.soft, caption, .note { color: var(--soft) }
.note { font-size: .875rem }
code, pre, .token { font-family: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace }
code { font-size: .875em; overflow-wrap: anywhere }
pre { margin: .4rem 0; padding: .65rem .8rem; background: var(--panel-ground); color: var(--panel);
  border-radius: .4rem; border: 1px solid var(--line);
  white-space: pre-wrap; overflow-wrap: anywhere; user-select: all; font-size: .85rem;
  line-height: 1.45 }
.verdict { border-radius: .6rem; padding: .85rem 1.1rem; margin: 0 0 1rem; font-size: 1.05rem; max-width: none }
.verdict strong { font-size: 1.5rem; line-height: 1.25; margin-right: .5rem; white-space: nowrap }
.verdict a { color: inherit }
.passed { color: var(--passed); background: var(--passed-ground) }
.failed { color: var(--failed); background: var(--failed-ground) }
.error { color: var(--error); background: var(--error-ground) }
.notrun { color: var(--notrun); background: var(--notrun-ground) }
dl.facts { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; margin: .75rem 0;
  font-size: .925rem }
dl.facts dt { color: var(--soft) }
dl.facts dd { margin: 0; overflow-wrap: anywhere }
ul.factors { list-style: none; padding: 0; margin: .4rem 0; display: flex; flex-wrap: wrap; gap: .3rem .35rem;
  font-size: .85rem }
ul.factors li { border: 1px solid var(--line); border-radius: 1rem; padding: .05rem .6rem }
ul.factors b { font-weight: 600 }
.scroll { overflow-x: auto; margin: .5rem 0 }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums }
caption { text-align: left; padding: 0 0 .35rem; caption-side: top; font-size: .875rem }
caption span { display: inline-block; max-width: min(46rem, calc(100vw - 4rem)); position: sticky; left: 0 }
th, td { padding: .22rem .55rem; text-align: left; vertical-align: baseline; border-bottom: 1px solid var(--line) }
th { font-weight: 600 }
thead th { white-space: nowrap }
thead th.wrap { white-space: normal; max-width: 4.5rem }
td.number, th.number { text-align: right; white-space: nowrap }
td.ids { min-width: 7rem; overflow-wrap: anywhere }
table.matrix { line-height: 1.2; width: 100%; border-collapse: separate; border-spacing: 2px }
table.matrix th, table.matrix td { border: 0; padding: .16rem .45rem }
table.matrix td { text-align: right; border-radius: .25rem; white-space: nowrap; min-width: 3.6rem }
table.matrix td b { font-weight: 600; margin-right: .35rem }
table.matrix td small { font-size: .75rem; display: inline-block; min-width: 2.9em }
table.matrix td a { color: inherit; display: block }
table.matrix td.empty { color: var(--soft); text-align: center }
table.matrix tbody th { font-weight: 400; white-space: nowrap; position: sticky; left: 0;
  background: var(--page-ground) }
table.matrix thead th { text-align: right }
table.matrix thead th[rowspan]:first-child { text-align: left }
table.matrix thead th[colspan] { text-align: center }
table.matrix tr.group th { font-weight: 600; padding-top: .7rem }
.legend { display: flex; flex-wrap: wrap; gap: .3rem .6rem; font-size: .85rem; padding: 0; margin: .4rem 0;
  list-style: none }
.legend li { border-radius: .25rem; padding: .05rem .5rem }
.bar { display: block; height: .55rem; background: var(--notrun-ground); border-radius: .3rem; overflow: hidden;
  min-width: 6rem; width: 12rem; max-width: 100%; border: 1px solid var(--line) }
.bar span { display: block; height: 100%; background: var(--passed) }
article { border: 1px solid var(--line); border-left: .35rem solid var(--failed); border-radius: .4rem;
  padding: .8rem 1rem; margin: .9rem 0 }
article.error-case { border-left-color: var(--error) }
article .reason { font-weight: 600 }
table.tokens td.token { min-width: 4rem; overflow-wrap: anywhere; word-break: break-word }
table.tokens td.id { text-align: right; color: var(--soft) }
table.tokens tr.first td, table.tokens tr.first th { background: var(--failed-ground); color: var(--failed);
  font-weight: 600 }
table.tokens tr.first .mark { color: inherit }
table.tokens td.plainside { border-left: 1px solid var(--line) }
table.tokens td.specside { border-left: 1px solid var(--line) }
.mark { color: var(--mark); font-style: normal }
tr.here td, tr.here th { font-weight: 600 }
details { margin: .6rem 0 }
summary { cursor: pointer; color: var(--link) }
footer { margin-top: 2.5rem; font-size: .85rem; color: var(--soft) }
@media (max-width: 40rem) {
  body { padding: .8rem .7rem 2rem; font-size: 15px }
  .verdict { padding: .7rem .8rem }
  .verdict strong { display: block }
  table { font-size: .8rem }
  th, td { padding: .2rem .35rem }
  table.matrix td { min-width: 2.3rem; padding: .16rem .2rem }
  table.matrix th { padding: .16rem .2rem }
  table.matrix td small { display: none }
  table.matrix td b { margin-right: .15rem }
  article { padding: .6rem .6rem }
  dl.facts { grid-template-columns: 1fr; gap: 0 }
  dl.facts dd { margin-bottom: .35rem }
}
@media print {
  body { max-width: none; padding: 0; font-size: 10pt; print-color-adjust: exact; -webkit-print-color-adjust: exact }
  .scroll { overflow: visible }
  caption span { max-width: none }
  tr, pre, .verdict { break-inside: avoid }
  h2, h3, h4 { break-after: avoid }
  details::details-content { content-visibility: visible; display: block }
  table.matrix tbody th { position: static }
}
"""


def style_sheet() -> str:
    """The whole style sheet."""
    light, dark = _variables(LIGHT, _LINES["light"]), _variables(DARK, _LINES["dark"])
    return (
        f":root {{ color-scheme: light dark; {light} }}\n"
        f"@media screen and (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}{_RULES}"
    )


def _variables(colours: dict[str, tuple[str, str]], line: str) -> str:
    pairs = [f"--{name}: {text}; --{name}-ground: {ground}" for name, (text, ground) in colours.items()]
    return "; ".join([*pairs, f"--line: {line}"])
