"""The tables of docs/results/*.md, from the CSVs in benchmarks/results. Each function returns a table in Markdown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import yaml
from measurements import ROOT, Row, cell, difference, finished, read, runs, spread, table


def suite(name: str) -> str:
    """A comparison by ``lightning-fedssl compare``: a table for each group, with a row for each entry of the suite.

    Args:
        name: Of the file below configs/suites without ``.yaml``.
    """
    planned = yaml.safe_load((ROOT / "configs" / "suites" / f"{name}.yaml").read_text(encoding="utf-8"))
    source = f"compare_{name}/results.csv"
    parts = []
    for group in planned["groups"]:
        labels = [entry["label"] for entry in group["entries"]]
        bound = runs(source, {"label": labels[0]})
        rows = [_entry(source, entry, bound, len(planned["seeds"])) for entry in group["entries"]]
        columns = ("method", "rounds", "test accuracy (seeds)", f"difference to *{labels[0]}*")
        parts.append(f"**{group['title']}**\n\n{table(columns, rows)}")
    return "\n\n".join(parts)


def _entry(source: str, entry: dict[str, Any], bound: list[Row], seeds: int) -> list[str]:
    """A row of a comparison; bounds are in italics."""
    label = entry["label"]
    found = runs(source, {"label": label})
    shown = f"*{label}*" if entry.get("role") == "bound" else label
    values = list(difference(found, bound).values())
    apart = "" if not values or found == bound else spread(values, "+")
    rounds = " or ".join(dict.fromkeys(row["rounds"] for row in found))
    return [shown, rounds, cell(found, seeds), apart]


def by_seed(name: str, *groups: str) -> str:
    """A comparison seed by seed, with the pseudo-labels of the last round.

    Args:
        name: Of the suite.
        groups: Numbers of the groups to show, from 1; all of them if left out.
    """
    planned = yaml.safe_load((ROOT / "configs" / "suites" / f"{name}.yaml").read_text(encoding="utf-8"))
    seeds = [str(seed) for seed in planned["seeds"]]
    rows = []
    shown = [group for number, group in enumerate(planned["groups"], 1) if not groups or str(number) in groups]
    for label in (entry["label"] for group in shown for entry in group["entries"]):
        values = finished(runs(f"compare_{name}/results.csv", {"label": label}))
        last = {row["seed"]: row for row in read(f"compare_{name}/pseudo_labels.csv") if row["label"] == label}
        shares = [
            ", ".join(f"{100 * float(last[seed][column]):.0f}" for seed in seeds if last.get(seed, {}).get(column))
            for column in ("mask_rate", "confident_accuracy")
        ]
        rows.append([label, *(f"{values[seed]:.1f}" if seed in values else "not run" for seed in seeds), *shares])
    columns = [*(f"seed {seed}" for seed in seeds), "mask rate, last round", "of these labels right"]
    return table(["test accuracy", *columns], rows)


_SHVR = {
    "FedAvg, 600 labels": "fedavg 600",
    "FedAvg, 60,000 labels": "fedavg 60000",
    "Fed-SHVR, alpha_1 = 0, alpha_2 = 0": "fedshvr 0 0",
    "Fed-SHVR, alpha_1 = 0.75, alpha_2 = 0": "fedshvr 0.75 0",
    "Fed-SHVR, alpha_1 = 0, alpha_2 = 0.1": "fedshvr 0 0.1",
    "Fed-SHVR, alpha_1 = 0.75, alpha_2 = 0.1": "fedshvr 0.75 0.1",
    "*control:* FedAvg, 600 labels, Fed-SHVR's tau_k steps": "fedavg 600 tau",
    "*control:* FedAvg, 600 labels, 3 steps": "fedavg 600 3steps",
}


def fed_shvr_variants(split: str, *variants: str) -> str:
    """Fed-SHVR's Table I after one round at full width, with a column for each variant.

    Args:
        split: ``iid`` or ``noniid``.
        variants: Values of the column *reading*; an underscore stands for a blank.
    """
    names = [variant.replace("_", " ") for variant in variants]

    def shown(code: str, variant: str) -> str:
        # FedAvg has no variants of Fed-SHVR's settings; with momentum it has runs of its own.
        readings = [variant, f"default, {variant}", f"step, {variant}"] if "momentum" in variant else [variant]
        common = {"cell": code, "split": split, "hidden": 5000, "images": 60000, "rounds": 1}
        return cell(runs("fed_shvr_table1.csv", {**common, "reading": readings}))

    def line(title: str, code: str) -> list[str]:
        if code.startswith("fedavg") and "momentum 0.9" not in names:
            return [title, shown(code, "-"), *["the same"] * (len(names) - 1)]
        # r_2 has no weight if alpha_2 is 0, so its direction changes nothing.
        same = code.endswith(" 0") and "printed" in names
        return [title, *("as *default*" if same and name == "printed" else shown(code, name) for name in names)]

    columns = (f"T = 1, {_SPLITS[split]}", *(f"*{name}*" for name in names))
    return table(columns, [line(*item) for item in _SHVR.items()])


_SPLITS = {"iid": "IID", "noniid": "not IID", "noniid_dir01": "Dirichlet(0.1)"}

_CURVES: dict[str, list[tuple[str, str, str, int]]] = {
    "iid": [
        ("Fed-SHVR (0.75, 0.1), *default*", "fedshvr 0.75 0.1", "default", 200),
        ("the same with alpha_0 = 3", "fedshvr 0.75 0.1", "default, alpha0=3", 200),
        ("Fed-SHVR (0.75, 0.1), *printed*", "fedshvr 0.75 0.1", "printed", 200),
        ("*default*, full width", "fedshvr 0.75 0.1", "default", 5000),
        ("*printed*, full width, bfloat16", "fedshvr 0.75 0.1", "printed, trainer.precision=bf16-mixed", 5000),
        ("*default*, full width, bfloat16", "fedshvr 0.75 0.1", "default, trainer.precision=bf16-mixed", 5000),
        ("*printed*, 500 units, dropout 0.5", "fedshvr 0.75 0.1", "printed, network.dropout=0.5", 500),
        ("*default*, 500 units, dropout 0.5", "fedshvr 0.75 0.1", "default, network.dropout=0.5", 500),
        ("(0, 0.1) *printed*, 500 units, dropout 0.5", "fedshvr 0 0.1", "printed, network.dropout=0.5", 500),
        ("(0, 0.1) *default*, 500 units, dropout 0.5", "fedshvr 0 0.1", "default, network.dropout=0.5", 500),
        ("(0, 0) 500 units, dropout 0.5", "fedshvr 0 0", "default, network.dropout=0.5", 500),
        ("*default*, dropout 0.5", "fedshvr 0.75 0.1", "default, network.dropout=0.5", 200),
        ("(0, 0), dropout 0.5", "fedshvr 0 0", "default, network.dropout=0.5", 200),
        ("Fed-SHVR (0.75, 0.1), *literal*", "fedshvr 0.75 0.1", "literal", 200),
        ("Fed-SHVR (0, 0.1), *default*", "fedshvr 0 0.1", "default", 200),
        ("Fed-SHVR (0.75, 0), *default*", "fedshvr 0.75 0", "default", 200),
        ("Fed-SHVR (0, 0)", "fedshvr 0 0", "default", 200),
        ("FedAvg, 60,000 labels", "fedavg 60000", "-", 200),
        ("FedAvg, 600 labels", "fedavg 600", "-", 200),
        ("FedAvg, 600 labels, tau_k steps", "fedavg 600 tau", "-", 200),
        ("FedAvg, 600 labels, 500 units", "fedavg 600", "-", 500),
        ("FedAvg, 600 labels, full width", "fedavg 600", "-", 5000),
        ("*random crops:* FedAvg, 600 labels, tau_k steps", "fedavg 600 tau", "-, data.weak=crop", 200),
        ("FedAvg, 600 labels, full width, crops", "fedavg 600", "-, data.weak=crop", 5000),
        ("(0.75, 0.1) *printed*, crops", "fedshvr 0.75 0.1", "printed, data.weak=crop", 200),
        ("(0, 0), crops", "fedshvr 0 0", "default, data.weak=crop", 200),
        (
            "(0.75, 0.1) *printed*, crops, full width, bfloat16",
            "fedshvr 0.75 0.1",
            "printed, data.weak=crop, trainer.precision=bf16-mixed",
            5000,
        ),
    ],
    "noniid": [
        ("Fed-SHVR (0.75, 0.1), *default*", "fedshvr 0.75 0.1", "default", 200),
        ("the same with alpha_0 = 3", "fedshvr 0.75 0.1", "default, alpha0=3", 200),
        ("Fed-SHVR (0.75, 0.1), *printed*", "fedshvr 0.75 0.1", "printed", 200),
        ("*printed*, random crops", "fedshvr 0.75 0.1", "printed, data.weak=crop", 200),
        ("*default*, full width", "fedshvr 0.75 0.1", "default", 5000),
        ("*default*, 500 units, dropout 0.5", "fedshvr 0.75 0.1", "default, network.dropout=0.5", 500),
        ("(0, 0), dropout 0.5", "fedshvr 0 0", "default, network.dropout=0.5", 200),
        ("Fed-SHVR (0, 0.1), *default*", "fedshvr 0 0.1", "default", 200),
        ("Fed-SHVR (0.75, 0), *default*", "fedshvr 0.75 0", "default", 200),
        ("Fed-SHVR (0, 0)", "fedshvr 0 0", "default", 200),
        ("FedAvg, 60,000 labels", "fedavg 60000", "-", 200),
        ("FedAvg, 600 labels", "fedavg 600", "-", 200),
        ("FedAvg, 600 labels, 500 units", "fedavg 600", "-", 500),
        ("FedAvg, 600 labels, full width, crops", "fedavg 600", "-, data.weak=crop", 5000),
    ],
}
"""Rows of the tables over rounds: title, cell, reading and number of hidden units."""

_ROUNDS = (5, 10, 20, 40, 60, 80, 100)


def fed_shvr_rounds(split: str) -> str:
    """Fed-SHVR's accuracy over the rounds on all 60,000 images: the mean over seeds.

    Args:
        split: ``iid`` or ``noniid``.
    """
    rows = [
        [title, *_over_rounds({"cell": code, "reading": reading, "hidden": hidden, "split": split, "images": 60000})]
        for title, code, reading, hidden in _CURVES[split]
    ]
    return table((f"60,000 images, {_SPLITS[split]}, 200 units", *map(str, _ROUNDS), "seeds"), rows)


def _over_rounds(where: dict[str, Any]) -> list[str]:
    """The mean accuracy after some rounds, and the number of seeds; *not run* without a round."""
    found = [
        row for row in read("fed_shvr_curves.csv") if all(row[column] == str(value) for column, value in where.items())
    ]
    by_round = {n: [float(row["accuracy"]) for row in found if int(row["round"]) == n] for n in _ROUNDS}
    shown = [f"{sum(values) / len(values):.1f}" if values else "" for values in by_round.values()]
    last: dict[str, int] = {}
    for row in found:
        last[row["seed"]] = max(int(row["round"]), last.get(row["seed"], 0))
    stopped = {seed: n for seed, n in last.items() if n < _ROUNDS[-1]}
    ends = [f"ended after {n}" if len(last) == 1 else f"seed {seed} ended after {n}" for seed, n in stopped.items()]
    return [*shown, ", ".join([str(len(last)), *ends]) if found else "not run"]


def fed_shvr_spread() -> str:
    """Fig. 4 of Fed-SHVR: accuracy and its spread over seeds, and the clients' training loss."""
    rounds = (5, 20, 50, 100)
    titles = {
        "Fed-SHVR": "fedshvr 0.75 0.1",
        "Fed-SVR (plain averaging)": "fedsvr 0.75 0.1",
        "Fed-SH (no control variate)": "fedsh 0.75 0.1",
    }
    rows = []
    for title, code in titles.items():
        found = [
            row
            for row in read("fed_shvr_curves.csv")
            if (row["cell"], row["reading"], row["images"]) == (code, "printed", "6600")
        ]
        shown = [spread([float(r["accuracy"]) for r in found if int(r["round"]) == n]) for n in rounds]
        losses = [float(row["client_loss"]) for row in found if int(row["round"]) == rounds[-1]]
        rows.append([title, *shown, f"{sum(losses) / len(losses):.3f}"])
    return table(("after rounds", *map(str, rounds), f"loss at {rounds[-1]}"), rows)


