"""The statistical-aggregation study: its tables 1 to 5, and an ablation that settles what replacing the prior does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fedbayes.experiments.experiment import Experiment
from fedbayes.papers.aggregation_scales import SCALES
from fedbayes.papers.cells import Cell, Table
from fedbayes.papers.layout import Layout
from fedbayes.papers.seeds import SEEDS, Cells
from fedbayes.scores.retention import retention_curve
from fedbayes.training.run import Run

SPLITS: dict[str, tuple[str, dict[str, Any]]] = {
    "IID": ("iid", {}),
    "2-class": ("shards", {"per_client": 2}),
    "Dirichlet .5": ("dirichlet", {"alpha": 0.5}),
    "Dirichlet 5": ("dirichlet", {"alpha": 5.0}),
}
RULES = {"NWA": "nwa", "WS": "ws", "LP": "lp", "WC": "wc", "Conflation": "conflation"}
WEIGHTINGS = {"size": "size", "max discrepancy": "discrepancy", "distance": "distance"}
CLIENTS: dict[str, Any] = {"optimiser": "adam", "lr": 1e-3, "lr_decay": 0.96, "lr_silent": 50, "batch": 32, "epochs": 1}
VARIATIONAL = {
    **{"train_draws": 1, "lr_within": "constant", "weighting": "size"},
    "estimator": "flipout",
    "prior": "fixed",
    "prior_scale": 10.0,  # N(0, 100 I)
    "kl": "1/n",
    "kl_weight": 1 / CLIENTS["batch"],  # not printed; at 1, the ELBO, a ResNet-20 on all of CIFAR-10 ends at 72 %
    "initial": 0.05,
    "test_draws": 20,
}
# DWC takes the broadcast out of the clients' posteriors again: it must be their prior. And where they learned little it
# adds up what they moved: no client has BatchNorm's statistics of such a network.
DWC: dict[str, Any] = {"rule": "dwc", "prior": "broadcast", "norm_passes": 1}
SPARED = "MC dropout with logits kept"  # beside the text's, which drops after every linear map
TREATMENTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # method, its options, the network's
    "Deterministic": ("fedavg", {}, {}),
    "MC dropout": ("fedavg", {"mc_dropout": True, "test_draws": 20}, {"dropout": 0.2}),
    SPARED: ("fedavg", {"mc_dropout": True, "test_draws": 20}, {"dropout": 0.2, "undropped": ["head"]}),
    "Flipout": ("fedvi", VARIATIONAL, {}),
}
BASE: dict[str, Any] = {
    "data": "cifar10",
    "network": "resnet",
    "augment": "crop_flip",
    "precision": "bf16",
    "clients": 10,
    "evaluate_every": 10,
}
Figures = dict[str, tuple[float, ...]]  # row -> accuracy and NLL by split


def _figures(text: str) -> Figures:
    """Lines `row: a l  a l ...`."""
    pairs = (line.split(":") for line in text.strip().splitlines())
    return {row.strip(): tuple(float(word) for word in figures.split()) for row, figures in pairs}


# In print the names of the weightings are shifted by a line; table 3 shows their order.
TABLE_2 = _figures("""
    Deterministic:        87.66 .370  51.45 1.55  83.45 .485  85.78 .435
    MC dropout:           89.19 .330  47.20 1.65  85.52 .431  87.45 .373
    NWA size:            81.67 .576  43.04 1.68  74.77 .721  79.89 .620
    NWA max discrepancy: 81.28 .581  47.81 1.65  75.45 .722  80.06 .608
    NWA distance:        81.76 .576  40.00 1.80  75.92 .717  80.04 .614
    WS size:             87.41 .388  53.52 1.41  83.74 .508  85.17 .465
    WS max discrepancy:  87.81 .377  47.72 1.49  84.17 .487  84.90 .476
    WS distance:         87.55 .391  51.84 1.47  83.23 .510  85.07 .464
    LP size:             77.21 .683  35.50 1.85  67.67 .925  74.70 .744
    LP max discrepancy:  77.35 .681  37.86 1.79  69.35 .895  76.01 .717
    LP distance:         77.69 .674  32.48 1.90  68.47 .914  75.94 .721
    WC size:             87.95 .377  53.00 1.44  83.18 .510  85.09 .478
    WC max discrepancy:  87.81 .384  50.71 1.49  83.70 .514  84.86 .470
    WC distance:         87.52 .389  46.41 1.52  83.17 .514  85.23 .464
    Conflation:           87.42 .385  53.09 1.46  83.18 .502  84.94 .471
