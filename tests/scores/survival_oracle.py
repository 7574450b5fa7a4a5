"""Figures of lifelines, an independent library, for tests of survival: run once, committed as survival_oracle.json."""

import json
import sys
from pathlib import Path

import numpy as np
import pandas as pd
from lifelines import CoxPHFitter, KaplanMeierFitter
from lifelines.utils import concordance_index

random = np.random.default_rng(7)
rows = 80
x = random.normal(size=(rows, 3))
hazard = np.exp(x @ [0.8, -0.5, 0.2])
event_time = random.exponential(1 / hazard)
censor_time = random.exponential(1.5, size=rows)
time, event = np.minimum(event_time, censor_time), (event_time <= censor_time).astype(int)
site = random.integers(0, 3, size=rows)
rough = np.ceil(time * 10) / 10  # with ties
risk = np.round(x @ [1.0, -0.4, 0.1], 1)  # with ties too

table = pd.DataFrame(x, columns=["a", "b", "c"]).assign(time=time, event=event, site=site)
precise = {"precision": 1e-10}
cox = CoxPHFitter().fit(table.drop(columns="site"), "time", "event", fit_options=precise)
strata = CoxPHFitter().fit(table, "time", "event", strata=["site"], fit_options=precise)
curve = KaplanMeierFitter().fit(rough, event)
censoring = KaplanMeierFitter().fit(time, 1 - event)  # without ties, where conventions differ
grid = [0.05, 0.1, 0.3, 0.7, 1.2]
content = {
    "x": x.tolist(),
    "time": time.tolist(),
    "event": event.tolist(),
    "site": site.tolist(),
    "rough": rough.tolist(),
    "risk": risk.tolist(),
    "grid": grid,
    "cox": cox.params_.tolist(),
    "cox_loglik": float(cox.log_likelihood_),
    "stratified": strata.params_.tolist(),
    "stratified_loglik": float(strata.log_likelihood_),
    "concordance": concordance_index(time, -risk, event),
    "concordance_ties": concordance_index(rough, -risk, event),
    "kaplan_meier": curve.survival_function_at_times(grid).tolist(),
    "kaplan_meier_censoring": censoring.survival_function_at_times(grid).tolist(),
    "lifelines": __import__("lifelines").__version__,
}
Path(sys.argv[1]).write_text(json.dumps(content) + "\n")
