"""Nodes that have a table each: with the coding that their sites agreed on, they train what one machine would."""

from dataclasses import replace

import numpy as np
import torch
from in_process import InProcess

import fedbayes as fb
from fedbayes.experiments.experiment import Experiment
from fedbayes.flower.federated import carried, run
from fedbayes.runs.folder import run as here

SITES = ("aachen", "basel")


def site(client, folder):
    """A table of one site, or one typical row at the server."""
    if client is None:
        return fb.data.blank(f"{folder}/coding.json")
    return fb.data.from_tables(f"{folder}/{SITES[client]}.csv", coding=f"{folder}/coding.json").data


def test_tables_stay_with_their_nodes(tmp_path, monkeypatch):
    random = np.random.default_rng(0)
    files = []
    for k, name in enumerate(SITES):
        x = random.normal(k, 1 + k, 30)
        lines = [f"{v:.3f},{'ab'[i % 2]},{'yes' if v > k else 'no'}" for i, v in enumerate(x)]
        lines[4] = "," + lines[4].partition(",")[2]
        (tmp_path / f"{name}.csv").write_text("\n".join(["dose,ward,ill", *lines]))
        fb.data.save_summaries(fb.data.summary_of(tmp_path / f"{name}.csv", "ill"), tmp_path / f"{name}.json")
        files.append(tmp_path / f"{name}.json")
    fb.data.agree_on(files, "ill").save(tmp_path / "coding.json")
    x = Experiment(
        data="test_tables_there:site",
        data_options={"folder": str(tmp_path)},
        clients=2,
        network="linear",
        method="pvi",
        rounds=2,
        options={"epochs": 2},
        flower={"wait": 5.0, "timeout": 20.0},
    )
    far = run(carried(replace(x, engine="flower")), tmp_path / "far", InProcess(carried(replace(x, engine="flower"))))
    near = here(replace(x, engine="loop", flower={}), tmp_path / "near")
    torch.testing.assert_close(far["pvi"].posterior.mean, near["pvi"].posterior.mean, atol=1e-5, rtol=0)
    assert fb.data.read_coding(tmp_path / "far" / "coding.json") == fb.data.read_coding(tmp_path / "coding.json")
    new = {"dose": [1.5], "ward": ["b"]}
    torch.testing.assert_close(far["pvi"].predict(new).probs, near["pvi"].predict(new).probs, atol=1e-4, rtol=0)
