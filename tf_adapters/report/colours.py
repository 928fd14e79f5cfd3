"""One colour for each kind of action, the same in pictures and in the terminal."""

from __future__ import annotations

from tf_adapters.schedule.ir import Kind

Rgb = tuple[float, float, float]

BASE: dict[Kind, Rgb] = {
    Kind.FORWARD: (0.22, 0.42, 0.72),
    Kind.BACKWARD: (0.13, 0.53, 0.33),
    Kind.INPUT_GRAD: (0.08, 0.60, 0.62),
    Kind.WEIGHT_GRAD: (0.72, 0.47, 0.10),
}
TERMINAL = {Kind.FORWARD: "blue", Kind.BACKWARD: "green", Kind.INPUT_GRAD: "cyan", Kind.WEIGHT_GRAD: "yellow"}
"""The nearest of a terminal's own colours, which suit its background."""
NAMES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT_GRAD: "backward, input gradients",
    Kind.WEIGHT_GRAD: "backward, weight gradients",
}


def shade(kind: Kind, frozen: float) -> Rgb:
    """The kind's colour, the lighter the more is frozen; never white, which would read as nothing there."""
    mix = 0.72 * min(max(frozen, 0.0), 1.0)
    red, green, blue = BASE[kind]
    return (red + (1 - red) * mix, green + (1 - green) * mix, blue + (1 - blue) * mix)