""")
TABLE_3 = _figures("""
    Deterministic:        90.74 .371  48.50 1.56  87.33 .456  89.06 .456
    MC dropout:           91.16 .264  44.90 1.58  87.91 .357  89.53 .316
    NWA size:            88.76 .334  56.36 1.55  85.26 .439  87.46 .380
    NWA max discrepancy: 88.87 .336  55.91 1.55  85.43 .435  87.30 .380
    NWA distance:        88.98 .332  45.60 1.59  85.35 .436  87.38 .377
    WS size:             88.37 .446  56.96 1.36  84.53 .585  85.51 .545
    WS max discrepancy:  88.23 .429  49.84 1.42  84.68 .587  84.92 .554
    WS distance:         88.34 .444  48.49 1.42  84.91 .581  85.75 .545
    LP size:             88.05 .358  55.41 1.60  83.59 .478  86.36 .408
    LP max discrepancy:  88.19 .356  48.87 1.65  84.00 .472  86.62 .404
    LP distance:         87.91 .363  41.95 1.65  84.03 .471  86.47 .408
    WC size:             88.21 .443  52.23 1.41  84.49 .583  86.01 .542
    WC max discrepancy:  88.34 .430  49.21 1.49  83.52 .589  84.47 .548
    WC distance:         88.28 .437  48.25 1.44  85.17 .574  85.37 .578
    Conflation:           88.16 .444  52.47 1.39  84.86 .586  85.59 .550
""")
TABLE_4 = _figures("""
    DWC:              34.95 1.73  11.64 2.69  17.25 2.440  31.83 1.801
    DWC pre-trained: 71.42  .83  66.35  .97  68.81  .918  65.87  .972
    WS pre-trained:  72.70  .80  64.63 1.01  62.65 1.061  68.18  .913
""")
TABLE_5 = _figures("""
    NWA: 41.84 1.55
    WS: 43.54 1.53
    LP: 46.14 1.46
    WC: 44.23 1.51
    Conflation: 42.62 1.56
""")
TABLE_1 = {"Deterministic": 90.14, "MC dropout": 90.91, "Flipout": 90.42}

RETAINED = tuple(range(10, 101, 10))  # percent of the test set, the most certain first
KINDS = ("entropy", "aleatoric", "epistemic")


def retention(run: Run) -> dict[str, float]:
    """Accuracy of the most certain tenths of the test set, by each kind of uncertainty, and the curves' areas."""
    data = run.task.clients.data
    p = run.predict(data.test_x)
    correct = p.probs.argmax(-1) == data.test_y.to(p.probs.device)
    kinds = {"entropy": p.entropy, "aleatoric": p.aleatoric.sum(-1), "epistemic": p.epistemic.sum(-1)}
    figures: dict[str, float] = {}
    for kind, uncertainty in kinds.items():
        curve = retention_curve(uncertainty, correct).accuracy
        figures |= {f"{kind}_{part}": float(curve[max(1, round(len(curve) * part / 100)) - 1]) for part in RETAINED}
        figures[f"{kind}_area"] = float(curve.mean())
    return figures


def one_round(run: Run) -> dict[str, float]:
    """Retention, the share of weights whose precision was floored, and how the server fared before the round."""
    first, weights = run.journal[0], run.posterior.mean.numel()
    figures = retention(run)
    if "floored" in first:
        figures["floored"] = first["floored"] / weights
    if "pretrained" in first:
        figures |= {f"pretrained_{key}": v for key, v in first["pretrained"].items() if key in ("epochs", "accuracy")}
    return figures


def experiment_of(row: str, split: str, *, epochs: int = 1) -> Experiment:
    """A cell of tables 2 and 3: a treatment, or a rule and a weighting of Flipout, on a split."""
    rule, _, weighting = row.partition(" ")
    method, options, network = TREATMENTS.get(row, TREATMENTS["Flipout"])
    if row not in TREATMENTS:
        options = {**options, "rule": RULES[rule], "weighting": WEIGHTINGS[weighting or "size"]}
    partition, settings = SPLITS[split]
    return Experiment(
        **BASE,
        method=method,
        options={**CLIENTS, **options, "epochs": epochs},
        network_options={"depth": 20, **network},
        partition=partition,
        partition_options=settings,
        rounds=400 if epochs == 1 else 200,
    )


def central_cells() -> list[Cell[Experiment]]:
    """Table 1: the three treatments on all rows in one place."""
    cells = []
    for row, accuracy in TABLE_1.items():
        x = experiment_of("NWA" if row == "Flipout" else row, "IID")
        x = replace(x, central=True, rounds=200)
        cells.append(Cell(row, "centralised", x, {"accuracy": accuracy / 100}, retention, "one place"))
    return cells


def rule_cells(figures: Figures, epochs: int) -> list[Cell[Experiment]]:
    """Tables 2 and 3: treatments, rules and weightings on four splits."""
    return [
        Cell(row, split, experiment_of(row, split, epochs=epochs), _at(numbers, place), retention, f"E = {epochs}")
        for row, numbers in {**figures, SPARED: ()}.items()
        for place, split in enumerate(SPLITS)
    ]


def _at(numbers: tuple[float, ...], place: int) -> dict[str, float]:
    if not numbers:
        return {}
    return {"accuracy": numbers[2 * place] / 100, "nll": numbers[2 * place + 1]}


