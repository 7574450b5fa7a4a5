"""Who holds what: label counts of clients as a picture and as a table."""

from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from fedbayes.data.dataset import Clients


def label_figure(clients: Clients, *, first: int = 30, title: str = "", path: str | Path | None = None) -> Any:
    """A bubble per client and label, its area the number of rows, for the first clients; the bars above are volumes.

    Gives the matplotlib figure; with `path` also writes it there.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    counts = clients.label_counts()[:first].numpy()
    shown, labels = counts.shape
    figure = Figure(figsize=(max(4.0, 1.6 + 0.24 * shown), max(2.6, 1.5 + 0.24 * labels)), layout="constrained")
    grid = figure.add_gridspec(2, 1, height_ratios=(1, max(2.0, labels / 3)))
    main = figure.add_subplot(grid[1])
    top = figure.add_subplot(grid[0], sharex=main)
    client, label = counts.nonzero()
    held = counts[client, label]
    main.scatter(client, label, s=170 * held / max(held.max(), 1), c="#3b6ea5", linewidths=0)
    main.set(
        xlabel="client" if shown == len(clients) else f"client (first {shown} of {len(clients)})",
        ylabel="label",
        xlim=(-0.7, shown - 0.3),
        ylim=(-0.7, labels - 0.3),
    )
    main.set_yticks(range(0, labels, max(1, labels // 26)))
    if clients.data.class_names and labels <= 26:
        main.set_yticks(range(labels), clients.data.class_names)
    main.xaxis.set_major_locator(MaxNLocator(integer=True))
    main.set_axisbelow(True)
    main.grid(color="#e6e6e6", linewidth=0.6)
    top.bar(range(shown), counts.sum(1), color="#b8c9dc", width=0.7)
    top.set_ylabel("rows")
    top.tick_params(labelbottom=False)
    top.set_title(title or str(clients).removeprefix("Clients(").removesuffix(")"), fontsize=10)
    for axes in (main, top):
        axes.spines[["top", "right"]].set_visible(False)
    if path is not None:
        figure.savefig(path, dpi=160)
    return figure


def label_table(clients: Clients, *, first: int = 20) -> Table:
    """Label counts of the first clients, and a last line with all clients together."""
    counts = clients.label_counts()
    names = clients.data.class_names or tuple(str(c) for c in range(counts.shape[1]))
    table = Table(title=escape(str(clients).removeprefix("Clients(").removesuffix(")")))
    table.add_column("client", justify="right", no_wrap=True)
    for name in (*names, "rows", "test"):
        table.add_column(escape(name), justify="right")
    tests = clients.test.sizes
    for k in range(min(first, len(clients))):
        row = [str(n) if n else "." for n in counts[k].tolist()]
        table.add_row(escape(clients.name(k)), *row, str(int(clients.sizes[k])), str(int(tests[k])))
    if len(clients) > first:
        table.add_row("...", *[""] * (len(names) + 2))
    total = [str(n) for n in counts.sum(0).tolist()]
    table.add_section()
    table.add_row("all", *total, str(int(clients.sizes.sum())), "")
    return table
