"""Every preference method once, with settings that no loss saturates under: cases for tests."""

from __future__ import annotations

from kedge.models.training.preference_methods import CPO, DPO, IPO, KTO, ORPO, TDPO, AnyMethod, SimPO

METHODS: dict[str, AnyMethod] = {
    "dpo": DPO(beta=0.3, label_smoothing=0.1, sft_weight=0.2),
    "hinge": DPO(loss="hinge", beta=0.2),
    "ipo": IPO(beta=0.4),
    "ipo mean": IPO(beta=0.4, log_probs="mean"),
    "orpo": ORPO(beta=0.7, sft_weight=0.5),
    "simpo": SimPO(beta=2.5, gamma=0.8),
    "cpo": CPO(beta=0.05, sft_weight=0.3),
    "kto": KTO(beta=0.3, desirable_weight=1.5, undesirable_weight=0.5, sft_weight=0.25),
    "tdpo": TDPO(beta=0.3, alpha=0.7),
    "tdpo1": TDPO(beta=0.3, alpha=None),
}
