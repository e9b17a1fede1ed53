"""The look of the report: one sheet, nothing from elsewhere, light and dark by the reader's wish.

Each colour of text has a contrast of 4.5 and more to its ground, each of a bar 3 and more; a test
computes them.
"""

LIGHT = {
    "ground": "#fcfbf9",
    "ink": "#1c2024",
    "quiet": "#5a6169",
    "rule": "#e0dcd4",
    "hit": "#0f766e",
    "joined": "#2f7fc1",
    "cold": "#c25e09",
    "original": "#7b818a",
}
DARK = {
    "ground": "#14171a",
    "ink": "#e9e7e2",
    "quiet": "#a3aab3",
    "rule": "#30363c",
    "hit": "#3fb8a8",
    "joined": "#6aa8ea",
    "cold": "#ef9f4a",
    "original": "#8e96a1",
}


def _variables(colours: dict[str, str]) -> str:
    return "".join(f"--{name}:{value};" for name, value in colours.items())


SHEET = (
    f":root{{color-scheme:light dark;{_variables(LIGHT)}}}"
    f"@media (prefers-color-scheme:dark){{:root{{{_variables(DARK)}}}}}"
    """
*{box-sizing:border-box}
body{margin:0;background:var(--ground);color:var(--ink);
 font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif;
 font-variant-numeric:tabular-nums;-webkit-text-size-adjust:100%}
main,header,footer{max-width:70rem;margin:0 auto;padding:0 1.25rem}
header{padding-top:2.5rem}
header p,.note,figcaption,.days,.scale,footer{color:var(--quiet)}
h1{font-size:1.75rem;line-height:1.2;font-weight:650;letter-spacing:-.01em;margin:0 0 .25rem}
h2{font-size:1.15rem;font-weight:650;margin:3rem 0 .25rem}
h3{font-size:.95rem;font-weight:650;margin:0;color:var(--ink)}
p{margin:.25rem 0 .75rem;max-width:44rem}
.numbers{display:grid;grid-template-columns:repeat(auto-fit,minmax(13.5rem,1fr));gap:1.75rem 2rem;
 margin:2rem 0 0;padding:1.75rem 0 0;border-top:1px solid var(--rule)}
.numbers dt{font-size:.9rem;color:var(--quiet)}
.numbers dd{margin:0}
.numbers dd.figure{font-size:2.25rem;line-height:1.2;font-weight:600;letter-spacing:-.02em;
 white-space:nowrap}
.numbers dd.about{font-size:.85rem;line-height:1.45;color:var(--quiet);margin-top:.25rem}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,26rem),1fr));
 gap:2rem 2.5rem;margin-top:1.25rem}
figure{margin:0;min-width:0}
figcaption{font-size:.85rem;min-height:3.1rem;margin-bottom:.5rem}
.legend{list-style:none;margin:.1rem 0 0;padding:0;display:flex;flex-wrap:wrap;gap:0 1rem}
.legend i{display:inline-block;width:.7em;height:.7em;margin-right:.4em;border-radius:2px}
.frame{display:flex;height:10rem}
.scale{flex:0 0 4.5rem;display:flex;flex-direction:column;justify-content:space-between;
 text-align:right;padding-right:.6rem;font-size:.75rem;line-height:1;margin:-.375rem 0}
svg{flex:1;min-width:0;width:100%;height:100%;display:block;overflow:visible}
.grid{stroke:var(--rule);stroke-width:1;vector-effect:non-scaling-stroke}
.hover{fill:transparent}
g:hover>.hover{fill:var(--rule);fill-opacity:.6}
.line{fill:none;stroke:var(--hit);stroke-width:2;vector-effect:non-scaling-stroke}
.under{fill:var(--hit);fill-opacity:.14}
.days{display:flex;justify-content:space-between;padding:.5rem 0 0 4.5rem;font-size:.75rem}
.days span:only-child{margin:0 auto}
.hit{fill:var(--hit);background:var(--hit)}
.joined{fill:var(--joined);background:var(--joined)}
.cold{fill:var(--cold);background:var(--cold)}
.original{fill:var(--original);background:var(--original)}
.wide{overflow-x:auto;margin-top:.75rem}
table{border-collapse:collapse;width:100%;font-size:.9rem}
th,td{text-align:right;padding:.5rem 0 .5rem 1.25rem;border-bottom:1px solid var(--rule);
 white-space:nowrap;vertical-align:top}
th{font-weight:400;font-size:.8rem;color:var(--quiet);vertical-align:bottom}
th:first-child,td:first-child{text-align:left;padding-left:0}
tbody th{font-size:.9rem;color:var(--ink);vertical-align:top}
.words{white-space:normal;overflow-wrap:anywhere;min-width:12rem;max-width:34rem}
th.words,td.words{text-align:left}
.words small{display:block;color:var(--quiet);font-size:.8rem}
.bar{display:block;margin-left:auto;height:.3rem;border-radius:2px;margin-top:.3rem;min-width:2px}
code{font-size:.9em}
details{margin-top:1.25rem}
summary{cursor:pointer;font-size:.9rem}
:focus-visible{outline:2px solid var(--joined);outline-offset:3px}
.how{max-width:44rem}
.how dt{font-weight:600;margin-top:.9rem}
.how dd{margin:.1rem 0 0}
.told{border-left:3px solid var(--cold);padding:.1rem 0 .1rem .9rem;margin:1.25rem 0 0}
.numbers+.told{margin-top:2.25rem}
footer{margin-top:3rem;padding-top:1rem;padding-bottom:2.5rem;font-size:.8rem}
@media (max-width:34rem){
 header{padding-top:1.5rem}
 h1{font-size:1.4rem}
 .numbers{grid-template-columns:1fr 1fr;gap:1.4rem 1.1rem}
 .numbers dd.figure{font-size:1.6rem}
 .scale{flex-basis:3.75rem}.days{padding-left:3.75rem}
 .frame{height:8.5rem}
 figcaption{min-height:0;margin-bottom:.7rem}
 .folds thead{position:absolute;clip-path:inset(50%);height:1px;overflow:hidden}
 .folds tr{display:grid;grid-template-columns:repeat(3,1fr);gap:.25rem .75rem;padding:.7rem 0;
  border-bottom:1px solid var(--rule)}
 .folds th,.folds td{border:0;padding:0;text-align:left;min-width:0;white-space:normal}
 .folds tbody th{grid-column:1/-1;max-width:none}
 .folds .bar{margin-left:0}
 .folds td.words{grid-column:2/-1}
 .folds td::before{content:attr(data-name);display:block;font-size:.75rem;color:var(--quiet)}
}
@media print{.frame{height:7rem}figure,tr{break-inside:avoid}details{display:none}}
"""
)