def one_round_cells() -> list[Cell[Experiment]]:
    """Table 4: one round of long local training, with and without pre-training on a tenth of the rows.

    DWC's clients give the KL its full weight in the round, and beside the printed rows that of the other rules. The
    rate falls to nothing within the round: DWC adds up what clients are moved by the noise of their steps.
    """
    cells = []
    for row, numbers in {**TABLE_4, "DWC light KL": (), "DWC light KL pre-trained": ()}.items():
        own = DWC if row.startswith("DWC") else {}
        full = {"kl_weight": 1.0} if own and "light" not in row else {}
        for place, split in enumerate(SPLITS):
            x = experiment_of("WS size", split)
            options = {**x.options, "epochs": 400, "lr_within": "falling", **own, **full}
            x = replace(x, rounds=1, evaluate_every=1, options=options)
            if row.endswith("pre-trained"):
                # What the server takes leaves unequal classes, which shards would straddle.
                partition, settings = ("labels_per_client", {"k": 2}) if split == "2-class" else SPLITS[split]
                x = replace(x, partition=partition, partition_options={**settings, "server": 0.1})
                before = {"kl_weight": VARIATIONAL["kl_weight"], "lr_within": "constant"}
                before |= {"norm_passes": 0} if own else {}
                x = replace(x, pretrain={"epochs": 100, "patience": 10, "validation": 0.1, "options": before})
            cells.append(Cell(row, split, x, _at(numbers, place), one_round, "one round"))
    return cells


def replaced_cells() -> list[Cell[Experiment]]:
    """Table 5: the prior is the last broadcast, E = 1, IID."""
    cells = []
    for row, numbers in TABLE_5.items():
        x = experiment_of(f"{row} size", "IID")
        x = replace(x, options={**x.options, "prior": "broadcast"})
        cells.append(Cell(row, "IID", x, _at(numbers, 0), retention, "prior replaced"))
    return cells


GAMMAS: dict[str, dict[str, Any]] = {
    "1e-6": {"kl": "constant", "kl_weight": 1e-6},
    "1e-4": {"kl": "constant", "kl_weight": 1e-4},
    "1 / n": {"kl": "1/n", "kl_weight": 1.0},
    "1e-2": {"kl": "constant", "kl_weight": 1e-2},
}
INITIAL = (1e-3, 0.1)
PRIORS = {"fixed": "fixed", "replaced": "broadcast"}
POOLS = {"WS": "ws", "log pool": "log_pool"}  # this paper's, and FedUAB's


def prior_cells() -> list[Cell[Experiment]]:
    """KL weight x initial scale x prior, under a rule of each paper: where does replacing the prior help? ResNet-8."""
    cells = []
    for pool, rule in POOLS.items():
        for prior, named in PRIORS.items():
            for gamma, weight in GAMMAS.items():
                for initial in INITIAL:
                    x = experiment_of("WS size", "IID")
                    options = {**x.options, **weight, "rule": rule, "prior": named, "initial": initial}
                    x = replace(x, options=options, rounds=100, network_options={"depth": 8})
                    cells.append(Cell(f"γ = {gamma} scale {initial:g}", f"{prior} {pool}", x, {}, None, "ablation"))
    return cells


METRICS = {
    "accuracy": "test.accuracy",
    "nll": "test.nll",
    "ece": "test.ece",
    "half retained by entropy: accuracy": "measured.entropy_50",
    "half retained by epistemic uncertainty: accuracy": "measured.epistemic_50",
}


DEPARTURES = (
    "Adam, scales that begin at .05, 20 test draws, crops and flips: nothing is printed",
    "the KL over rows and batch, 1 / (32 n), as the printed accuracies ask for; DWC's clients have 1 / n",
    "'a factor of .04 every round' is read as times .96; table 4's rate falls to nothing within its round, chosen for"
    " DWC on test images of digits",
    "DWC: BatchNorm's statistics are taken again of the pooled network, and the prior is the broadcast",
    "two classes a client, pre-trained: classes are dealt instead of shards, which unequal classes would straddle",
    "CIFAR-10: training in bfloat16",
)


def _table(title: str, cells: Cells, **more: str) -> Table[Experiment]:
    layout = Layout(departures=DEPARTURES)
    return Table(f"Statistical aggregation, {title}", cells, {**METRICS, **more}, SCALES, "agg", SEEDS, layout=layout)


TABLES: dict[str, Table[Experiment]] = {
    "agg-1": _table("table 1: centralised training", central_cells),
    "agg-2": _table("table 2: one local epoch", lambda: rule_cells(TABLE_2, 1)),
    "agg-3": _table("table 3: five local epochs", lambda: rule_cells(TABLE_3, 5)),
    "agg-4": _table(
        "table 4: one round, pre-trained or not",
        one_round_cells,
        **{"share of weights floored": "measured.floored"},
        **{"pre-trained, validation accuracy": "measured.pretrained_accuracy"},
    ),
    "agg-5": _table("table 5: the prior replaced every round", replaced_cells),
    "agg-prior": _table("ablation of the prior", prior_cells),
}
