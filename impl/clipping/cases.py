"""Cases of clipping on a mesh: what varies, and the id."""

from __future__ import annotations

from dataclasses import dataclass

from shardmark.api import Grid

MESHES = ("shard=2", "shard=2,tp=2")


@dataclass(frozen=True)
class ClippingCase:
    """Gradients of the transformer of that size: matrices sharded over every axis of the mesh, and norms over `shard`
    alone. With `several_meshes` norms are on a mesh of their own, of `shard` without `tp`, as in most models. The test
    sets `mesh`.
    """

    model: str
    mesh: str = ""
    several_meshes: bool = False
    dtype: str = "float32"

    def __str__(self) -> str:
        mesh = f"-{self.mesh}" if self.mesh else ""
        return f"{self.model}{'-several_meshes' * self.several_meshes}-{self.dtype}{mesh}"

    @property
    def words(self) -> str:
        """The case as sentences have it."""
        where = " on several meshes" if self.several_meshes else ""
        return f"for the {self.model} model's gradients{where} on {self.mesh}"


def _of(*models: str) -> list[ClippingCase]:
    return [ClippingCase(model, several_meshes=several) for model in models for several in (False, True)]


CASES = Grid(smoke=_of("tiny"), laptop=_of("mini"), paper=_of("medium"), full=_of("medium", "xl"))
