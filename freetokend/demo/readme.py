"""The README.md inside a built checkpoint: says plainly what the model is."""

from __future__ import annotations

from freetokend.demo.plan.format import UpcyclePlan
from freetokend.demo.wheels import WheelPin

_TEMPLATE = """\
# freetokend demo model ({variant})

This model is here to prove the path: that this machine loads, routes, caches and serves a
mixture-of-experts model from end to end. It is not here to be clever.

- **Real weights, real routing.** {experts} experts per layer, {top_k} per token, {parameters}
  parameters in all. Its routers choose by the meaning of the text, so its expert traffic is that of
  a real model: neighbouring tokens share experts, and a cache of experts has something to hit.
- **Its text is that of a 135M model.** It was upcycled, without any further training, from the
  dense model SmolLM2-135M-Instruct: every expert is a copy of the dense feed-forward layer in which
  {treatment}.
  It knows what a model of 135 million parameters knows, and it is often wrong.
- {purpose}

Layout: Hugging Face safetensors, float16, `MixtralForCausalLM`.

## Origin and licence

The weights are those of SmolLM2-135M-Instruct by HuggingFaceTB (Apache License 2.0,
https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct), in the Q4_1 quantisation that the
Python package {source} carries (Apache License 2.0, SHA-256 {sha256}),
expanded to float16. Changed: the feed-forward layers were split into experts and routers were
added. This derived model is under the Apache License 2.0 as well:
https://www.apache.org/licenses/LICENSE-2.0
"""

_PURPOSES = {
    "demo": (
        "**It hides routing mistakes.** Its experts are much alike; with wrong experts its text "
        "gets only\n  slightly worse. To check routing, use the stress variant."
    ),
    "stress": (
        "**It shows routing mistakes.** Its experts differ so much that wrong ones wreck the text "
        "at once.\n  To look at text, use the demo variant."
    ),
}


def readme_text(variant: str, plan: UpcyclePlan, parameters: int, source: WheelPin) -> str:
    """Fill in the README for one variant."""
    kept = int(plan.keep[0, 0].sum())
    rest = f"the other {plan.neurons - kept} neurons"
    fate = "are left out" if plan.alpha == 0.0 else f"are scaled by {plan.alpha:g}"
    return _TEMPLATE.format(
        variant=variant,
        experts=plan.experts,
        top_k=plan.top_k,
        parameters=f"{parameters / 1e6:.0f} million",
        treatment=f"its {kept} most useful neurons are kept and {rest} {fate}",
        purpose=_PURPOSES[variant],
        source=source.title,
        sha256=source.sha256,
    )
