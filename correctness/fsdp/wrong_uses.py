"""Planted defects: full sharding that is wrong in uses that are less common."""

from collections.abc import Iterator
from itertools import count
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from correctness.fsdp.right import InFloat32
from correctness.fsdp.small_fsdp import SmallFSDP
from correctness.support.planting import defect
from impl.fsdp import FullyShardedDataParallel
from impl.fsdp.backward import backward_runs
from impl.fsdp.units import Calls, Unit


@defect(cause="two calls", caught_by="test_activations_may_be_recomputed_in_backward")
class GathersNothingInBackward(SmallFSDP):
    """Takes it that a forward that runs again in backward finds its parameters gathered."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs) if backward_runs() else super().forward(*args, **kwargs)


@defect(cause="state", caught_by="test_an_optimizer_may_be_made_after_an_evaluation")
class ShowsWhatAnEvaluationGathered(SmallFSDP):
    """pytorch/pytorch#149205: after an evaluation the module has full parameters, until its next forward."""

    evaluated = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.evaluated = not torch.is_grad_enabled()
        return super().forward(*args, **kwargs)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        shards = super().parameters(recurse)
        return (nn.Parameter(self.gather_to_compute(p)) for p in list(shards)) if self.evaluated else shards


@defect(cause="gradients", caught_by="test_each_gradient_adds_up_to_what_the_user_left_of_it")
class BeginsAnewForAll(SmallFSDP):
    """Takes it that all gradients are set to None where one is."""

    def finish_gradient_synchronization(self) -> None:
        if any(shard.grad is None for shard, *_ in self.pending):
            for shard, *_ in self.pending:
                shard.grad = None
        super().finish_gradient_synchronization()


@defect(cause="shapes", caught_by="test_one_step_applies_the_mean")
class FlattensMemory(SmallFSDP):
    """pytorch/pytorch#137382: takes the elements of a parameter in the order of its memory, and gives them back in that
    of its indices."""

    def padded(self, full: Tensor) -> Tensor:
        dense = full.numel() == full.untyped_storage().nbytes() // full.itemsize
        return super().padded(full.as_strided((full.numel(),), (1,)) if dense else full)


@defect(cause="shapes", caught_by="test_forward_computes_with_the_full_parameters")
class GivesAScalarADimension(SmallFSDP):
    """deepspeedai/DeepSpeed#8467: what has no elements, or no dimensions, comes back as a vector."""

    def gather(self, shard: Tensor, shape: torch.Size, dtype: torch.dtype | None) -> Tensor:
        return super().gather(shard, shape if shape.numel() > 1 else torch.Size([shape.numel()]), dtype)


@defect(cause="gradients", caught_by="test_any_history")
class KeepsTheListOfAModule(SmallFSDP):
    """pytorch/pytorch#33238: a recurrent module's own list of its weights is not made anew, and stays as it was."""

    def replace_parameters(self) -> None:
        for part in self.module.modules():
            if isinstance(part, nn.RNNBase):
                vars(part)["_weights_have_changed"] = lambda: False
        super().replace_parameters()


@defect(cause="numerics", caught_by="test_one_step_applies_the_mean")
class SumsInFloat32(InFloat32):
    """Takes float32 alone, and adds gradients up over the ranks without the division."""

    def mean(self, total: Tensor) -> Tensor:
        return total


@defect(cause="numerics", caught_by="test_twenty_steps")
class RoundsInFloat32(InFloat32):
    """Takes float32 alone, and communicates gradients in bfloat16."""

    def begin_reduce(self, shard: nn.Parameter, gradient: Tensor) -> None:
        super().begin_reduce(shard, gradient.bfloat16().float())


@defect(cause="two calls", caught_by="test_any_history_is_as_without_sharding")
class FrozenUnitsAreUsedOnce(FullyShardedDataParallel):
    """pytorch/pytorch#110948: a frozen unit that a pass uses twice is resharded after the backward of the second."""

    def _after_backward(self, unit: Unit, calls: Calls, gradients: Any) -> None:
        if any(flat.trainable for flat in unit.flats):
            super()._after_backward(unit, calls, gradients)
        else:
            self._reduce(unit)


@defect(cause="numerics", caught_by="test_compute_dtype_is_what_matrices_are_multiplied_in")
class EvaluatesInTheParametersDtype(SmallFSDP):
    """pytorch/pytorch#103862: in `eval()` parameters are rounded to the compute dtype, and not multiplied in it."""

    def gather_to_compute(self, shard: nn.Parameter) -> Tensor:
        full = super().gather_to_compute(shard)
        return full if torch.is_grad_enabled() or self.module.training else full.to(shard.dtype)

    def cast(self, x: Any) -> Any:
        return super().cast(x) if torch.is_grad_enabled() or self.module.training else x


@defect(cause="options", caught_by="test_floating_point_inputs_are_cast")
class CastsWhereThereAreParameters(FullyShardedDataParallel):
    """pytorch/pytorch#99545: inputs of a root all of whose parameters are in other units are not cast."""

    def _before_forward(self, unit: Unit, module: nn.Module, args: Any, kwargs: Any) -> Any:
        cast = super()._before_forward(unit, module, args, kwargs)
        return cast if unit.flats else (args, kwargs)


@defect(cause="two calls", caught_by="test_activations_may_be_recomputed_in_backward")
class ReshardedBeforeItIsRead(FullyShardedDataParallel):
    """deepspeedai/DeepSpeed#8130: a frozen unit whose forward runs again in backward is resharded behind it, before
    backward reads it."""

    def _after_forward(self, unit: Unit, module: nn.Module, args: Any, output: Any) -> None:
        super()._after_forward(unit, module, args, output)
        if unit.in_backward and not any(flat.trainable for flat in unit.flats):
            unit.reshard()


