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


def experiment(folder, epochs):
    """Two rounds of nodes that have these tables."""
    return Experiment(
        data="test_tables_there:site",
        data_options={"folder": str(folder)},
        clients=2,
        network="linear",
        method="pvi",
        rounds=2,
        options={"epochs": epochs},
        flower={"wait": 5.0, "timeout": 20.0},
    )


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
    x = experiment(tmp_path, epochs=2)
    far = run(carried(replace(x, engine="flower")), tmp_path / "far", InProcess(carried(replace(x, engine="flower"))))
    near = here(replace(x, engine="loop", flower={}), tmp_path / "near")
    torch.testing.assert_close(far["pvi"].posterior.mean, near["pvi"].posterior.mean, atol=1e-5, rtol=0)
    assert fb.data.read_coding(tmp_path / "far" / "coding.json") == fb.data.read_coding(tmp_path / "coding.json")
    new = {"dose": [1.5], "ward": ["b"]}
    torch.testing.assert_close(far["pvi"].predict(new).probs, near["pvi"].predict(new).probs, atol=1e-4, rtol=0)


def test_nodes_learn_survival_from_tables_of_their_own(tmp_path):
    random, files = np.random.default_rng(0), []
    for name in SITES:
        dose = random.normal(5, 1, 40)
        event, lost = random.exponential(50 * np.exp(5 - dose)), random.exponential(90, 40)
        rows = [f"{d:.2f},{min(e, c):.1f},{int(e <= c)}" for d, e, c in zip(dose, event, lost)]
        rows[4] = "," + rows[4].partition(",")[2]
        (tmp_path / f"{name}.csv").write_text("\n".join(["dose,days,died", *rows]))
        said = fb.data.summary_of(tmp_path / f"{name}.csv", "days", event="died")
        fb.data.save_summaries(said, tmp_path / f"{name}.json")
        files.append(tmp_path / f"{name}.json")
    fb.data.agree_on(files, "days", event="died", times=[10, 30, 90]).save(tmp_path / "coding.json")
    x = replace(experiment(tmp_path, epochs=5), engine="flower")
    far = run(carried(x), tmp_path / "far", InProcess(carried(x)))["pvi"]
    assert "concordance" in far.journal[-1]["test"]
    p = far.predict({"dose": [3.0, np.nan, 7.0]})
    assert p.times == (10.0, 30.0, 90.0)
    assert (p.survival[0] > p.survival[2]).all()
