"""What the converter asks of a checkpoint, whoever quantised it: names, plain tensors, matrices."""

from __future__ import annotations

from typing import Protocol

from freetokend.ftw.checkpoint import Checkpoint
from freetokend.ftw.matrix import MatrixSource
from freetokend.ftw.safetensors import SourceTensor


class Scheme(Protocol):
    """A checkpoint seen through its quantisation scheme.

    Names are those of a Hugging Face checkpoint in full precision (`....gate_proj.weight`).
    name: of the scheme, "none" for a checkpoint that does not say that it is quantised; whether a
    matrix is, its tensors tell.
    consumed: names, as the files have them, of tensors that quantised matrices took; those of
    plain tensors are the caller's to count (`SourceTensor.name`).
    """

    @property
    def name(self) -> str: ...

    @property
    def consumed(self) -> set[str]: ...

    def has(self, name: str) -> bool:
        """Whether the checkpoint holds `name`, plain or quantised."""
        ...

    def tensor(self, name: str) -> SourceTensor | None:
        """The plain tensor, perhaps a part of a larger one in the file; None when there is none."""
        ...

    def matrix(self, name: str, rows: int, columns: int) -> MatrixSource | None:
        """The matrix [rows, columns] in the form in which it is to be stored; None: it is plain.

        ModelDataError names the tensor that is missing, of the wrong shape or type, or that has a
        form that is not implemented.
        """
        ...

    def ignorable(self, name: str) -> bool:
        """Whether a tensor of the files may be left over: it has no part in what is computed."""
        ...


class PlainScheme:
    """A checkpoint that is not quantised."""

    name: str = "none"

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._tensors = checkpoint.tensors
        self.consumed: set[str] = set()

    def has(self, name: str) -> bool:
        """See `Scheme`."""
        return name in self._tensors

    def tensor(self, name: str) -> SourceTensor | None:
        """See `Scheme`."""
        return self._tensors.get(name)

    def matrix(self, name: str, rows: int, columns: int) -> MatrixSource | None:
        """See `Scheme`."""
        return None

    def ignorable(self, name: str) -> bool:
        """See `Scheme`."""
        return False
