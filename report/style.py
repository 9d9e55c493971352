"""The style sheet of the report: one column, figures first, readable on a phone, on paper and in the dark."""

from __future__ import annotations

from report.theme import FORGOTTEN, INK, LEARNED, MUTED, RULE

CSS = f"""
:root {{ --ink:{INK}; --muted:{MUTED}; --rule:{RULE}; --paper:#fff; --soft:#f6f7f9; --good:#1d7f58; --bad:#b93247;
 --warn:#8a5a00; --warn-soft:#fff6e2; --bar-good:{LEARNED}; --bar-bad:{FORGOTTEN}; }}
@media (prefers-color-scheme:dark) {{ :root {{ --ink:#e6e9ee; --muted:#98a2b0; --rule:#333b46; --paper:#14181d;
 --soft:#1c2229; --good:#58c796; --bad:#ee7c8c; --warn:#e6b65c; --warn-soft:#2b2416; }} }}
* {{ box-sizing:border-box }}
body {{ margin:0; background:var(--paper); color:var(--ink); font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,
 "Helvetica Neue","Noto Sans",Arial,sans-serif; font-variant-numeric:tabular-nums; }}
main {{ max-width:1040px; margin:0 auto; padding:48px 28px 80px }}
header .kind {{ color:var(--muted); font-size:14px; letter-spacing:.02em }}
h1 {{ font-size:34px; line-height:1.15; letter-spacing:-.02em; margin:4px 0 6px; overflow-wrap:anywhere }}
.headline {{ font-size:19px; margin:0 }}
.headline b {{ font-weight:650 }}
.learned {{ color:var(--good) }} .forgotten,.broken {{ color:var(--bad) }} .plain {{ color:var(--muted) }}
.cards {{ display:grid; grid-template-columns:repeat(auto-fit,minmax(210px,1fr)); gap:14px; margin:26px 0 14px }}
.card {{ background:var(--soft); border-radius:10px; padding:16px 18px; min-width:0 }}
.card .name {{ font-weight:600; overflow-wrap:anywhere }}
.card .role {{ color:var(--muted); font-weight:400 }}
.card .big {{ font-size:40px; line-height:1.15; font-weight:680; letter-spacing:-.03em }}
.card .big small {{ font-size:15px; font-weight:500; letter-spacing:0 }}
.card .more {{ color:var(--muted); font-size:14px }}
dl.facts {{ display:grid; grid-template-columns:repeat(auto-fit,minmax(132px,1fr)); gap:14px 20px; margin:20px 0 0;
 padding:14px 0; border-top:1px solid var(--rule); border-bottom:1px solid var(--rule) }}
dl.facts dt {{ color:var(--muted); font-size:13px }} dl.facts dd {{ margin:0; font-size:18px; font-weight:600 }}
dl.facts dd small {{ display:block; color:var(--muted); font-size:13px; font-weight:400 }}
section {{ margin-top:52px }}
h2 {{ font-size:21px; letter-spacing:-.01em; margin:0 0 4px }}
h3 {{ font-size:15px; margin:22px 0 6px }}
.about {{ color:var(--muted); margin:0 0 14px; max-width:46em }}
.warnings {{ background:var(--warn-soft); border-radius:10px; padding:14px 18px 14px 36px; margin:26px 0 0 }}
.warnings li::marker {{ color:var(--warn) }}
.wide {{ overflow-x:auto }}
table {{ border-collapse:collapse; width:100%; font-size:15px }}
th,td {{ text-align:right; padding:7px 0 7px 18px; border-bottom:1px solid var(--rule); font-weight:400;
 vertical-align:top; white-space:nowrap }}
thead th {{ color:var(--muted); font-size:13px; vertical-align:bottom }}
th:first-child {{ text-align:left; padding-left:0; white-space:normal; overflow-wrap:anywhere; min-width:7em }}
tbody th {{ font-weight:600 }}
table.text td,table.text thead th {{ text-align:left; white-space:normal; overflow-wrap:anywhere }}
figure + .wide {{ margin-top:14px }}
table.text td {{ min-width:6em }} table.text th:first-child {{ min-width:10em }} td.strong {{ font-weight:650 }}
.split td:first-of-type {{ width:138px }}
.bar {{ position:relative; height:12px; width:120px; margin-top:6px; background:linear-gradient(var(--muted),
 var(--muted)) center/1px 100% no-repeat }}
.bar i {{ position:absolute; top:0; height:100%; border-radius:2px }}
.bar .l {{ right:50%; background:var(--bar-good) }} .bar .f {{ left:50%; background:var(--bar-bad) }}
figure {{ margin:14px 0 0 }} figcaption {{ color:var(--muted); font-size:14px; margin-top:4px }}
figure svg {{ display:block; width:100%; min-width:520px; height:auto; overflow:visible }}
.pair figure {{ max-width:540px }} .pair figure svg {{ min-width:0 }}
figure svg text {{ font-family:inherit !important }}
.pair {{ display:grid; grid-template-columns:repeat(auto-fill,minmax(min(400px,100%),1fr)); gap:8px 36px }}
.state {{ display:inline-block; padding:0 9px; border-radius:9px; font-size:13px; line-height:20px; font-weight:600;
 color:#fff; background:#78828f; white-space:nowrap }}
.state.pass {{ background:#22855c }} .state.fail {{ background:#c23a4f }}
.state.na {{ background:none; color:var(--muted); box-shadow:inset 0 0 0 1px var(--rule) }}
pre,code {{ font:13.5px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace }}
pre {{ background:var(--soft); border-radius:8px; padding:12px 14px; white-space:pre-wrap; overflow-wrap:anywhere;
 margin:8px 0 }}
footer {{ margin-top:60px; color:var(--muted); font-size:13px }}
@media (max-width:600px) {{ main {{ padding:26px 16px 50px }} h1 {{ font-size:27px }} section {{ margin-top:38px }} }}
@media print,(max-width:960px) {{ .split td:first-of-type,.split thead th:nth-child(2) {{ display:none }} }}
@media print {{ :root {{ --ink:#000; --muted:#555; --rule:#ccc; --paper:#fff; --soft:#f4f4f4 }}
 * {{ print-color-adjust:exact; -webkit-print-color-adjust:exact }} main {{ max-width:none; padding:0 }}
 body {{ font-size:11pt }} figure,.card,tr,.warnings {{ break-inside:avoid }} h2,h3 {{ break-after:avoid }}
 section {{ margin-top:26px }} .wide {{ overflow:visible }}
 table {{ font-size:9pt }} th,td {{ padding-left:10px }}
 .pair {{ grid-template-columns:1fr 1fr }} figure svg {{ min-width:0 }} }}
"""
