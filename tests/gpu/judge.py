"""Logits of a device beside the CPU's."""

from __future__ import annotations

from typing import Final

import torch

from tests.gpu.bench import Bench

STEPS: Final = 8
# bf16 activations rounded at different places of sums in another order.
LOGITS_ERROR: Final = 5e-3
# Of router logits, whose standard deviation is about 2.
TIE_MARGIN: Final = 0.02


class Judge:
    """Logits of steps beside the CPU's.

    A sum in another order may choose another expert where two are as good as each other; such rows
    are counted and not judged.
    """

    def __init__(self, bench: Bench) -> None:
        self._references = bench.references(STEPS)

    def error(self, logits: list[torch.Tensor]) -> float:
        """The worst row's, relative to its norm; infinite where something is no number."""
        worst = 0.0
        for ours, reference in zip(logits, self._references, strict=True):
            if not bool(torch.isfinite(ours).all()):
                return float("inf")
            norm = torch.linalg.vector_norm
            errors = norm(ours - reference.logits, dim=1) / norm(reference.logits, dim=1)
            judged = errors[reference.margins >= TIE_MARGIN]
            worst = max([worst, *judged.tolist()])
        return worst

    def error_now(self, bench: Bench) -> float:
        """Of all steps, computed on the device as it is now."""
        program, pages = bench.program(), bench.pages()
        return self.error([bench.run(program, pages, at) for at in range(STEPS)])

    @property
    def judged_share(self) -> float:
        """Of the rows."""
        margins = torch.cat([one.margins for one in self._references])
        return float((margins >= TIE_MARGIN).float().mean())
