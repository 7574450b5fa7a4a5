"""The card of a model: what it is, what it scores where, and what it does not know, as Markdown with a head in YAML."""

from __future__ import annotations

import json
from typing import Any

from fedbayes.scores.by_site import HIGHER, TARGETS, Figure, figures
from fedbayes.training.personal import in_units
from fedbayes.training.tested import Finished, by_site, predictions, rows_of
from fedbayes.version import __version__

SITES = 64  # whose scores a card lists
TASKS = {"classes": "tabular-classification", "labels": "tabular-classification", "real": "tabular-regression"}


def card(run: Finished, title: str, network: str | None = None) -> str:
    """The card of a run: scores as its report has them, on all test rows and by site, with one standard error."""
    task = run.task
    data, clients, private = task.clients.data, task.clients, task.privacy
    whole = _scores(run)
    lines = [*_head(run, whole), f"# {title}", "", _sentence(run), ""]
    if private is not None:
        lines += [f"Trained with differential privacy of {private.level}: epsilon {run.epsilon:.4g}.", ""]
    lines += ["## Use", "", "```python", "import fedbayes as fb", ""]
    given = "" if network else ", network=network"
    note = "" if network else "  # the nn.Module that was trained"
    lines += [f'run = fb.load("hf://{title}"{given}){note}', f"p = run.predict(x)  # x: {_inputs(run)}"]
    means = {"real": "p.mean", "survival": "p.survival"}.get(data.kind, "p.probs")
    lines += [f"{means}, p.aleatoric, p.epistemic", "```", ""]
    lines += ["## Scores", ""]
    if whole:
        lines += [f"On {len(data.test_x)} test rows; after ± stands one standard error over resamples of the rows.", ""]
        lines += _table(["score", "value"], [[_titled(name), str(figure)] for name, figure in whole.items()])
        if (
            private is None
            and clients.names
            and len(clients) <= SITES
            and any(len(clients.test_rows(k)) for k in range(len(clients)))
        ):
            lines += ["", "By site, each on its own test rows:", "", *_by_site(run)]
    else:
        lines += ["None: the data have no test rows, or they are private."]
    lines += ["", "## What it does not know", "", _doubt(run, whole), ""]
    lines += [f"Written by fedbayes {__version__}.", ""]
    return "\n".join(lines)


def _scores(run: Finished) -> dict[str, Figure]:
    privacy, data = run.task.privacy, run.task.clients.data
    if not len(data.test_x) or (privacy is not None and not privacy.public_test):
        return {}
    p, at, _ = predictions(run)
    if p is None:
        return {}
    rows = rows_of(p, in_units(run.task, data.test_y[at].cpu()))
    return {n: f for n, f in figures(p.kind, rows, resamples=100, seed=run.task.seed).items() if n != "count"}


def _titled(name: str) -> str:
    """A score with an arrow that says which way is better, or the number that it should be."""
    words = name.replace("_", " ")
    return f"{words} ({TARGETS[name]:g})" if name in TARGETS else f"{words} {'↑' if name in HIGHER else '↓'}"


def _head(run: Finished, whole: dict[str, Figure]) -> list[str]:
    """The front matter that the Hub reads; JSON is YAML."""
    data = run.task.clients.data
    head: dict[str, Any] = {
        "library_name": "fedbayes",
        "tags": ["fedbayes", "federated-learning", "bayesian", "uncertainty", run.task.method],
    }
    metrics = [{"type": name, "value": round(figure.value, 6)} for name, figure in whole.items()]
    if metrics:
        kind = TASKS.get(data.kind, "other")
        result = {"task": {"type": kind}, "dataset": {"name": data.name, "type": data.name}, "metrics": metrics}
        head["model-index"] = [{"name": run.task.method, "results": [result]}]
    return ["---", *(f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in head.items()), "---", ""]


def _sentence(run: Finished) -> str:
    task = run.task
    q = run.posterior
    many = f"{q.mean.shape[-1]:,} weights"
    what = "point estimate of" if type(q).__name__ == "Point" else f"posterior ({type(q).__name__}) over"
    return (
        f"A {what} {many}, trained by `{task.method}` across {len(task.clients)} clients of {task.clients.data.name} "
        f"that kept their rows, in {run.progress.state.round} rounds."
    )


def _inputs(run: Finished) -> str:
    data = run.task.clients.data
    if data.coding is not None:
        return (
            "a file, a data frame or a mapping with columns "
            + ", ".join(column.name for column in data.coding.columns)[:200]
        )
    return f"[N, {', '.join(map(str, data.shape))}] of {str(data.x.dtype).removeprefix('torch.')}, as the data came"


def _by_site(run: Finished) -> list[str]:
    found = by_site(run)
    names = found.names
    rows = [[site, str(count), *(str(found[site][n]) for n in names)] for site, count in zip(found.sites, found.rows)]
    rows.append(["spread", "", *(f"{found.spread(n):.3f}" for n in names)])
    return _table(["site", "rows", *map(_titled, names)], rows)


def _doubt(run: Finished, whole: dict[str, Figure]) -> str:
    lines = [
        "Rows unlike those of the clients above get predictions too: look at `p.epistemic`, and at "
        "`fb.ood` for scores by distance, before you act on one."
    ]
    if type(run.posterior).__name__ == "Point":
        lines.append("It is a point estimate: its epistemic part is zero everywhere, which is no knowledge.")
    if "ece" in whole:
        lines.append(f"Its confidence is off by {whole['ece'].value:.3f} on average (ECE) on the rows above.")
    return " ".join(lines)


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return [f"| {' | '.join(head)} |", "|" + "---|" * len(head), *(f"| {' | '.join(row)} |" for row in escaped)]
