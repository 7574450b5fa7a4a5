"""Made `ivon_oracle.npz`: 200 steps of ivon-opt 0.1.3 on a small network, float64, with the noise that they drew.

Run with ivon-opt installed beside torch, in an environment of its own: its licence is not ours, and only its figures
are kept here. Draws are read off the weights within a step; nothing of the library's own code is used otherwise.
"""

from pathlib import Path

import ivon
import numpy as np
import torch
from torch import nn

STEPS, ROWS, BATCH = 200, 48, 8
COMMON = {"lr": 0.02, "ess": 300.0, "hess_init": 0.2, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.02}
CASES = {
    "price": {},
    "two draws": {"mc_samples": 2},
    "clipped": {"clip_radius": 0.05},
    "squared": {"hess_approx": "gradsq", "beta2": 0.9995},
    "no momentum": {"beta1": 0.0, "lr": 0.01},
}

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
x, y = torch.randn(ROWS, 3), torch.randint(2, (ROWS,))
start = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))
kept = {"x": x.numpy(), "y": y.numpy(), "start": nn.utils.parameters_to_vector(start.parameters()).detach().numpy()}
for name, case in CASES.items():
    torch.manual_seed(1)
    network = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))
    network.load_state_dict(start.state_dict())
    options = {**COMMON, **case}
    optimiser = ivon.IVON(network.parameters(), rescale_lr=False, **options)
    noise, means, curvatures = [], [], []
    for step in range(STEPS):
        rows = torch.arange(step * BATCH, (step + 1) * BATCH) % ROWS
        for _ in range(options.get("mc_samples", 1)):
            mean = nn.utils.parameters_to_vector(network.parameters()).detach().clone()
            hess = optimiser.param_groups[0]["hess"]
            with optimiser.sampled_params(train=True):
                drawn = nn.utils.parameters_to_vector(network.parameters()).detach()
                noise.append((drawn - mean) * (options["ess"] * (hess + options["weight_decay"])).sqrt())
                optimiser.zero_grad()
                nn.functional.cross_entropy(network(x[rows]), y[rows]).backward()
        optimiser.step()
        if step % 20 == 19:
            means.append(nn.utils.parameters_to_vector(network.parameters()).detach().clone())
            curvatures.append(optimiser.param_groups[0]["hess"].detach().clone())
    kept[f"{name}.noise"] = torch.stack(noise).numpy()
    kept[f"{name}.mean"] = torch.stack(means).numpy()
    kept[f"{name}.curvature"] = torch.stack(curvatures).numpy()
np.savez_compressed(Path(__file__).with_suffix(".npz"), **kept)
