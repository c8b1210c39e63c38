"""What a round may cost on a CUDA device, recorded for every digits configuration. Budgets may only fall."""

from __future__ import annotations

MODES = ("sequential", "stacked", "graphs")
"""One client after another; clients stacked; clients stacked and their steps replayed as CUDA graphs."""

WAITS: dict[str, tuple[int, int, int]] = {
    "datasharing": (13, 13, 14),
    "easgd": (20, 20, 21),
    "fedavg": (13, 13, 15),
    "fedmatch": (24, 24, 26),
    "fedrgd": (22, 22, 23),
    "fedshvr": (19, 19, 22),
    "fedswitch": (18, 18, 19),
    "fedswitchsl": (22, 22, 22),
    "fixmatch": (14, 14, 16),
    "fixmatch_pooled": (11, 11, 11),
    "meanteacher": (14, 14, 17),
    "overlapsgd": (19, 19, 20),
    "pseudolabel": (14, 14, 17),
    "semifl": (20, 20, 22),
    "semisfl": (19, 19, 19),
    "supervised": (7, 7, 7),
    "uda": (14, 14, 16),
}
"""How often the host waits for the device in a round, evaluation and checkpoint included: in each of the modes."""

KERNELS: dict[str, tuple[int, int, int]] = {
    "datasharing": (50, 38, 17),
    "easgd": (50, 38, 17),
    "fedavg": (47, 34, 13),
    "fedmatch": (349, 214, 127),
    "fedrgd": (224, 193, 175),
    "fedshvr": (64, 49, 7),
    "fedswitch": (240, 202, 168),
    "fedswitchsl": (115, 64, 64),
    "fixmatch": (163, 132, 106),
    "fixmatch_pooled": (229, 229, 229),
    "meanteacher": (67, 50, 6),
    "overlapsgd": (50, 38, 17),
    "pseudolabel": (45, 43, 6),
    "semifl": (223, 174, 119),
    "semisfl": (96, 74, 74),
    "supervised": (0, 0, 0),
    "uda": (171, 131, 106),
}
"""Launches for a step of one client in each of the modes, rounded up; a replayed graph launches none of its own."""


def table() -> str:
    """The host waits of a round as the documentation has them."""
    head = ["| configuration | one after another | stacked | CUDA graphs |", "|---|---|---|---|"]
    return "\n".join([*head, *(f"| {name} | {' | '.join(map(str, waits))} |" for name, waits in WAITS.items())])
