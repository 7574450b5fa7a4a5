"""A method of the user's own: what it forgets to hand on is told in one line, before it trains."""

from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from torch import nn

import fedbayes as fb
from fedbayes.clients.client import Upload
from fedbayes.errors import InputError
from fedbayes.federation.program import Program
from fedbayes.methods import Method, Setting
from fedbayes.methods.points import FedAvg
from fedbayes.options import flag, option, record


@record
class Forgetful(FedAvg):
    """FedAvg that may forget what the user asked for, its buffers, or to upload them."""

    name: ClassVar[str] = "forgetful"
    asks: bool = option("whether the setting is handed on", flag, default=False)
    begins: bool = option("whether it begins with all parts", flag, default=True)
    uploads: bool = option("whether clients upload all parts", flag, default=True)

    def compose(self, setting: Setting) -> Program:
        bare = setting if self.asks else replace(setting, frozen=(), bfloat16=False, augment=None)
        program = super().compose(bare)
        if not self.begins:
            program = program._replace(initial={"model": program.initial["model"]})
        if not self.uploads:
            finish = program.client.finish
            program = program._replace(
                client=program.client._replace(finish=lambda state, info: bare_of(finish(state, info)))
            )
        return program


def bare_of(upload: Upload) -> Upload:
    return upload._replace(parts={"model": upload.parts["model"]})


def fitted(method: Method | type, **options: object) -> fb.Run:
    x = torch.rand(12, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    network = nn.Sequential(nn.Flatten(), nn.Linear(48, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    sites = [(x[:6], torch.tensor([0, 1] * 3)), (x[6:], torch.tensor([0, 1] * 3))]
    return fb.fit(network, sites, method=method, rounds=1, **options)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"frozen": ("3.*",)}, "frozen: forgetful trains 3.weight all the same; hand frozen=setting.frozen on"),
        ({"precision": "bf16"}, 'precision = "bf16": forgetful leaves it out; hand bfloat16=setting.bfloat16 on'),
        ({"augment": "crop_flip"}, "augment: forgetful leaves it out; hand augment=setting.augment on"),
    ],
)
def test_what_a_method_does_not_hand_on_is_refused(asked, says):
    with pytest.raises(InputError, match=says):
        fitted(Forgetful(), **asked)
    assert fitted(Forgetful(asks=True), **asked).journal


def test_parts_that_a_method_leaves_out_are_named():
    with pytest.raises(InputError, match="forgetful begins without 'buffers' of the network"):
        fitted(Forgetful(begins=False))


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_parts_that_a_client_does_not_upload_are_named(engine):
    with pytest.raises(InputError, match="a client's upload has no part 'buffers', which the method pools"):
        fitted(Forgetful(uploads=False), engine=engine)


def test_a_method_that_composes_nothing_is_refused():
    @record
    class Empty(Method):
        name: ClassVar[str] = "empty"

    with pytest.raises(InputError, match=r"method empty has no compose\(self, setting\) -> Program; docs"):
        fitted(Empty())


def test_a_class_is_no_method():
    with pytest.raises(InputError, match="method must be a name, or one with options"):
        fitted(Forgetful)
