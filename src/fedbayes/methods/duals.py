"""Point clients that correct their drift: ADMM of points (FedDyn, FedLap), and SCAFFOLD."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from fedbayes.clients.duals import CONTROL, with_control, with_dual
from fedbayes.federation.program import Personal, Program
from fedbayes.federation.rules import rule_named
from fedbayes.federation.sites import control, mixed_duals
from fedbayes.federation.weighting import Weighting
from fedbayes.methods.groups import Descent, Schedule, ServerStep
from fedbayes.methods.method import Setting
from fedbayes.methods.points import PointAveraging
from fedbayes.options import option, positive, record, up_to_one, with_default
from fedbayes.posterior.values import Parts, Point

KEEPS_DUAL = (
    "clients of {} keep a vector that holds what they sent; with a part of that left out, the server's sum of them "
    "would be another"
)


@record
class Dual(PointAveraging):
    """Point clients that keep a dual v: `linear . w` in their loss, which grows along their own moves."""

    fixed: ClassVar[Mapping[str, str]] = {
        "weighting": "every client's dual counts once",
        "proximal": "it is rho",
        "rule": "the server needs the mean",
        **dict.fromkeys(("buckets", "outliers", "mixing", "twins"), "the server needs the mean"),
    }
    weighting: str | Weighting = with_default(PointAveraging, "weighting", default="equal")
    rho: float = option("strength of the pull to the server's weights", positive, default=1.0, kind="scalar")
    gamma: float = option("share of a client's move that its dual takes", up_to_one, default=1.0, kind="scalar")

    def dual(self, setting: Setting, *, precision: float, per_row: bool) -> Program:
        """The program of ADMM on points, under a prior of that precision."""
        program = self.averaged(setting, self.rule_of("fedavg"))
        inner = self.point_client(setting, program.model, self.rho, self.adversarial, linear=True)
        client = with_dual(inner, per_row=per_row)
        step = mixed_duals(rho=self.rho, gamma=self.gamma, clients=setting.clients, precision=precision)
        return program._replace(
            client=client,
            pooling=program.pooling._replace(as_sent=KEEPS_DUAL.format(self.name)),
            stages=(step,),
            personal=Personal(program.client._replace(first=client.first)),  # at home, no longer bent
        )


@record
class FedDyn(Dual):
    """FedDyn: each client's loss is bent so that all have their minimum where the server's is (Acar et al., 2021).

    Clients minimise  mean loss + v_k . w + rho / 2 |w - broadcast|^2  and v_k += rho (w_k - broadcast); the server has
    mean_k w_k + sum_k v_k / (clients * rho). `rho` is the paper's alpha.
    """

    name: ClassVar[str] = "feddyn"
    fixed: ClassVar[Mapping[str, str]] = {**Dual.fixed, "gamma": "it is 1; fedlap leaves it open"}
    rho: float = with_default(Dual, "rho", default=0.01)

    def compose(self, setting: Setting) -> Program:
        return self.dual(setting, precision=0.0, per_row=False)


@record
class FedLap(Dual):
    """FedLap: Bayesian ADMM with isotropic normals of fixed width, so that points travel (Swaroop et al., 2025).

    As `feddyn`, but losses count by rows, the server has a prior N(0, prior_scale^2), and duals may be damped.
    """

    name: ClassVar[str] = "fedlap"
    gamma: float = with_default(Dual, "gamma", default=0.5)
    prior_scale: float = option("standard deviation of the prior", positive, default=1.0, kind="server")

    def compose(self, setting: Setting) -> Program:
        return self.dual(setting, precision=self.prior_scale**-2, per_row=True)


@record
class Scaffold(ServerStep, PointAveraging):
    """SCAFFOLD: clients step along their gradient, less their own drift, plus everybody's (Karimireddy, 2020)."""

    name: ClassVar[str] = "scaffold"
    fixed: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("optimiser", "momentum"), "the drift is known of plain descent alone"),
        **dict.fromkeys(("lr_within", "lr_drop", "lr_drop_every"), "the drift is known at a constant rate"),
        "weighting": "every client's drift counts once",
        "rule": "the server needs the mean",
        **dict.fromkeys(("buckets", "outliers", "mixing", "twins"), "the server needs the mean"),
    }
    optimiser: str = with_default(Descent, "optimiser", default="sgd")
    momentum: float = with_default(Descent, "momentum", default=0.0)
    lr_within: str = with_default(Schedule, "lr_within", default="constant")
    weighting: str | Weighting = with_default(PointAveraging, "weighting", default="equal")

    def compose(self, setting: Setting) -> Program:
        program = self.averaged(setting, self.rule_of("fedavg"))
        model, first = program.model, program.initial["model"]
        client = with_control(self.point_client(setting, model, self.proximal, self.adversarial, linear=True))
        common = Point(first.mean * 0, first.layout)

        def predicting(parts: Parts) -> Parts:
            return {part: q for part, q in parts.items() if part != CONTROL}

        return program._replace(
            client=client,
            initial={**program.initial, CONTROL: common},
            pooling=program.pooling._replace(
                rules={**program.pooling.rules, CONTROL: rule_named("fedavg")}, as_sent=KEEPS_DUAL.format(self.name)
            ),
            stages=(*self.server_stages, control(setting.clients, CONTROL)),
            prediction=program.prediction._replace(parts=predicting),
            personal=Personal(program.client._replace(first=client.first)),
        )
