"""The upcycling plan as a file: which neurons each expert keeps, and the router that chooses."""

from __future__ import annotations

import hashlib
import io
import zipfile
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from freetokend.demo.errors import DemoError

_ARRAYS = ("alpha", "k", "keep", "router")


@dataclass(frozen=True)
class UpcyclePlan:
    """How a dense FFN becomes experts.

    Every expert is a copy of the dense FFN in which the neurons it does not keep are scaled by
    `alpha`; with alpha 0 they are left out, and the expert is narrower.
    """

    router: NDArray[np.float16]  # [layers, experts, hidden]
    keep: NDArray[np.bool_]  # [layers, experts, neurons]
    alpha: float
    top_k: int

    def __post_init__(self) -> None:
        problem = _first_problem(self)
        if problem:
            raise DemoError(
                f"the upcycling plan is not usable: {problem}; install freetokend anew."
            )

    @property
    def layers(self) -> int:
        """Number of transformer layers."""
        return int(self.router.shape[0])

    @property
    def experts(self) -> int:
        """Experts per layer."""
        return int(self.router.shape[1])

    @property
    def hidden(self) -> int:
        """Width of the residual stream."""
        return int(self.router.shape[2])

    @property
    def neurons(self) -> int:
        """Neurons of the dense FFN."""
        return int(self.keep.shape[2])

    @property
    def expert_neurons(self) -> int:
        """Neurons of one expert: those kept when the others are dropped, else all."""
        return int(self.keep[0, 0].sum()) if self.alpha == 0.0 else self.neurons


def _first_problem(plan: UpcyclePlan) -> str:
    """Name the first rule that the plan breaks, or return an empty string."""
    router, keep = plan.router, plan.keep
    if router.dtype != np.float16 or router.ndim != 3:
        return f"router must be float16 [layers, experts, hidden], not {router.dtype}{router.shape}"
    if keep.dtype != np.bool_ or keep.ndim != 3 or keep.shape[:2] != router.shape[:2]:
        return f"keep must be bool {router.shape[:2]} + [neurons], not {keep.dtype} {keep.shape}"
    if 0 in router.shape or 0 in keep.shape:
        return "it is empty"
    if not np.isfinite(router).all():
        return "router holds a value that is not finite"
    kept = keep.sum(axis=-1)
    if kept.min() != kept.max() or kept.min() == 0:
        return f"every expert must keep the same number of neurons, not {kept.min()}..{kept.max()}"
    if not 0.0 <= plan.alpha <= 1.0:
        return f"alpha must lie in 0..1, not {plan.alpha}"
    if not 1 <= plan.top_k <= router.shape[1]:
        return f"k must lie in 1..{router.shape[1]}, not {plan.top_k}"
    return ""


def plan_digest(data: bytes) -> str:
    """Hex SHA-256 of a plan file: the identity that a finished build records."""
    return hashlib.sha256(data).hexdigest()


def parse_plan(data: bytes) -> UpcyclePlan:
    """Read a plan file (.npz). Never unpickles."""
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
            if sorted(arrays.files) != sorted(_ARRAYS):
                raise DemoError(
                    f"the upcycling plan is not usable: it holds {sorted(arrays.files)} instead of "
                    f"{list(_ARRAYS)}; install freetokend anew."
                )
            router, packed = arrays["router"], arrays["keep"]
            alpha, top_k = arrays["alpha"], arrays["k"]
    except (ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise DemoError(
            f"the upcycling plan cannot be read ({error}); install freetokend anew."
        ) from error
    if packed.dtype != np.uint8 or packed.ndim != 3 or alpha.ndim or top_k.ndim:
        raise DemoError(
            "the upcycling plan is not usable: keep must be uint8 bits [layers, experts, bytes] "
            "and alpha and k plain numbers; install freetokend anew."
        )
    keep = np.unpackbits(packed, axis=-1).astype(np.bool_)
    return UpcyclePlan(router=router, keep=keep, alpha=float(alpha), top_k=int(top_k))


def format_plan(plan: UpcyclePlan) -> bytes:
    """Write a plan as the bytes of a compressed .npz: the inverse of `parse_plan`."""
    if plan.neurons % 8:
        raise DemoError(f"a plan needs a multiple of 8 neurons to pack, not {plan.neurons}.")
    stream = io.BytesIO()
    np.savez_compressed(
        stream,
        router=plan.router,
        keep=np.packbits(plan.keep, axis=-1),
        alpha=np.float64(plan.alpha),
        k=np.int64(plan.top_k),
    )
    return stream.getvalue()
