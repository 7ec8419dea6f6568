"""Colours, dashes and markers, so that no difference is carried by colour alone. Refuses to know data.

Every colour has a contrast of at least 3:1 on white and on JupyterLab's dark background (#111111), and the set keeps
its order of brightness and hue apart for the common kinds of colour blindness (after Okabe and Ito).
"""

from __future__ import annotations

BACKEND_COLOURS = {
    "TORCH_SDPA": "#2C7FB8",
    "TRITON_ATTN": "#D55E00",
    "FLASH_ATTN": "#009E73",
    "FLASHINFER": "#B35FA0",
    "FLEX_ATTENTION": "#8A7000",
    "XFORMERS": "#777777",
}
OTHER_COLOUR = "#777777"

#: For lines or bars that stand for something else than backends, in this order; give each a dash or a pattern, too.
SERIES = ("#2C7FB8", "#D55E00", "#009E73", "#B35FA0", "#8A7000", "#777777")

#: Runtime mode → line dash and marker.
MODE_DASHES = {"NONE": "dot", "PIECEWISE": "dash", "FULL": "solid"}
MODE_MARKERS = {"NONE": "circle", "PIECEWISE": "diamond", "FULL": "square"}

#: Where backends share a plot, each has a dash and a marker of its own beside its colour.
BACKEND_DASHES = {
    "TORCH_SDPA": "dot",
    "TRITON_ATTN": "solid",
    "FLASH_ATTN": "dash",
    "FLASHINFER": "dashdot",
    "FLEX_ATTENTION": "longdash",
    "XFORMERS": "longdashdot",
}
BACKEND_MARKERS = {
    "TORCH_SDPA": "circle",
    "TRITON_ATTN": "square",
    "FLASH_ATTN": "diamond",
    "FLASHINFER": "triangle-up",
    "FLEX_ATTENTION": "pentagon",
    "XFORMERS": "hexagram",
}

#: What a kernel or a host call is for: colour, bar pattern, and a short label. No two share colour and pattern.
ROLE_STYLES = {
    "gemm": ("#2C7FB8", "", "GEMM"),
    "attention": ("#D55E00", "/", "attn"),
    "norm": ("#009E73", ".", "norm"),
    "rope_cache": ("#B35FA0", "\\", "rope"),
    "activation": ("#8A7000", "x", "act"),
    "embedding": ("#4F7CD6", "-", "emb"),
    "sampling": ("#C8456B", "+", "smpl"),
    "copy": ("#777777", "|", "copy"),
    "graph": ("#7F62C4", "", "graph"),
    "other": ("#8C6D5A", "-", "other"),
}

#: Readable on light and dark alike; the panel's style sheet replaces it by the theme's own text colour.
NEUTRAL = "#777777"
GRID = "rgba(128,128,128,0.25)"


def colour(backend: str) -> str:
    return BACKEND_COLOURS.get(backend, OTHER_COLOUR)


def dash(mode: str) -> str:
    return MODE_DASHES.get(mode, "longdash")


def marker(mode: str, kind: str) -> str:
    """The marker of a run: shape says the mode, filled says LIVE, open says RECORDED or SIMULATED."""
    shape = MODE_MARKERS.get(mode, "cross")
    return shape if kind == "LIVE" else f"{shape}-open"


def backend_dash(backend: str) -> str:
    return BACKEND_DASHES.get(backend, "5px,2px")


def backend_marker(backend: str, kind: str) -> str:
    """The marker of a backend: filled says LIVE, open says RECORDED or SIMULATED."""
    shape = BACKEND_MARKERS.get(backend, "cross")
    return shape if kind == "LIVE" else f"{shape}-open"


def translucent(hex_colour: str, alpha: float) -> str:
    """'#RRGGBB' with an opacity of 0…1, as plotly's rgba()."""
    red, green, blue = (int(hex_colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{alpha:g})"


def contrast(a: str, b: str) -> float:
    """WCAG 2 contrast ratio of two '#RRGGBB' colours, 1…21."""
    light, dark = sorted((_luminance(a), _luminance(b)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def _luminance(hex_colour: str) -> float:
    channels = [int(hex_colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