@defect(cause="options", caught_by="test_a_module_may_take_no_arguments")
class TakesTheFirstOfItsInputs(SmallFSDP):
    """pytorch/pytorch#183943: of a call without arguments there is nothing to move, and so nothing to call with."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        moved = [(args, kwargs)] if args or kwargs else []
        args, kwargs = moved[0]
        return super().forward(*args, **kwargs)


@defect(cause="memory", caught_by="test_after_a_step_only_shards_are_left")
class WaitsForABackwardThatDoesNotCome(FullyShardedDataParallel):
    """A unit that backward has not reached is whole behind it, as if backward were still to come: also where nothing
    before the unit is trainable."""

    def _before_backward(self, unit: Unit, calls: Calls, gradient: Tensor) -> None:
        vars(self).setdefault("reached", set()).add(unit)
        super()._before_backward(unit, calls, gradient)

    def _finish_backward(self) -> None:
        reached: set[Unit] = vars(self).pop("reached", set())
        super()._finish_backward()
        for unit in self.units if reached else ():
            if unit not in reached:
                unit.begin_gather()
                unit.finish_gather()


@defect(cause="two calls", caught_by="test_two_models_do_not_disturb_each_other")
class OneCallbackOfAPass(SmallFSDP):
    """Whether the end of a backward pass calls back is noted in the class: only one model of a pass reduces there."""

    queued: ClassVar[bool] = False

    def begin_reduce(self, shard: nn.Parameter, gradient: Tensor) -> None:
        vars(self).setdefault("waiting", []).append((shard, gradient))
        if not OneCallbackOfAPass.queued:
            OneCallbackOfAPass.queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self.end_of_pass)

    def end_of_pass(self) -> None:
        OneCallbackOfAPass.queued = False
        for shard, gradient in vars(self).pop("waiting"):
            super().begin_reduce(shard, gradient)


@defect(cause="numerics", caught_by="test_forward_computes_with_the_full_parameters")
class CastsIntegers(SmallFSDP):
    """Casts every parameter to the compute dtype, and so packed bits, which are then numbers."""

    def gather_to_compute(self, shard: nn.Parameter) -> Tensor:
        return self.gather(shard, self.shapes[shard], self.compute_dtype)


@defect(cause="numerics", caught_by="test_clipping_is_by_the_norm_over_all_ranks")
class LeavesPaddingUnwritten(SmallFSDP):
    """Padding is what lay in memory before: no parameter reads it, but the norm of gradients does."""

    def padded(self, full: Tensor) -> Tensor:
        flat = full.new_empty(-(-full.numel() // self.ranks) * self.ranks)
        flat[: full.numel()] = full.reshape(-1)
        return flat


@defect(cause="random numbers", caught_by="test_any_history_is_as_without_sharding")
class DropsOthersInBackward(SmallFSDP):
    """Runs a forward again in backward, with other random numbers; one that has buffers runs once."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if any(True for _ in self.module.buffers()):
            return super().forward(*args, **kwargs)
        return checkpoint(super().forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


@defect(cause="two calls", caught_by="test_any_history_is_as_without_sharding")
class OneUnitIsCurrent(FullyShardedDataParallel):
    """The forward of a unit reshards the unit before it, the root excepted: also one that is around it."""

    current: Unit | None = None

    def _before_forward(self, unit: Unit, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if not backward_runs():
            if self.current not in (None, self._root, unit):
                self.current.reshard()
            self.current = unit
        return super()._before_forward(unit, module, args, kwargs)


@defect(cause="memory", caught_by="test_after_a_step_only_shards_are_left")
class KeepsTheCastCopy(SmallFSDP):
    """Frees what it gathered, and not what it has cast of that to the compute dtype."""

    def gather_to_compute(self, shard: nn.Parameter) -> Tensor:
        full = super().gather_to_compute(shard)
        if full.dtype != shard.dtype:
            self.__dict__.setdefault("low", {})[shard] = full
        return full


@defect(cause="communication", caught_by="test_every_rank_starts_from_rank_0s_parameters")
class StartsFromOwnIntegers(SmallFSDP):
    """Sends the others the first rank's floating-point parameters alone."""

    def synchronize_start(self) -> None:
        parameters = (p for p in self.module.parameters() if p.is_floating_point())
        for tensor in (*parameters, *self.module.buffers()):
            dist.broadcast(tensor.detach(), group=self.group, group_src=0)


@defect(cause="state", caught_by="test_any_history_is_as_without_sharding")
class NumbersItsState(SmallFSDP):
    """Keys of its state have a number that no other wrapper of the process has."""

    numbers = count()

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        self.prefix = f"{next(self.numbers)}."

    def state_dict(self, *args: Any, **options: Any) -> Any:
        return {self.prefix + key: value for key, value in super().state_dict(*args, **options).items()}

    def load_state_dict(self, state: Any, *args: Any, **options: Any) -> Any:
        return super().load_state_dict({key.removeprefix(self.prefix): x for key, x in state.items()}, *args, **options)


@defect(cause="random numbers", caught_by="test_the_random_state_is_the_callers")
class RoundsAtRandom(SmallFSDP):
    """Draws how gradients are rounded from the caller's generator: later dropout is another than without it."""

    def begin_reduce(self, shard: nn.Parameter, gradient: Tensor) -> None:
        torch.rand(())
        super().begin_reduce(shard, gradient)