def fedrgd(*claims: str) -> str:
    """FedRGD's claims on small data.

    Args:
        claims: Values of the column *claim*; an underscore stands for a blank. All if none is given.
    """
    keys = ("claim", "dataset", "clients", "rounds", "local_steps", "lr", "variant")
    wanted = [claim.replace("_", " ") for claim in claims]
    rows = [row for row in read("fedrgd_claims.csv") if not wanted or row["claim"] in wanted]
    lines = []
    for name in dict.fromkeys(tuple(row[key] for key in keys) for row in rows):
        found = [row for row in rows if tuple(row[key] for key in keys) == name]
        accuracies = cell(runs("fedrgd_claims.csv", dict(zip(keys, name, strict=True))))
        seeds = ", ".join(f"{100 * float(row['accuracy']):.1f}" for row in found)
        mask = f"{100 * _mean(found, 'mask_rate'):.0f} %"
        diversity = f"{_mean(found, 'update'):.2f}, {_mean(found, 'update_with_server'):.2f}"
        lines.append([*name, accuracies, seeds, mask, diversity])
    columns = ("claim", "data", "users", "rounds", "T", "rate", "variant")
    return table((*columns, "accuracy (seeds)", "seed by seed", "mask rate", "diversity: users, with server"), lines)


def fedrgd_groups(server_only_rounds: str) -> str:
    """FedRGD's weakest group mean on the digits, seed by seed, in the rounds in which users train.

    Args:
        server_only_rounds: The rounds before, in which the server trains alone.
    """
    found = [row for row in read("compare_digits/groups.csv") if int(row["round"]) > int(server_only_rounds)]
    lines = []
    for label in dict.fromkeys(row["label"] for row in found):
        seeds = dict.fromkeys(row["seed"] for row in found if row["label"] == label)
        weakest = [
            [100 * float(r["group_accuracy_min"]) for r in found if _is(r, {"label": label, "seed": seed})]
            for seed in seeds
        ]
        columns = (
            [f"{min(values):.0f}" for values in weakest],
            [str(sum(value < 80 for value in values)) for values in weakest],
            [f"{values[-1]:.1f}" for values in weakest],
        )
        lines.append([label, *(", ".join(column) for column in columns)])
    return table(("weakest group mean, validation images", "lowest", "rounds below 80 %", "last round"), lines)


