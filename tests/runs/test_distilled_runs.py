"""FedPPD and its relatives in run folders: checkpoints hold both networks, and a run goes on exactly."""

import shutil
from dataclasses import replace

import pytest
from run_content import content, same

from fedbayes.runs.folder import load, resume, run

SERVER = {"server_batch": 8, "server_epochs": 2, "swa_start": 2, "swa_every": 1}
CASES = {
    "fedppd": {},
    "fedppd_distill": SERVER,
    "fedbe": SERVER,
    "fedswag": {"covariance": "low_rank", "rank": 3, "swag_rounds": 2},
    "fedpa": {"samples": 2},
}


@pytest.mark.parametrize("engine", ["loop", "stacked"])
@pytest.mark.parametrize("method", CASES)
def test_a_run_goes_on_exactly(tiny, tmp_path, method, engine):
    x = replace(
        tiny, network="own_code:norm_net", method=method, engine=engine, rounds=3, partition="iid",
        partition_options={"server": 24}, options={"epochs": 1, "batch": 6, **CASES[method]},
    )  # fmt: skip
    run(x, tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    sorted((tmp_path / "cut" / "checkpoints").iterdir())[-1].unlink()
    (tmp_path / "cut" / "evaluation.npz").unlink()
    resume(tmp_path / "cut")
    assert same(content(tmp_path / "whole"), content(tmp_path / "cut"))
    again = load(tmp_path / "whole")
    assert again.scores() == pytest.approx(again.journal[-1]["test"])
