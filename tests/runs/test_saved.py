"""A run of `fit` that was saved predicts as before, is scored on the rows that it is given, and never goes on."""

import json
import shutil

import numpy as np
import pytest
import torch
from torch import nn

import fedbayes as fb
from fedbayes.errors import InputError
from fedbayes.export.program import export
from fedbayes.model.likelihood import cox, hazard, mean_variance, normal
from fedbayes.runs.folder import resume

RANDOM = np.random.default_rng(0)


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.ReLU(), nn.Linear(12, 10))


def straight() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))


def digits(seed: int = 0) -> fb.data.Clients:
    return fb.data.load("digits").split(fb.partition.iid(volume=40), clients=3, seed=seed)


def measurements(offset: float = 5.0) -> fb.data.Clients:
    sites = {name: RANDOM.normal(offset, 2, (30, 3)).astype(np.float32) for name in ("north", "south")}
    pairs = {name: (x, 10 * x.sum(1, keepdims=True)) for name, x in sites.items()}
    return fb.data.from_clients(pairs, test=pairs["north"], standardise=True)


def wards() -> fb.data.Clients:
    ages = RANDOM.normal(60, 9, 40).round(1)
    table = {"age": ages, "ward": np.array(["a", "b"] * 20), "ill": np.where(ages > 60, "yes", "no")}
    return fb.data.from_tables({"aachen": table, "basel": table}, target="ill", seed=0)


CASES = {"an own network": (digits, two_layers), "regression": (measurements, straight), "tables": (wards, "linear")}


@pytest.mark.filterwarnings("ignore:.*in the same unit")
@pytest.mark.parametrize("name", CASES)
def test_what_was_saved_predicts_and_is_scored_as_before(name, tmp_path):
    clients_of, network = CASES[name]
    clients = clients_of()
    given, again = (network, network) if isinstance(network, str) else (network(), network())
    run = fb.fit(given, clients, method=fb.methods.feduab(epochs=1), rounds=2)
    fb.save(run, tmp_path / "run", network=network if isinstance(network, str) else None)
    loaded = fb.load(tmp_path / "run", network=None if isinstance(again, str) else again)
    x = clients.data.test_x[:7]
    for part in ("mean", "epistemic", "aleatoric"):
        torch.testing.assert_close(getattr(loaded.predict(x), part), getattr(run.predict(x), part))
    assert [r["round"] for r in loaded.journal] == [1, 2]
    with pytest.raises(InputError, match="no test rows to score"):
        loaded.scores()
    scored = fb.load(tmp_path / "run", network=None if isinstance(again, str) else again, clients=clients)
    assert scored.scores() == pytest.approx(run.scores(), rel=1e-5)


def lives() -> fb.data.Clients:
    x, ended = RANDOM.normal(size=(60, 3)).astype(np.float32), RANDOM.random((60, 1)) > 0.3
    y = np.concatenate([RANDOM.exponential(5, (60, 1)), ended], 1).astype(np.float32)
    return fb.data.from_clients([(x[:30], y[:30]), (x[30:], y[30:])], test=(x, y), kind="survival")


LIKELIHOODS = {
    "a fixed noise": (measurements, 1, normal(0.5)),
    "a learned noise": (measurements, 1, normal(learn=True)),
    "mean and variance": (measurements, 2, mean_variance(0.01)),
    "hazards": (lives, 3, hazard((1, 2, 5), proportional=False)),
    "cox": (lives, 1, cox((1, 2, 5))),
}


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_the_likelihood_is_saved_with_the_posterior(name, tmp_path):
    clients_of, outputs, likelihood = LIKELIHOODS[name]
    clients = clients_of()
    run = fb.fit(nn.Linear(3, outputs), clients, method=fb.methods.feduab(epochs=1), rounds=2, likelihood=likelihood)
    fb.save(run, tmp_path / "run")
    p, q = (r.predict(clients.data.test_x) for r in (run, fb.load(tmp_path / "run", network=nn.Linear(3, outputs))))
    for part in ("mean", "epistemic", "aleatoric"):
        torch.testing.assert_close(getattr(q, part), getattr(p, part))


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "run"
    return fb.save(fb.fit(straight(), measurements(), method="fedavg", rounds=1), folder)


@pytest.mark.parametrize(
    ("clients", "words"),
    [(digits, "clients: shape of their rows is"), (lambda: measurements(50.0), "clients: their targets are scaled")],
    ids=["other rows", "other units"],
)
def test_rows_of_another_kind_are_refused(home, clients, words):
    with pytest.raises(InputError, match=words):
        fb.load(home, network=straight(), clients=clients())


@pytest.mark.parametrize("named", [["classes", {}], ["real", {"scale": "wide"}], ["custom", {}], 5], ids=str)
def test_a_likelihood_that_can_not_be_is_refused(home, tmp_path, named):
    shutil.copytree(home, tmp_path / "run")
    (path,) = (tmp_path / "run").rglob("fedbayes.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "likelihood": named}))
    with pytest.raises(InputError, match=r"fedbayes.json can't be read"):
        fb.load(tmp_path / "run", network=straight())


def test_another_network_is_refused_and_so_is_going_on(home):
    with pytest.raises(InputError, match="give the network that was trained"):
        fb.load(home)
    with pytest.raises(InputError, match=r"network: .* trained"):
        fb.load(home, network=nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1)))
    with pytest.raises(InputError, match="holds no checkpoint to go on from"):
        resume(home)


def test_a_network_whose_weights_have_other_names_is_told_so(home):
    others = nn.Sequential(nn.Flatten(), nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))
    with pytest.raises(InputError, match=r"it has no weight '0.bias'; give the network that was trained"):
        fb.load(home, network=others)