def _mean(rows: Sequence[Row], column: str) -> float:
    return sum(float(row[column]) for row in rows) / len(rows)


def semi_sfl(dataset: str, target: str = "0.9", source: str = "semi_sfl.csv") -> str:
    """Semi-SFL's comparison on small data, with the cost to an accuracy.

    Args:
        dataset: ``mnist`` or ``cifar10``.
        target: The accuracy from 0 to 1.
        source: The file below benchmarks/results.
    """
    rows = [row for row in read(source) if row["dataset"] == dataset]
    names = dict.fromkeys((row["partition"], row["method"]) for row in rows)
    longest = max(int(row["round"]) for row in rows)
    lines = []
    for partition, method in names:
        where = {"dataset": dataset, "partition": partition, "method": method}
        found = runs(source, where, longest)
        seeds = ", ".join(f"{value:.1f}" for value in finished(found).values())
        lines.append([partition, method, cell(found), seeds, *_cost_to([r for r in rows if _is(r, where)], target)])
    goal = f"to {100 * float(target):.0f} %"
    columns = ("partition", "method", f"accuracy after {longest} rounds", "seed by seed")
    return table((*columns, f"{goal}: rounds", "MB", "minutes"), lines)


def _is(row: Row, where: dict[str, str]) -> bool:
    return all(row[column] == value for column, value in where.items())


