"""The aggregation study: its cells are what the paper says, train at small scale, and are drawn."""

from dataclasses import replace

import pytest
import torch

import fedbayes as fb
from fedbayes.data.partition import PARTITIONS
from fedbayes.errors import InputError
from fedbayes.experiments.build import build
from fedbayes.papers import figures
from fedbayes.papers.aggregation import KINDS, RETAINED, SPLITS, TABLES, retention
from fedbayes.papers.aggregation_scales import SCALES, small
from fedbayes.papers.cells import Request
from fedbayes.papers.rows import rows_of
from fedbayes.papers.seeds import SEEDS, file_name
from fedbayes.runs.sweep import program_of


def test_the_tables_have_the_papers_cells():
    count = {name: len(table.cells()) for name, table in TABLES.items()}
    assert count == {"agg-1": 3, "agg-2": 64, "agg-3": 64, "agg-4": 20, "agg-5": 5, "agg-prior": 32}


@pytest.mark.parametrize(
    ("table", "row", "column", "printed"),
    [
        ("agg-2", "Conflation", "2-class", (0.5309, 1.46)),
        ("agg-2", "NWA size", "Dirichlet 5", (0.7989, 0.62)),
        ("agg-3", "MC dropout", "Dirichlet .5", (0.8791, 0.357)),
        ("agg-4", "DWC", "2-class", (0.1164, 2.69)),
        ("agg-5", "LP", "IID", (0.4614, 1.46)),
    ],
)
def test_figures_stand_where_they_are_printed(table, row, column, printed):
    (cell,) = [c for c in TABLES[table].cells() if (c.row, c.column) == (row, column)]
    assert (cell.published["accuracy"], cell.published["nll"]) == pytest.approx(printed)


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("scale", SCALES)
def test_every_file_has_a_name_of_its_own(table, scale):
    published = TABLES[table]
    names = [file_name(published.family, cell, SCALES[scale](cell.experiment)) for cell in published.cells()]
    assert len(set(names)) == len(names)


def test_rules_weightings_and_splits_are_one_program():
    cells = [c for c in TABLES["agg-2"].cells() if c.experiment.method == "fedvi"]
    assert len({program_of(c.experiment) for c in cells}) == 1
    assert len({program_of(c.experiment) for c in TABLES["agg-prior"].cells()}) == 4  # two priors, KL / n or not


@pytest.mark.parametrize("table", TABLES)
def test_one_cell_of_every_row_can_be_built(table):
    rows = {}
    for cell in TABLES[table].cells():
        rows.setdefault(cell.row, cell)
    for cell in list(rows.values())[:3]:
        task = build(small(cell.experiment))
        assert len(task.clients) == (1 if table == "agg-1" else 10)
        assert (task.before is not None) == ("pre-trained" in cell.row)


def test_two_classes_a_client_of_equal_size_as_in_the_paper():
    """20 shards of 2,500 from ten classes of 5,000, two of different classes each."""
    labels = torch.arange(10).repeat_interleave(50).numpy()
    data = fb.data.Dataset(
        "made", torch.zeros(500, 1), torch.tensor(labels), torch.zeros(0, 1), torch.zeros(0).long(), "classes", 10
    )
    partition, options = SPLITS["2-class"]
    counts = data.split(PARTITIONS[partition](**options), clients=10, seed=3).label_counts()
    assert (counts.sum(1) == 50).all()
    assert ((counts == 25).sum(1) == 2).all()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Two cells of the small table after one round."""
    output = tmp_path_factory.mktemp("agg")
    only = ["Conflation", "NWA size", "IID"]
    SEEDS.train(TABLES["agg-2"], output, Request(only=only, scale="small", changes={"rounds": 1}))
    return output


def test_small_cells_train_and_no_figure_of_another_set_stands_beside_them(trained):
    table = TABLES["agg-2"]
    rows = rows_of("agg-2", table, trained, "small")
    assert {(r["row"], r["column"]) for r in rows} == {("Conflation", "IID"), ("NWA size", "IID")}
    assert {r["metric"] for r in rows} == set(table.metrics)
    (one,) = [r for r in rows if (r["row"], r["metric"]) == ("Conflation", "accuracy")]
    assert one["published"] is None
    assert 0 < one["ours"] <= 1


def test_figures_are_drawn_from_the_cells_there_are(trained):
    for name in ("agg-2", "agg-3"):
        made = figures.draw(name, trained, "small")
        assert [p.suffix for p in made] == [".svg", ".png"]
        assert "Conflation" in made[0].read_text()
        assert "2-class" not in made[0].read_text()  # no empty panel
    with pytest.raises(InputError, match="fedbayes table agg-3"):
        figures.draw("agg-4", trained, "small")
    with pytest.raises(InputError, match="figure"):
        figures.draw("agg-1", trained)


def test_retention_is_the_accuracy_of_the_most_certain():
    clients = fb.data.load("digits").split(fb.partition.iid(), clients=2)
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    method = fb.methods.fedvi(epochs=1, test_draws=5)
    run = fb.fit(network, clients, method=method, rounds=1)
    made = retention(run)
    p, y = run.predict(clients.data.test_x), clients.data.test_y
    right = (p.probs.argmax(-1) == y).double()
    assert made["entropy_100"] == pytest.approx(float(right.mean()))
    half = p.epistemic.sum(-1).argsort()[: round(len(y) / 2)]
    assert made["epistemic_50"] == pytest.approx(float(right[half].mean()))
    assert len(made) == len(KINDS) * (len(RETAINED) + 1)


def test_a_shortened_schedule_keeps_the_shape():
    whole = TABLES["agg-3"].cells()[0].experiment
    short = SCALES["short"](whole)
    assert (short.rounds, short.options["lr_silent"]) == (40, 5)
    assert short.options["lr_decay"] == pytest.approx(0.96**2)
    once = SCALES["short"](TABLES["agg-4"].cells()[4].experiment)
    assert (once.rounds, once.options["epochs"], once.pretrain["epochs"]) == (1, 160, 40)
    assert replace(short, rounds=200) != whole


def test_in_one_long_round_dwc_clients_keep_to_what_the_server_knew():
    found = {cell.row: cell.experiment for cell in TABLES["agg-4"].cells() if cell.column == "IID"}
    dwc, light, ws = (found[row] for row in ("DWC pre-trained", "DWC light KL pre-trained", "WS pre-trained"))
    assert (dwc.options["rule"], dwc.options["prior"], dwc.options["kl_weight"]) == ("dwc", "broadcast", 1.0)
    assert light == replace(dwc, options={**dwc.options, "kl_weight": ws.options["kl_weight"]})
    for x in (dwc, light, ws):
        assert x.options["lr_within"] == "falling"
        assert x.pretrain["options"]["lr_within"] == "constant"
        assert x.pretrain["options"]["kl_weight"] == ws.options["kl_weight"]
