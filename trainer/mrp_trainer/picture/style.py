"""Colours and motion of a picture: its style sheet, whose every rule is bound to the picture's own id."""

from collections.abc import Iterable

# Early forwards are warm, late ones cold; each stands on a light and on a dark page.
_RAMP = ((247, 168, 30), (238, 93, 84), (206, 66, 150), (124, 77, 224), (32, 116, 245))
_LIGHT = "--page:#fff;--panel:#f6f8fa;--ink:#1f2328;--mute:#59636e;--line:#d1d9e0;--own:.13;--draft:.42;--back:#cf222e"
_DARK = "--page:#0d1117;--panel:#161b22;--ink:#f0f6fc;--mute:#9198a1;--line:#3d444d;--own:.16;--draft:.55;--back:#ff7b72"
_MONO = "ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono','Liberation Mono',monospace"
_SANS = "system-ui,-apple-system,'Segoe UI','Noto Sans','DejaVu Sans',Helvetica,Arial,sans-serif"

FIT = "max-width:100%;height:auto"  # of a picture on a page
TICKS = (0.04, 0.28)  # seconds that a forward takes, at least and at most
HOLD = 3.0  # seconds that the whole text stands
_LONGEST = 12.0  # seconds of all forwards, if that leaves them the least


def colour(fraction: float) -> str:
    """The colour of a moment between the first forward (0) and the last (1)."""
    place = min(max(fraction, 0.0), 1.0) * (len(_RAMP) - 1)
    at = min(int(place), len(_RAMP) - 2)
    part = place - at
    mixed = (round(a + part * (b - a)) for a, b in zip(_RAMP[at], _RAMP[at + 1], strict=True))
    return "#" + "".join(f"{value:02x}" for value in mixed)


def style(name: str, clock: int | None, counts: Iterable[int]) -> str:
    """The style sheet of a picture.

    Args:
        name: Its id.
        clock: Forwards of its longest decode if it moves, else None.
        counts: Forwards of each decode.
    """
    here = f"#{name}"
    rules = [f"{here}{{{_LIGHT};font-family:{_SANS}}}", f"@media (prefers-color-scheme:dark){{{here}{{{_DARK}}}}}"]
    for selectors, declared in (
        (".page", "fill:var(--page)"),
        (".panel", "fill:var(--panel);stroke:var(--line)"),
        ("text", "fill:var(--ink);stroke:none"),
        (".name", f"font:600 15px {_MONO}"),
        (".count", f"font:700 24px {_SANS}"),
        (".small", f"font:12px {_SANS};fill:var(--mute)"),
        (".tiny", f"font:10.5px {_SANS};fill:var(--mute)"),
        (".end", "text-anchor:end"),
        (".mono", f"font:13px {_MONO}"),
        (".tok", "text-anchor:middle"),
        (".special", "font-style:italic;fill:var(--mute)"),
        (".own", "fill:currentColor;fill-opacity:var(--own);stroke:currentColor;stroke-width:1.2"),
        (".draft", "fill:currentColor;fill-opacity:var(--draft);stroke:currentColor;stroke-width:1.2"),
        (".given", "fill:none;stroke:var(--line)"),
        (".mask", "fill:var(--line);fill-opacity:.45"),
        (".under", "fill:var(--panel)"),
        (".refused", "fill:none;stroke:var(--mute);stroke-width:1;stroke-dasharray:2 1.5"),
        (".bar .own", "fill-opacity:.45;stroke:none"),
        (".bar .draft", "fill-opacity:1;stroke:none"),
        (".back", "fill:var(--back);stroke:var(--panel);stroke-width:1.2"),
        (".block", "fill:var(--mute);fill-opacity:.55"),
        (".axis", "stroke:var(--line);fill:none"),
        (".head", "stroke:var(--mute);fill:none;opacity:0"),
    ):
        rules.append(f"{here} {selectors}{{{declared}}}")
    if clock is not None:
        rules += _motion(name, clock, sorted(set(counts)))
    return "".join(rules)


def _motion(name: str, clock: int, counts: list[int]) -> list[str]:
    """What comes when: all of a forward at once, the counters and the line of time step by step. At time 0 all is there."""
    here = f"#{name}"
    tick = min(max(_LONGEST / clock, TICKS[0]), TICKS[1])
    whole = clock * tick + HOLD
    clocked = f"{whole:.2f}s -{(clock + 1) * tick:.2f}s infinite"  # the whole text is there at first, and then it comes anew

    def percent(seconds: float) -> str:
        return f"{100 * seconds / whole:.2f}%"

    still, moving = [f"{here} .strip{count}{{transform:translateY({-30 * count}px)}}" for count in counts], []
    frames = []
    for number in range(1, clock + 1):
        shown, after = percent(number * tick), percent((number + 0.8) * tick)
        frames.append(f"@keyframes {name}-f{number}{{0%,{shown}{{opacity:0}}{after},100%{{opacity:1}}}}")
        moving.append(f"{here} .f{number}{{animation:{name}-f{number} {clocked}}}")
    for count in counts:
        done, steps = percent(count * tick), f"animation-timing-function:steps({count},end)"
        end = f"transform:translateY({-30 * count}px)"
        frames.append(f"@keyframes {name}-s{count}{{0%{{transform:translateY(0);{steps}}}{done},100%{{{end}}}}}")
        moving.append(f"{here} .strip{count}{{animation:{name}-s{count} {clocked}}}")
    done, steps = percent(clock * tick), f"animation-timing-function:steps({clock},end)"
    start, end = "transform:translateX(0)", "transform:translateX(440px)"
    frames.append(
        f"@keyframes {name}-head{{0%{{opacity:.8;{start};{steps}}}{done}{{opacity:.8;{end}}}100%{{opacity:0;{end}}}}}"
    )
    moving.append(f"{here} .head{{animation:{name}-head {clocked}}}")
    return [*still, *frames, f"@media (prefers-reduced-motion:no-preference){{{''.join(moving)}}}"]


def plain(svg: str) -> str:
    """Write a picture for programs that know no variables of CSS and no lists of fonts: in light colours."""
    for name, value in (one.split(":") for one in _LIGHT.split(";")):
        svg = svg.replace(f"var({name})", value)
    svg = svg.replace(f' style="{FIT}"', "")
    return svg.replace(_MONO, "monospace").replace(_SANS, "sans-serif")


__all__ = ["FIT", "HOLD", "TICKS", "colour", "plain", "style"]