def test_it_is_a_warm_start(home):
    loaded = fb.load(home, network=straight())
    run = fb.fit(straight(), measurements(), method="fedavg", rounds=1, init=loaded)
    assert run.journal[-1]["train"]["loss"] > 0


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_a_network_in_half_precision_predicts_in_float32_and_is_saved(kind, tmp_path):
    clients = digits()
    run = fb.fit(two_layers().to(kind), clients, method=fb.methods.feduab(epochs=1), rounds=1)
    p = run.predict(clients.data.test_x)
    assert p.probs.dtype == torch.float32
    torch.testing.assert_close(p.probs.sum(1), torch.ones(len(p.probs)))
    loaded = fb.load(fb.save(run, tmp_path / "run"), network=two_layers().to(kind))
    torch.testing.assert_close(loaded.predict(clients.data.test_x).probs, p.probs)


def test_a_file_in_the_place_of_the_folder_is_told(home, tmp_path):
    (tmp_path / "notes.txt").write_text("")
    run = fb.load(home, network=straight())
    for place in (tmp_path / "notes.txt", tmp_path / "notes.txt" / "run"):
        for write in (fb.save, export):
            with pytest.raises(InputError, match="is a file, or below one"):
                write(run, place)


def test_a_clients_own_model_is_saved_and_predicts_as_before(tmp_path):
    clients = digits()
    run = fb.fit(two_layers(), clients, method=fb.methods.fedper(epochs=1), rounds=2).personal(1).as_run
    fb.save(run, tmp_path / "own")
    loaded, x = fb.load(tmp_path / "own", network=two_layers()), clients.data.test_x[:7]
    torch.testing.assert_close(loaded.predict(x).mean, run.predict(x).mean)
    again = fb.load(fb.save(loaded, tmp_path / "again"), network=two_layers())  # its journal is not there either
    torch.testing.assert_close(again.predict(x).mean, run.predict(x).mean)


def test_personal_methods_are_saved_for_reports_alone_and_say_so(tmp_path):
    run = fb.fit(two_layers(), digits(), method=fb.methods.fedper(epochs=1), rounds=1)
    with pytest.warns(UserWarning, match="is for reports, and holds no posterior: this method has no global model"):
        fb.save(run, tmp_path / "run")
    assert not (tmp_path / "run" / "model").exists()
    fb.write_report(tmp_path / "run")
    with pytest.raises(InputError, match="holds no posterior; to predict"):
        fb.load(tmp_path / "run", network=two_layers())


class Packed(nn.Module):
    """A recurrent network over padded texts, which refuses a text without words."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.words, self.layer = nn.Embedding(20, 6, padding_idx=0), kind(6, 5, batch_first=True)
        self.head = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        lengths = (x > 0).sum(1).cpu()
        packed = nn.utils.rnn.pack_padded_sequence(self.words(x), lengths, batch_first=True, enforce_sorted=False)
        last = self.layer(packed)[1]
        return self.head((last[0] if isinstance(last, tuple) else last)[-1])


class Attending(nn.Module):
    """A Transformer's encoder under a mask of padding, which refuses a text without words too."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(20, 8), nn.Linear(8, 3)
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.words(x), src_key_padding_mask=x == 0)[:, 0])


class Shifting(nn.Module):
    """It writes into its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x -= 0.5
        return self.head(x)


def texts(kind: torch.dtype = torch.int64) -> fb.data.Clients:
    random = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 8, (45, 1), generator=random)
    x = torch.randint(1, 20, (45, 7), generator=random) * (torch.arange(7) < lengths)
    pairs = list(zip(x.to(kind).split(15), torch.randint(3, (45,), generator=random).split(15)))
    return fb.data.from_clients(pairs, test=pairs[0], kind="classes", classes=3)


OWN = {
    "gru": (lambda: Packed(nn.GRU), texts),
    "lstm": (lambda: Packed(nn.LSTM), texts),
    "encoder": (Attending, texts),
    "writes into its inputs": (Shifting, lambda: texts(torch.float32)),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:There is a performance drop")
@pytest.mark.parametrize("old", [False, True], ids=["", "a file of old"])
@pytest.mark.parametrize("name", OWN)
def test_a_network_is_not_run_to_load_it(name, old, tmp_path):
    network, clients = OWN[name][0], OWN[name][1]()
    run = fb.fit(network(), clients, method=fb.methods.feduab(epochs=1, draws=3), rounds=1)
    held = clients.data.x.clone()
    folder = fb.save(run, tmp_path / "run")
    if old:  # which does not say how the network is run
        path = folder / "model" / "fedbayes.json"
        path.write_text(json.dumps({n: v for n, v in json.loads(path.read_text()).items() if n != "runs"}))
    loaded, x = fb.load(folder, network=network()), clients.data.test_x[:7].clone()
    torch.testing.assert_close(loaded.predict(x).probs, run.predict(x).probs)
    assert torch.equal(x, clients.data.test_x[:7])
    assert torch.equal(clients.data.x, held)
    mine = run.personal(1)
    again = fb.load(fb.save(mine.as_run, tmp_path / "mine"), network=network())
    torch.testing.assert_close(again.predict(x).probs, mine.predict(x).probs)


def test_a_lazy_network_gets_its_weights_from_what_was_trained(tmp_path):
    def lazy() -> nn.Module:
        return nn.Sequential(nn.LazyLinear(5), nn.ReLU(), nn.LazyLinear(3))

    clients = texts(torch.float32)
    run = fb.fit(lazy(), clients, method="fedavg", rounds=1)
    loaded, x = fb.load(fb.save(run, tmp_path / "run"), network=lazy()), clients.data.test_x
    torch.testing.assert_close(loaded.predict(x).probs, run.predict(x).probs)
