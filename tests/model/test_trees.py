"""A walk through a tree is PyTorch's own."""

import torch
from torch.utils._pytree import tree_leaves, tree_map

from fedbayes.clients.client import Learner
from fedbayes.model.trees import mapped
from fedbayes.posterior.layout import Layout
from fedbayes.posterior.values import Gaussian


def test_every_kind_of_branch_is_walked_as_pytorch_does():
    q = Gaussian(torch.ones(2), torch.ones(2), Layout(("a",), ((2,),)))
    learner = Learner({"mean": torch.ones(3)}, {}, {"first": (torch.ones(1),)}, torch.ones(()), torch.ones(()))
    tree = {"learner": learner, "parts": {"model": q}, "list": [torch.ones(2), 3.0], "pair": (torch.ones(1), {})}
    ours, plain = mapped(lambda t: t + 1, tree), tree_map(lambda t: t + 1, tree)
    assert torch.utils._pytree.tree_structure(ours) == torch.utils._pytree.tree_structure(plain)
    assert type(ours["learner"]) is Learner
    assert all(
        torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(tree_leaves(ours), tree_leaves(plain))
    )
    assert ours["parts"]["model"].layout is q.layout
