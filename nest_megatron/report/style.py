"""The look of the HTML report: light and dark, on screen and on paper."""

from __future__ import annotations

CSS = """
:root { color-scheme: light dark; --ink: #1b1f26; --soft: #5a626e; --paper: #ffffff;
  --panel: #f5f6f8; --line: #d8dce2; --idle: #e9ebef; --good: #1f7a4d; --bad: #b3261e;
  --mark: #fff3c9; --bar: #2f6fb7; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8ec; --soft: #a0a8b4; --paper: #14171c;
  --panel: #1d2128; --line: #363c46; --idle: #2a2f38; --good: #5cc793; --bad: #ff8a80;
  --mark: #4a3f14; --bar: #5b95d6; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem; max-width: 1180px; background: var(--paper);
  color: var(--ink); font: 15px/1.5 system-ui, -apple-system, "Segoe UI", "DejaVu Sans",
  sans-serif; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2.4rem 0 .6rem; padding-bottom: .25rem;
  border-bottom: 1px solid var(--line); }
p { margin: .4rem 0; max-width: 75ch; }
.soft, caption, figcaption { color: var(--soft); }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr));
  gap: .75rem; margin: 1.1rem 0 .8rem; padding: 0; }
.figures div { background: var(--panel); border: 1px solid var(--line); border-radius: 8px;
  padding: .6rem .8rem; }
.figures dt { color: var(--soft); font-size: .8rem; }
.figures dd { margin: 0; font-size: 1.3rem; font-weight: 600; }
.verdict { border-left: 4px solid var(--good); background: var(--panel); padding: .5rem .8rem;
  max-width: none; }
.verdict.bad { border-color: var(--bad); }
.scroll { overflow-x: auto; margin: .5rem 0 1rem; }
table { border-collapse: collapse; width: 100%; font-size: .85rem; }
caption { text-align: left; padding: .2rem 0 .4rem; }
th, td { text-align: left; padding: .2rem .5rem; border-bottom: 1px solid var(--line);
  vertical-align: middle; }
thead th { color: var(--soft); font-weight: 600; vertical-align: bottom; }
tbody th { font-weight: 500; white-space: nowrap; }
.num { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
code, pre, .code { font-family: ui-monospace, SFMono-Regular, "DejaVu Sans Mono", monospace;
  font-size: .82rem; }
code { overflow-wrap: anywhere; }
pre { background: var(--panel); border: 1px solid var(--line); border-radius: 8px;
  padding: .8rem; overflow-x: auto; white-space: pre-wrap; overflow-wrap: anywhere; }
figure { margin: .5rem 0 1rem; }
svg { display: block; width: 100%; height: auto; }
svg text { fill: var(--ink); font: 11px system-ui, "DejaVu Sans", sans-serif; }
svg .soft { fill: var(--soft); }
svg .idle { fill: var(--idle); }
svg .rule { stroke: var(--line); stroke-width: 1; }
svg .limit { stroke: var(--bad); stroke-width: 1.5; stroke-dasharray: 5 3; }
.picture { overflow-x: auto; }
.picture svg { min-width: 720px; }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1.1rem; list-style: none; margin: .3rem 0;
  padding: 0; font-size: .82rem; color: var(--soft); }
.swatch { display: inline-block; width: .8em; height: .8em; border-radius: 2px; margin-right: .4em;
  vertical-align: -.05em; border: 1px solid rgb(128 128 128 / .35); }
.narrow table { width: auto; min-width: 26rem; }
.metered { display: flex; align-items: center; justify-content: flex-end; gap: .6em; }
.meter { flex: 1 1 auto; min-width: 4em; max-width: 7em; height: .7em; background: var(--idle);
  border-radius: 2px; margin-right: auto; overflow: hidden; }
.meter i { display: block; height: 100%; background: var(--bar); }
.meter.bad i { background: var(--bad); }
.chunks { display: inline-flex; flex-wrap: wrap; gap: 3px; }
.chunk { display: inline-flex; border: 1px solid var(--line); border-radius: 4px;
  overflow: hidden; }
.chunk span { padding: 0 .38em; font-size: .75rem; line-height: 1.5; color: #14171c; }
.u-embedding { background: #f2d08a; } .u-dense { background: #b9d4f1; }
.u-moe { background: #cdbdeb; }
.u-mtp { background: #a9dccb; } .u-head { background: #f1b3bd; }
.differs { background: var(--mark); font-weight: 600; }
footer { margin-top: 2.5rem; color: var(--soft); font-size: .8rem; }
@media print { :root { --ink: #000; --soft: #444; --paper: #fff; --panel: #fff; --line: #bbb;
  --idle: #e6e6e6; --mark: #fff3c9; --bar: #2f6fb7; }
  body { max-width: none; padding: 0; font-size: 10pt;
    -webkit-print-color-adjust: exact; print-color-adjust: exact; }
  h2, thead, caption { break-after: avoid; } tr, figure, .figures div { break-inside: avoid; }
  .scroll, .picture { overflow: visible; } .picture svg { min-width: 0; } }
"""
