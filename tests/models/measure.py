"""Logits errors of a bf16 run of ours and of transformers', both against float64 logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch

from freetokend.core.model_config import parse_model_config
from freetokend.tensor.router import route
from tests.models.checkpoints import Checkpoint, hf_model, prompt
from tests.models.comparison import Runner, relative_errors, whole

# A choice counts as decided where the float64 gap between the last expert chosen and the first one
# left out exceeds so many deviations of our router logits from the float64 ones.
NOISE_DEVIATIONS: Final = 8.0
PROMPTS_COUNT: Final = 64
PROMPT_TOKENS: Final = 48


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """Of several prompts one after another: logits [T, V], router logits [T, E] per MoE layer."""

    logits: torch.Tensor
    router_logits: list[torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Percentiles over positions of ||a - b|| / ||b||, b in float64.

    `flipped_count`: positions that went to other experts than in float64, in any layer.
    """

    median: float
    p99: float
    flipped_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One checkpoint. Ratios below 1: ours is nearer to float64."""

    positions_count: int
    logits_deviation: float
    ours: Errors
    theirs: Errors

    @property
    def median_ratio(self) -> float:
        return self.ours.median / self.theirs.median

    @property
    def p99_ratio(self) -> float:
        return self.ours.p99 / self.theirs.p99


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """Expert choices (position, layer) of a run that was made to follow the float64 choices.

    Nothing but the rounding of activations is between the two runs then. `decided_count`: choices
    whose float64 gap exceeds that noise; `wrong_count`: those of them that came out otherwise.
    """

    choices_count: int
    decided_count: int
    wrong_count: int


class Comparison:
    """float64 and bf16 outputs of transformers for one checkpoint, to hold runs of ours against."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        prompts_count: int = PROMPTS_COUNT,
        prompt_tokens: int = PROMPT_TOKENS,
    ) -> None:
        config = parse_model_config(checkpoint.config)
        self._config = config
        self.prompts = [
            prompt(prompt_tokens, config.vocab_size, seed) for seed in range(prompts_count)
        ]
        self._truth = self._theirs(checkpoint, torch.float64)
        self._rival = self._theirs(checkpoint, torch.bfloat16)

    def measure(self, runner: Runner) -> Measurement:
        """Errors of `runner` and of transformers in bf16."""
        return Measurement(
            positions_count=self._truth.logits.shape[0],
            logits_deviation=float(self._truth.logits.std()),
            ours=self._errors(self._ours(runner)),
            theirs=self._errors(self._rival),
        )

    def follow(self, runner: Runner) -> Choices:
        """Run with the experts and weights of float64 in every layer, and judge the choices."""
        top_k = self._config.router.top_k
        runner.probe.choices = [
            route(logits, self._config.router) for logits in self._truth.router_logits
        ]
        try:
            found = self._ours(runner)
        finally:
            runner.probe.choices = None
        decided_count = wrong_count = 0
        pairs = list(zip(found.router_logits, self._truth.router_logits, strict=True))
        for mine, true in pairs:
            noise = (mine.double() - true).square().mean().sqrt()
            ordered = true.sort(dim=1, descending=True).values
            decided = ordered[:, top_k - 1] - ordered[:, top_k] > NOISE_DEVIATIONS * noise
            decided_count += int(decided.sum())
            wrong_count += int((decided & self._flipped(mine, true)).sum())
        return Choices(
            choices_count=len(pairs) * self._truth.logits.shape[0],
            decided_count=decided_count,
            wrong_count=wrong_count,
        )

    def _theirs(self, checkpoint: Checkpoint, dtype: torch.dtype) -> Output:
        model: Any = hf_model(checkpoint, dtype)
        has_routers = bool(self._config.moe_layer_indices)
        with torch.inference_mode():
            output = model(torch.stack(self.prompts), output_router_logits=has_routers)
        return Output(
            logits=output.logits.flatten(0, 1),
            router_logits=list(output.router_logits) if has_routers else [],
        )

    def _ours(self, runner: Runner) -> Output:
        runner.probe.logits.clear()
        lengths = [len(one) for one in self.prompts]
        logits = torch.cat(runner.run(self.prompts, whole(lengths)))
        return Output(logits=logits, router_logits=list(runner.probe.logits))

    def _errors(self, found: Output) -> Errors:
        errors = relative_errors(found.logits, self._truth.logits)
        flipped = torch.zeros(errors.shape, dtype=torch.bool)
        for mine, true in zip(found.router_logits, self._truth.router_logits, strict=True):
            flipped |= self._flipped(mine, true)
        return Errors(
            median=float(errors.quantile(0.5)),
            p99=float(errors.quantile(0.99)),
            flipped_count=int(flipped.sum()),
        )

    def _flipped(self, found: torch.Tensor, true: torch.Tensor) -> torch.Tensor:
        """bool [T]: the sets of chosen experts differ."""
        found_ids = route(found, self._config.router)[0].sort(dim=1).values
        true_ids = route(true, self._config.router)[0].sort(dim=1).values
        return (found_ids != true_ids).any(dim=1)
