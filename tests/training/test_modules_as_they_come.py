"""Modules and rows as users have them: several inputs, masks, records as outputs, half precision, recomputation."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import fedbayes as fb
from fedbayes.data import Fields
from fedbayes.errors import InputError

LENGTH, WORDS = 5, 12


@dataclass
class Output:
    """As transformers gives it: a loss that is None, then logits."""

    loss: Tensor | None
    logits: Tensor


class Reader(nn.Module):
    """A miniature of an encoder for texts: tokens and a mask come in by name, padding must change nothing."""

    def __init__(self, out=lambda logits: Output(None, logits)) -> None:
        super().__init__()
        self.words, self.place = nn.Embedding(WORDS, 8, padding_idx=0), nn.Embedding(LENGTH, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.classifier, self.out = nn.Linear(8, 3), out
        self.register_buffer("position_ids", torch.arange(LENGTH)[None])

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None) -> object:
        hidden = self.words(input_ids) + self.place(self.position_ids)
        dead = None if attention_mask is None else attention_mask == 0
        hidden = self.layer(hidden, src_key_padding_mask=dead)
        return self.out(self.classifier(hidden[:, 0]))


def texts(n: int, seed: int) -> tuple[dict[str, Tensor], Tensor]:
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, WORDS, (n, LENGTH), generator=random)
    live = torch.arange(LENGTH) < torch.randint(2, LENGTH + 1, (n, 1), generator=random)
    return {"input_ids": ids * live, "attention_mask": live}, ids[:, 0] % 3


SITES = [texts(n, seed) for seed, n in enumerate((7, 12, 9))]
TABLE = {"pattern": ["words", "layer.*"], "rank": 2}


def trained(network: nn.Module, method: str = "feduab", sites=SITES, **options) -> fb.Run:
    made = fb.methods.method_named(method, {"epochs": 1, "batch": 4})
    given = {"adapters": TABLE, **options}
    return fb.fit(network, fb.data.from_clients(sites, test=sites[0], classes=3), method=made, rounds=1, **given)


def reader(*args, **named) -> Reader:
    torch.manual_seed(0)
    return Reader(*args, **named)


@pytest.mark.parametrize("method", ["fedavg", "feduab"])
def test_rows_that_are_dicts_train_alike_in_both_engines_and_predict(method):
    runs = [trained(reader(), method, engine=engine) for engine in ("loop", "stacked")]
    assert not runs[1].journal[0].get("notes")
    torch.testing.assert_close(*(run.parts["model"].mean for run in runs), rtol=1e-5, atol=1e-7)
    x, _ = texts(6, 9)
    a, b = (run.predict(x).probs for run in runs)
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    # What is behind the mask is not seen.
    other = {**x, "input_ids": torch.where(x["attention_mask"], x["input_ids"], 7)}
    torch.testing.assert_close(runs[0].predict(other).probs, a, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "out",
    [
        lambda logits: logits,
        lambda logits: {"logits": logits, "hidden": logits + 1},
        lambda logits: (logits, logits + 1),
        lambda logits: {"out": logits},
    ],
    ids=["tensor", "dict", "tuple", "one entry"],
)
def test_every_form_of_output_gives_the_same(out):
    x, y = SITES[0]
    runs = [fb.fit(network, [(x, y)], method="fedavg", rounds=0) for network in (reader(out), reader())]
    assert torch.equal(*(run.predict(x).probs for run in runs))


def test_inputs_without_names_are_handed_over_in_order():
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide, self.head = nn.Linear(4, 6), nn.Linear(8, 3)

        def forward(self, table: Tensor, image: Tensor) -> Tensor:
            return self.head(torch.cat([self.wide(table).tanh(), image.mean((-2, -1))], -1))

    random = torch.Generator().manual_seed(0)
    x = torch.randn(20, 4, generator=random), torch.randint(256, (20, 2, 3, 3), generator=random, dtype=torch.uint8)
    y = torch.arange(20) % 3
    data = fb.data.from_arrays(x, y, x, y)
    assert data.x.dtype == torch.float32
    assert torch.equal(data.prepare(data.x)[1], x[1].float() / 255)
    run = fb.fit(Two(), data.split(fb.partition.iid(), clients=2), rounds=1, adapters={"pattern": "wide", "rank": 1})
    assert run.predict(x).probs.shape == (20, 3)


def test_a_body_in_half_precision_has_adapters_in_full():
    run = trained(reader().to(torch.bfloat16), engine="stacked")
    assert run.parts["model"].mean.dtype == torch.float32
    assert run.task.program.model.frozen["frozen"]["layer.linear1.weight"].dtype == torch.bfloat16
    assert run.predict(texts(3, 4)[0]).probs.dtype == torch.float32
    merged = run.module()
    assert {p.dtype for p in merged.parameters()} == {torch.bfloat16}
    x, _ = texts(4, 5)
    assert merged(**x).logits.dtype == torch.bfloat16


def test_weights_that_need_no_gradient_are_not_trained():
    network = reader()
    network.classifier.bias.requires_grad_(False)
    network.place.requires_grad_(False)
    whole = trained(network, adapters=None).parts["model"].layout.names
    assert not {"classifier.bias", "place.weight"} & {*whole}
    assert "classifier.bias" not in trained(network).parts["model"].layout.names


def test_recomputation_that_a_module_asks_for_is_left_out():
    class Asking(Reader):
        gradient_checkpointing = True

        def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> object:
            assert not (self.gradient_checkpointing and self.training)
            return super().forward(input_ids, attention_mask)

    torch.manual_seed(0)
    network = Asking()
    network.gradient_checkpointing = True
    same = trained(network).parts["model"].mean
    assert network.gradient_checkpointing, "the user's own module is as it was"
    torch.testing.assert_close(same, trained(reader()).parts["model"].mean, rtol=0, atol=0)


def test_rows_of_a_data_set_are_read_by_the_names_of_their_columns():
    (x, y) = texts(6, 0)
    rows = [
        {"input_ids": x["input_ids"][i].tolist(), "attention_mask": x["attention_mask"][i].tolist(), "label": int(y[i])}
        for i in range(6)
    ]
    columns = (("input_ids", "attention_mask"), "label")
    data = fb.data.from_datasets(rows, columns=columns)
    assert torch.equal(data.x, fb.data.from_arrays(x, y).x)
    assert data.prepare == Fields.of(x)
    pairs = [({"input_ids": row["input_ids"], "attention_mask": row["attention_mask"]}, row["label"]) for row in rows]
    assert torch.equal(fb.data.from_datasets(pairs).x, data.x)


@pytest.mark.parametrize(
    ("x", "says"),
    [
        ({"input_ids": torch.zeros(4, 6).long(), "attention_mask": torch.ones(4, 5) > 0}, "pad rows to one length"),
        ({"input_ids": torch.zeros(4, 5).long()}, "has the fields input_ids, rows here have input_ids, attention_mask"),
        ({"input_ids": torch.zeros(4, 5), "attention_mask": torch.ones(4, 5) > 0}, "keep their type"),
        ({"input_ids": torch.zeros(3, 5).long(), "attention_mask": torch.ones(4, 5) > 0}, "give as many"),
    ],
)
def test_rows_of_other_fields_are_refused(x, says):
    with pytest.raises(ValueError, match=says):
        fb.data.from_clients([SITES[0], (x, torch.arange(4) % 3)], classes=3)


def test_a_network_that_can_not_take_the_fields_is_told_what_they_are():
    with pytest.raises(InputError, match=r"can't take inputs of input_ids \[5\] \(torch.int64\), attention_mask \[5\]"):
        trained(nn.Linear(5, 3), adapters=None)
    large = {"a": torch.tensor([[2**24 + 1]]), "b": torch.zeros(1, 1)}
    with pytest.raises(ValueError, match=r"field a has numbers above 2\^24"):
        fb.data.from_arrays(large, torch.zeros(1).long())


def transformers():
    return pytest.importorskip("transformers", reason="transformers is not installed: its modules are tested by copies")


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_modules_of_transformers(kind):
    library = transformers()
    torch.manual_seed(0)
    if kind == "bert":
        sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
        network = library.BertForSequenceClassification(library.BertConfig(vocab_size=WORDS, num_labels=3, **sizes))
    else:
        sizes = {"n_layer": 1, "n_embd": 8, "n_head": 2, "pad_token_id": 0}
        network = library.GPT2ForSequenceClassification(library.GPT2Config(vocab_size=WORDS, num_labels=3, **sizes))
    network.gradient_checkpointing_enable()
    runs = [trained(network, engine=engine, adapters={"rank": 2}) for engine in ("loop", "stacked")]
    assert not runs[1].journal[0].get("notes")
    torch.testing.assert_close(*(run.parts["model"].mean for run in runs), rtol=1e-4, atol=1e-6)
    x, _ = texts(5, 3)
    merged = runs[0].module()
    mean = fb.fit(network, [SITES[0]], method="fedavg", rounds=0, adapters={"rank": 2}).module()
    torch.testing.assert_close(mean(**x).logits, network.eval()(**x).logits, rtol=1e-4, atol=1e-6)
    assert type(merged) is type(network)
