"""Words of a layout that other documents have fields for, without the plan's own documents.

A rank and the supervisor read them in `train.json`, and never plan. Does not belong here: anything
that is more than a word.
"""

from __future__ import annotations

from typing import Literal, get_args

from hpctrain.spec.engines.abilities import Home

Axis = Literal["tp", "cp", "ep", "dp", "pp"]
Offload = Home
Order = Literal["tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"]
ORDERS: tuple[Order, ...] = get_args(Order)
DEFAULT_ORDER: Order = ORDERS[0]
