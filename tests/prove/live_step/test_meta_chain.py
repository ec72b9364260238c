"""Which gradients of a model are compared as a whole where 16 bits make bounds of entries wide."""

from __future__ import annotations

import torch

from tests.small_models import small_config
from weft.models import family
from weft.prove.live_step.meta_chain import MetaChain


def test_weights_of_routers_are_known() -> None:
    """Two tokens that change places between experts leave the loads as they are and move this gradient by
    a few hundredths.
    """
    config = small_config("deepseek")
    chain = MetaChain.of(
        family("deepseek"), config, device=torch.device("cpu"), compute=torch.bfloat16
    )
    routers = {name for name in chain.trained if ".router." in name}
    assert routers
    assert chain.routers == routers
    assert "layer1.mlp.experts.up" in chain.products
