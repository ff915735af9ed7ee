"""Colours that mean the same thing in every picture of a plan."""

from __future__ import annotations

from nest_megatron.files import MARK

#: What an iteration's time goes into; one hue for communication inside a replica.
TERM_COLOURS = {
    "compute": "#2f6fb7",
    "recompute": "#8fb8e0",
    "tp_communication": "#b3364b",
    "cp_communication": "#d4607a",
    "ep_communication": "#e68fa2",
    "pp_communication": "#efbcc6",
    "pipeline_bubble": "#c5cad2",
    "dp_communication": "#7d57b2",
    "optimizer": "#c98a00",
    "embedding_sync": "#a98bd0",
    "stragglers": "#5f4a8b",
    "host": "#858b95",
}
MEMORY_COLOURS = {
    "weights": "#2f6fb7",
    "gradients": "#8fb8e0",
    "optimizer": "#c98a00",
    "activations": "#1f8a70",
    "working": "#8fd0bd",
}
OTHER_COLOUR = "#858b95"

#: How matplotlib draws every picture.
PICTURE_STYLE = {
    "svg.hashsalt": "nest-megatron",  # the same file from the same plan
    "svg.fonttype": "none",
    "text.parse_math": False,  # names are text, whatever they hold
}

_FORWARD = ("#9cc3ec", "#1d4f8c")
_BACKWARD = ("#93d3c0", "#0f5f4b")


def forward_colour(virtual: int, num_virtual: int) -> str:
    """Shade of a forward pass: the later the chunk, the darker."""
    return _shade(_FORWARD, virtual, num_virtual)


def backward_colour(virtual: int, num_virtual: int) -> str:
    """Shade of a backward pass: the later the chunk, the darker."""
    return _shade(_BACKWARD, virtual, num_virtual)


def ink_on(colour: str) -> str:
    """Black or white, whichever reads better on a colour.

    >>> ink_on("#ffffff"), ink_on("#1d4f8c")
    ('#000000', '#ffffff')
    """
    red, green, blue = _channels(colour)
    return "#000000" if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else "#ffffff"


def _shade(ends: tuple[str, str], position: int, count: int) -> str:
    share = 0.5 if count == 1 else position / (count - 1)
    pairs = zip(_channels(ends[0]), _channels(ends[1]), strict=True)
    return "#" + "".join(f"{round(a + share * (b - a)):02x}" for a, b in pairs)


def _channels(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def picture_metadata(suffix: str) -> dict[str, str | None]:
    """What matplotlib writes into a picture: who made it, and no date, so that it is reproducible.

    Args:
        suffix: ``png`` or ``svg``.
    """
    return {"Creator": MARK, "Date": None} if suffix == "svg" else {"Software": MARK}