def _cost_to(rows: Sequence[Row], target: str) -> list[str]:
    """Mean rounds, megabytes and simulated minutes until an accuracy; how many seeds have it if not all have."""
    first: dict[str, Row] = {}
    for row in rows:
        if float(row["accuracy"]) >= float(target):
            first.setdefault(row["seed"], row)
    seeds = {row["seed"] for row in rows}
    if len(first) < len(seeds):
        return [f"{len(first)} of {len(seeds)} seeds", "", ""]
    megabytes = [(float(row["upload_bytes"]) + float(row["download_bytes"])) / 1e6 for row in first.values()]
    reached = list(first.values())
    minutes = _mean(reached, "simulated_s") / 60
    return [f"{_mean(reached, 'round'):.0f}", f"{sum(megabytes) / len(megabytes):.0f}", f"{minutes:.1f}"]


def few_labels_trials() -> str:
    """The trials with few labels: the last evaluated round of each."""
    last = {(row["dataset"], row["labels"], row["run"]): row for row in read("evidence_trials.csv")}
    rows = []
    for (dataset, labels, name), row in last.items():
        stopped = "" if row["round"] == row["max_rounds"] else f" of {row['max_rounds']}"
        columns = ("val_accuracy", "test_accuracy", "mask_rate", "confident_accuracy")
        shares = [f"{100 * float(row[column]):.1f}" if row[column] else "" for column in columns]
        rows.append([dataset, labels, name, f"{row['round']}{stopped}", *shares])
    named = ("data", "labels", "run, seed 0 if none is named", "rounds")
    return table((*named, "validation", "test", "mask rate", "of these labels right"), rows)


def stored(source: str) -> str:
    """A CSV as it is.

    Args:
        source: The file below benchmarks/results.
    """
    rows = read(source)
    return table(list(rows[0]), [list(row.values()) for row in rows])


def trials() -> str:
    """The section of docs/results.md on what changed nothing or made results worse."""
    rows = [
        [row["paper"], row["trial"], row["setting"], row["accuracy"], row["without"], row["seeds"]]
        for row in read("trials.csv")
    ]
    columns = ("paper", "trial", "setting", "accuracy with it", "accuracy without it", "seeds")
    head = "## Trials that changed nothing or made results worse"
    source = "From [trials.csv](../benchmarks/results/trials.csv), which was typed from the logs of trial runs."
    return f"{head}\n\n{source}\n\n{table(columns, rows)}\n"


TABLES: dict[str, Callable[..., str]] = {
    "suite": suite,
    "by_seed": by_seed,
    "fed_shvr_variants": fed_shvr_variants,
    "fed_shvr_rounds": fed_shvr_rounds,
    "fed_shvr_spread": fed_shvr_spread,
    "fedrgd": fedrgd,
    "fedrgd_groups": fedrgd_groups,
    "semi_sfl": semi_sfl,
    "few_labels_trials": few_labels_trials,
    "stored": stored,
}
"""The tables by the names that pages use."""
