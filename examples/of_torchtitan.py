"""torchtitan 0.2.2's own `parallelize_llama` on the suite's decoder."""

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torchtitan.config import TORCH_DTYPE_MAP, JobConfig
from torchtitan.distributed import ParallelDims, parallel_dims
from torchtitan.models.llama3.infra.parallelize import parallelize_llama

from shardmark.api import Unsupported

TORCH_DTYPE_MAP["float64"] = torch.float64  # the suite's models; torchtitan would cast to bfloat16
ORDER = ("dp", "shard", "tp")  # torchtitan builds its mesh in this order


class Blocks(nn.ModuleList):
    """torchtitan's blocks are in a ModuleDict, under the same names."""

    def values(self):
        return self._modules.values()

    def items(self):
        return self._modules.items()


def parallelize(model, mesh):
    size = {name: mesh.size(dim) for dim, name in enumerate(mesh.mesh_dim_names)}
    if [*size] != [name for name in ORDER if name in size]:
        raise Unsupported("adapted for dp, shard and tp, in this order")
    copies, shards, tp = (size.get(name, 1) for name in ("dp", "shard", "tp"))
    if shards == 1:  # torchtitan: "DDP has not supported > 1D parallelism", and its DDP takes no unused parameters
        copies, shards = 1, copies
    if (model.size.tied and shards * tp > 1) or (model.size.experts and tp > 1):
        raise Unsupported("torchtitan's Llama 3 has neither tied embeddings nor experts")
    config = JobConfig()
    config.training.mixed_precision_param = config.training.mixed_precision_reduce = "float64"
    config.training.seq_len = 12
    config.parallelism.disable_loss_parallel = True  # the suite's loss takes whole logits
    config.activation_checkpoint.mode = "full"
    dims = ParallelDims(
        dp_replicate=copies, dp_shard=shards, cp=1, tp=tp, pp=1, ep=1, etp=1, world_size=copies * shards * tp
    )
    parallel_dims.device_type = mesh.device_type  # "cuda" where torchtitan finds no accelerator
    model.layers, model.model_args = Blocks(model.layers), None
    if tp > 1:  # torchtitan's attention is called with (x, rope, mask, positions), and its plan counts them
        for layer in model.layers:
            layer.attention.register_forward_pre_hook(lambda _, given: (*given, None, None))
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    model = parallelize_llama(model, dims, config)
    for name, parameter in model.named_parameters():  # PyTorch's SequenceParallel thaws them
        parameter.requires_grad_(name.replace("_checkpoint_wrapped_module.", "") not in frozen)
    for module in model.modules():
        if isinstance(module, FSDPModule):  # torchtitan's are sums, for its step divides by the tokens of all ranks
            module.set_gradient_divide_factor(copies * shards)
    if tp > 1:
        for layer in model.layers:
            layer.attention.register_forward_pre_hook(lambda _, given: given[:2])
    return model
