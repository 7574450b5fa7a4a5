"""Made `laplace_oracle.npz`: last-layer GGNs of a fixed network by laplace-torch 0.3 (curvlinops back end), float64.

Run with laplace-torch, backpack-for-pytorch, asdfghjkl and curvlinops-for-pytorch installed beside torch.
"""

from pathlib import Path

import numpy as np
import torch
from laplace import Laplace
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
network = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
x, y = torch.randn(40, 4), torch.randint(3, (40,))
optimiser = torch.optim.Adam(network.parameters(), lr=0.05)
for _ in range(60):
    optimiser.zero_grad()
    nn.functional.cross_entropy(network(x), y).backward()
    optimiser.step()

kept = {f"network.{name}": p.detach().numpy() for name, p in network.named_parameters()}
kept |= {"x": x.numpy(), "y": y.numpy()}
for structure in ("diag", "kron", "full"):
    fit = Laplace(network, "classification", subset_of_weights="last_layer", hessian_structure=structure)
    fit.fit(DataLoader(TensorDataset(x, y), batch_size=40))
    if structure != "kron":
        kept[f"ggn.{structure}"] = fit.H.detach().numpy()
    for precision in (0.5, 7.0):
        evidence = fit.log_marginal_likelihood(prior_precision=torch.tensor([precision]))
        kept[f"evidence.{structure}.{precision}"] = np.array(float(evidence))
    fit.prior_precision = 2.0
    if structure == "diag":
        variance = fit.posterior_variance
    else:
        whole = fit.posterior_precision.to_matrix(exponent=-1) if structure == "kron" else fit.posterior_covariance
        variance = torch.diagonal(whole)
    kept[f"variance.{structure}"] = variance.detach().numpy()
np.savez_compressed(Path(__file__).with_suffix(".npz"), **kept)
