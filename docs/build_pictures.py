"""Draws pictures of README and documentation from benchmarks/results: ``python docs/build_pictures.py``."""

from __future__ import annotations

import csv
import re
import statistics
import textwrap
from typing import Any

import matplotlib as mpl
import yaml
from matplotlib import pyplot as plt

from build_results import DOCS, RESULTS, accuracies, cells_of, values_of
from lightning_fedssl.comparison.verdicts import FEWEST, interval

IMAGES = DOCS / "images"
WIDTH = 4.8
"""Inches: a telephone shows such a picture with its letters in full size."""
BLUE, GREY, INK = "#3b4a8f", "#8a8f9c", "#1c2452"
mpl.rcParams.update({"svg.hashsalt": "fedssl", "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 10})

RULES = ("mean", "median", "trimmed mean", "Krum", "quarantine")
COLOURS = (GREY, BLUE, "#c2593f", "#3f8f5f", "#b58a1e")

DIGITS = (  # label in the suite, text, colour
    ("50 labels alone", "the 50 labels alone", GREY),
    ("FedAvg + FixMatch", "FedAvg + FixMatch", BLUE),
    ("Semi-SFL", "Semi-SFL", BLUE),
    ("SemiFL", "SemiFL", BLUE),
    ("All labels", "all 1,298 labels in one place", GREY),
)

ROUNDS: dict[str, tuple[str, list[str], str, str, str]] = {
    "fixmatch": (
        "FixMatch, UDA: FedAvg with pseudo-labels",
        ["current model labels each batch", "keeps the confident labels", "trains on the strong view"],
        "weights",
        "weights",
        "averages, trains on its labels",
    ),
    "semifl": (
        "SemiFL: label once, train on the confident",
        ["received model labels all images", "keeps the confident images", "trains, with mixed images"],
        "weights, batch-norm statistics",
        "weights",
        "averages, fine-tunes on its labels",
    ),
    "fedrgd": (
        "FedRGD: average in groups",
        ["starts from its group's model", "consistency of two views", "networks with group norm"],
        "weights, momentum",
        "weights, momentum",
        "trains beside them, a mean a group",
    ),
    "fed_shvr": (
        "Fed-SHVR: labels at the clients",
        ["a few labels, many images", "soft labels, two regularisers", "gradient + control variate"],
        "weights, number of steps",
        "weights, number of steps",
        "averages updates per step",
    ),
    "fedmatch": (
        "FedMatch: similar clients vote",
        ["helpers' models vote on labels", "trains the part psi", "the part sigma stays"],
        "weights, helpers' models",
        "changed weights of psi",
        "averages psi, trains sigma",
    ),
    "fedswitch": (
        "FedSwitch: teacher or student labels",
        ["measures its class skew", "teacher or student labels", "trains on the strong view"],
        "weights of student and teacher",
        "weights",
        "averages, moves the teacher",
    ),
    "split": (
        "Semi-SFL, FedSwitch-SL: one network in two parts",
        ["lower layers: features", "lower layers: gradients", "repeated in every step"],
        "gradients of the features",
        "features",
        "upper layers, teacher's labels",
    ),
}


def save(figure: Any, name: str) -> None:
    """Write a figure as docs/images/NAME.svg, the same bytes at every call."""
    figure.savefig(IMAGES / f"{name}.svg", metadata={"Date": None}, facecolor="white", bbox_inches="tight")
    plt.close(figure)


def bare(axes: Any) -> None:
    """Leave the bottom axis alone."""
    axes.spines[["left", "top", "right"]].set_visible(False)
    axes.tick_params(left=False, colors=INK)
    axes.grid(axis="x", color="#e3e5ee")
    axes.set_axisbelow(True)


def digits() -> None:
    """README: what the clients' images add to 50 labels, seed by seed."""
    figure, axes = plt.subplots(figsize=(WIDTH, 2.6))
    for place, (label, text, colour) in enumerate(DIGITS):
        values = list(accuracies("compare_digits/results.csv", {"label": label}).values())
        mean = statistics.mean(values)
        axes.plot([min(values), max(values)], [place, place], color=colour, lw=7, alpha=0.2, solid_capstyle="round")
        axes.plot(values, [place] * len(values), "o", color=colour, ms=4, alpha=0.6)
        axes.plot(mean, place, "|", color=colour, ms=16, mew=3)
        axes.text(80.1, place, text, va="center", ha="left", color=INK, backgroundcolor="white")
        axes.text(100.3, place, f"{mean:.1f} %", va="center", ha="left", color=colour, weight="bold")
    axes.set(xlim=(80, 100), ylim=(-0.6, 4.6), yticks=[], xticks=range(80, 101, 5))
    axes.set_xlabel("test accuracy in % (dots: five seeds; the bar is their mean)")
    bare(axes)
    save(figure, "digits")


def speed() -> None:
    """README: the CPU time of a round in several simulators."""
    table = (RESULTS / "speed_cnn-shared.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([^|]+?) \| ([\d.]+) \|", table, re.MULTILINE)
    seconds = {name: float(value) for name, value in rows}
    names = [name for name in seconds if re.match(r"lightning_fedssl$|plain PyTorch|pfl|FedLab|FedJAX|Flower", name)]
    figure, axes = plt.subplots(figsize=(WIDTH, 1.9))
    for place, name in enumerate(sorted(names, key=lambda name: -seconds[name])):
        axes.barh(place, seconds[name], color=BLUE if name == "lightning_fedssl" else "#c9cede", height=0.7)
        axes.text(0.05, place, name, va="center", color="white" if name == "lightning_fedssl" else INK)
        axes.text(seconds[name] + 0.05, place, f"{seconds[name]:.1f} s", va="center", color=INK)
    axes.set(yticks=[], xlabel="CPU seconds of a round: 50 clients, 1.6 million weights")
    bare(axes)
    save(figure, "speed")


def curves() -> None:
    """Comparing methods: validation accuracy over the rounds, mean over the seeds."""
    figure, axes = plt.subplots(figsize=(WIDTH, 3))
    with (RESULTS / "compare_digits" / "curves.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    for label in ("SemiFL", "Semi-SFL", "FedAvg + FixMatch"):
        by_round: dict[int, list[float]] = {}
        for row in rows:
            if row["label"] == label:
                by_round.setdefault(int(row["round"]), []).append(100 * float(row["accuracy"]))
        means = {key: statistics.mean(values) for key, values in by_round.items()}
        axes.plot(list(means), list(means.values()), lw=2, label=label)
    axes.set(xlabel="round", ylabel="validation accuracy in %", ylim=(60, 100), xlim=(1, 30), xticks=range(5, 31, 5))
    axes.legend(fontsize=9, frameon=False, loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
    save(figure, "rounds_digits")


def results() -> None:
    """Results: the differences of each paper's shown claims, with their 95 % intervals."""
    for paper in yaml.safe_load((DOCS / "claims.yaml").read_text(encoding="utf-8"))["papers"]:
        cells = [cell for claim in paper["claims"] for cell in cells_of(claim) if "show" in cell][::-1]
        texts = [textwrap.fill(cell["show"], 56) for cell in cells]
        rows = [sum(1 + 0.45 * text.count("\n") for text in texts[:index]) for index in range(len(texts) + 1)]
        figure, axes = plt.subplots(figsize=(WIDTH, 0.7 + 0.4 * rows[-1]))
        for place, cell, text in zip(rows, cells, texts, strict=False):
            values = list(values_of(cell).values())
            if "minus" not in cell:
                values = [value - cell["paper"] for value in values]
            colour = BLUE if len(values) >= FEWEST else GREY
            if len(values) >= FEWEST:
                found = interval(values)
                axes.plot([found.low, found.high], [place, place], color=colour, lw=2)
            axes.plot(values, [place] * len(values), "o", color=colour, ms=4, alpha=0.7)
            axes.annotate(
                text, (0, place + 0.2), xycoords=("axes fraction", "data"), va="bottom", color=INK, fontsize=9,
                bbox={"color": "white", "pad": 1},
            )  # fmt: skip
        axes.axvline(0, color=INK, lw=1)
        axes.set(yticks=[], ylim=(-0.5, rows[-1] - 0.2))
        axes.set_xlabel("points above the comparison, or above the paper")
        bare(axes)
        save(figure, f"results_{paper['paper'].lower().replace('-', '_')}")


def rounds() -> None:
    """Concepts: what happens in a round of each family of methods."""
    for name, (title, client, down, up, server) in ROUNDS.items():
        lines = "".join(f'<text x="190" y="{230 + 22 * row}">{text}</text>' for row, text in enumerate(client))
        (IMAGES / f"round_{name}.svg").write_text(
            f'<svg xmlns="http://www.w3.org/2000/svg" width="380" height="300" viewBox="0 0 380 300" '
            f'font-family="sans-serif" font-size="14"><rect width="380" height="300" fill="white"/><defs>'
            f'<marker id="a" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" orient="auto">'
            f'<path d="M0 0 10 5 0 10z" fill="{BLUE}"/></marker></defs>'
            f'<text x="10" y="20" font-weight="bold" fill="{INK}">{title}</text><g fill="#eef1fb" stroke="{BLUE}" '
            f'stroke-width="1.5"><rect x="10" y="34" width="352" height="82" rx="8"/><rect x="18" y="194" '
            f'width="352" height="98" rx="8"/><rect x="10" y="186" width="352" height="98" rx="8"/></g>'
            f'<g fill="{INK}" text-anchor="middle"><text x="190" y="56" font-weight="bold">Server</text>'
            f'<text x="190" y="80">the global model</text><text x="190" y="104">{server}</text>'
            f'<text x="190" y="206" font-weight="bold">Each drawn client</text>{lines}</g><g stroke="{BLUE}" '
            f'stroke-width="2" marker-end="url(#a)"><path d="M28 120V182"/><path d="M344 182V120"/></g>'
            f'<g fill="{BLUE}"><text x="40" y="140">{down}</text>'
            f'<text x="332" y="172" text-anchor="end">{up}</text></g></svg>\n',
            encoding="utf-8",
        )


def privacy() -> None:
    """Privacy: accuracy over epsilon, for the 20 clients that exist and for a simulated population."""
    figure, axes = plt.subplots(figsize=(WIDTH, 3.2))
    for clients, colour in (("20", GREY), ("100,000", BLUE)):
        found = _by_number("privacy.csv", rf"{clients} clients, epsilon ([\d.]+)")
        _with_range(axes, found, f"{clients} clients{' (simulated)' if clients != '20' else ''}", colour, "o")
    for label, style in (("50 labels alone", ":"), ("SemiFL", "--")):
        mean = statistics.mean(accuracies("privacy.csv", {"label": label}).values())
        axes.axhline(mean, color=INK, ls=style, lw=1, label=f"{label}, without privacy" if style == "--" else label)
    axes.set(
        xscale="log", xlabel="epsilon after 15 rounds (mean and range of three seeds)", ylabel="test accuracy in %"
    )
    axes.legend(fontsize=9, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2)
    save(figure, "privacy")


def attacks() -> None:
    """Attacks: accuracy over the share of attackers for each rule."""
    figure, both = plt.subplots(2, 1, figsize=(WIDTH, 5.2), sharex=True)
    for axes, attack in zip(both, ("SignFlip", "PseudoLabelPoison"), strict=True):
        for rule, colour, mark in zip(RULES, COLOURS, "osv^D", strict=True):
            honest = list(accuracies("attacks.csv", {"label": rule}).values())
            found = {0.0: honest} | _by_number("attacks.csv", rf"{rule}, {attack} (\d+) %")
            _with_range(axes, found, rule, colour, mark)
        axes.set(title=attack, ylabel="test accuracy in %", ylim=(0, 100), xticks=[0, 20, 40])
    both[1].set_xlabel("attackers in %")
    both[1].legend(fontsize=9, frameon=False, loc="lower left")
    save(figure, "attacks")


def faults() -> None:
    """Faults: accuracy over the drop-out rate, and with a client that sends 100 times its movement."""
    figure, axes = plt.subplots(figsize=(WIDTH, 3.2))
    with (RESULTS / "faults.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    for method, colour, mark in (("FedAvg", GREY, "o"), ("SemiFL", BLUE, "s")):
        found: dict[float, list[float]] = {}
        for row in rows:
            if row["method"] == method:
                place = {"on": 90.0, "off": 110.0}[row["quarantine"]]
                place = 100 * float(row["dropout"]) if row["fault"] == "drop-out" else place
                found.setdefault(place, []).append(100 * float(row["accuracy"]))
        _with_range(axes, {place: found[place] for place in sorted(found) if place < 90}, method, colour, mark)
        for place in (90.0, 110.0):
            _with_range(axes, {place: found[place]}, None, colour, mark)
    axes.set(ylabel="test accuracy in %", ylim=(0, 100), xticks=[0, 10, 30, 50, 70, 90, 110])
    axes.set_xticklabels(["0", "10", "30", "50", "70", "quarantine", "none"])
    axes.set_xlabel("clients that drop out, %", x=0.35)
    axes.text(100, -16, "one explodes", ha="center")
    axes.legend(fontsize=9, frameon=False, loc="lower left")
    save(figure, "faults")


def _by_number(source: str, pattern: str) -> dict[float, list[float]]:
    """The accuracies of all seeds by the number in the labels."""
    with (RESULTS / source).open(newline="", encoding="utf-8") as file:
        labels = {row["label"] for row in csv.DictReader(file)}
    matches = [match for match in (re.fullmatch(pattern, label) for label in labels) if match]
    found = {float(match[1]): list(accuracies(source, {"label": match[0]}).values()) for match in matches}
    return dict(sorted(found.items()))


def _with_range(axes: Any, found: dict[float, list[float]], label: str | None, colour: str, mark: str) -> None:
    """A line of means, and a bar from the lowest to the highest seed at each place."""
    axes.plot(list(found), [statistics.mean(v) for v in found.values()], mark, ls="-", color=colour, label=label, ms=4)
    axes.vlines(
        list(found), [min(v) for v in found.values()], [max(v) for v in found.values()], color=colour, alpha=0.4
    )


def main() -> None:
    """Draw all of them."""
    IMAGES.mkdir(exist_ok=True)
    for draw in (digits, speed, curves, results, rounds, faults, privacy, attacks):
        draw()


if __name__ == "__main__":
    main()
