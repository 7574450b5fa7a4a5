"""FedAvg by fedjax: its federated_averaging on its jit back end, a haiku MLP."""

from __future__ import annotations

import os

import fedjax
import haiku as hk
import jax
import numpy as np
import setting
from fedjax.algorithms import fed_avg


def main() -> None:
    given, laps = setting.read(), setting.Laps()
    widths = [b.shape[0] for b in given.weights[1::2]]
    forward = hk.transform(lambda batch: hk.nets.MLP(widths)(batch["x"]))
    model = fedjax.create_model_from_haiku(
        forward,
        {"x": given.x[0, : given.batch]},
        train_loss=lambda batch, output: fedjax.metrics.unreduced_cross_entropy_loss(batch["y"], output),
        eval_metrics={"accuracy": fedjax.metrics.Accuracy()},
    )
    layers = sorted(model.init(jax.random.PRNGKey(0)))
    params = {name: {"w": w, "b": b} for name, w, b in zip(layers, given.weights[::2], given.weights[1::2])}
    algorithm = fed_avg.federated_averaging(
        fedjax.model_grad(model),
        fedjax.optimizers.sgd(given.lr),
        fedjax.optimizers.sgd(1.0),
        fedjax.ShuffleRepeatBatchHParams(batch_size=given.batch),
    )
    held = [fedjax.ClientDataset({"x": x, "y": y}) for x, y in zip(given.x, given.y)]
    test = fedjax.ClientDataset({"x": given.test_x, "y": given.test_y})
    state, random, key = algorithm.init(params), np.random.default_rng(0), jax.random.PRNGKey(1)
    for _ in range(given.rounds):
        key, *keys = jax.random.split(key, given.cohort + 1)
        chosen = random.choice(len(held), given.cohort, replace=False)
        state, _ = algorithm.apply(state, [(k, held[k], own) for k, own in zip(chosen, keys)])
        batches = test.padded_batch(batch_size=len(given.test_y))
        laps.end(float(fedjax.evaluate_model(model, state.params, batches)["accuracy"]))
    laps.tell("fedjax", "jax", "jaxlib", "dm-haiku", threads=os.cpu_count() or 1)


if __name__ == "__main__":
    main()
