"""Ten models by others, as `python -m shardmark.predict` takes them: small, by configuration, without weights."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

Made = tuple[nn.Module, tuple[Tensor, ...], Callable[..., Tensor]]

SMALL = {"vocab_size": 1000, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA_LIKE = {**SMALL, "intermediate_size": 128, "num_key_value_heads": 2, "max_position_embeddings": 128}


def _of_tokens(model: nn.Module, vocabulary: int, context: int = 32) -> Made:
    tokens = torch.randint(vocabulary, (2, context))
    return model, (tokens,), lambda model, tokens: model(input_ids=tokens, labels=tokens).loss


def _of_images(model: nn.Module, size: int = 64, classes: int = 10) -> Made:
    images, classes_of = torch.randn(2, 3, size, size), torch.randint(classes, (2,))
    return model, (images, classes_of), lambda model, images, classes_of: cross_entropy(model(images), classes_of)


def gpt2() -> Made:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=1000, n_positions=128, n_embd=64, n_layer=2, n_head=4)
    return _of_tokens(GPT2LMHeadModel(config), 1000)


def llama() -> Made:
    from transformers import LlamaConfig, LlamaForCausalLM

    return _of_tokens(LlamaForCausalLM(LlamaConfig(**LLAMA_LIKE)), 1000)


def llama_8b() -> Made:
    """Llama 3.1 8B by its configuration, in bfloat16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        rope_theta=500_000.0,
        dtype="bfloat16",
    )
    return _of_tokens(LlamaForCausalLM(config).bfloat16(), 128_256, 2048)


def qwen3() -> Made:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return _of_tokens(Qwen3ForCausalLM(Qwen3Config(**LLAMA_LIKE, head_dim=16)), 1000)


def mixtral() -> Made:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(**LLAMA_LIKE, num_local_experts=4, num_experts_per_tok=2)
    return _of_tokens(MixtralForCausalLM(config), 1000)


def resnet50() -> Made:
    from torchvision.models import resnet50

    return _of_images(resnet50(num_classes=10))


def torchvision_vit() -> Made:
    from torchvision.models import VisionTransformer

    return _of_images(VisionTransformer(64, 16, num_layers=2, num_heads=4, hidden_dim=64, mlp_dim=128, num_classes=10))


def timm_vit() -> Made:
    from timm.models.vision_transformer import VisionTransformer

    return _of_images(VisionTransformer(64, 16, embed_dim=64, depth=2, num_heads=4, num_classes=10))


def transformer_encoder() -> Made:
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    batch = torch.randn(2, 32, 64), torch.randn(2, 32, 64)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return encoder, batch, lambda model, x, y: (model(x) - y).square().mean()


class Language(nn.Module):
    """An LSTM over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm = nn.Embedding(1000, 64), nn.LSTM(64, 64, 2, batch_first=True)
        self.head = nn.Linear(64, 1000)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(tokens))[0])  # (batch, sequence, vocabulary)


def lstm() -> Made:
    def loss(model: nn.Module, tokens: Tensor) -> Tensor:
        return cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    return Language(), (torch.randint(1000, (2, 33)),), loss


class UNet(nn.Module):
    """Two levels down and up again (Ronneberger, Fischer, Brox, 2015)."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.middle = _convolutions(3, 16), _convolutions(16, 32)
        self.up, self.last = nn.ConvTranspose2d(32, 16, 2, stride=2), _convolutions(32, 16)
        self.head = nn.Conv2d(16, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skipped = self.down(x)
        x = self.up(self.middle(nn.functional.max_pool2d(skipped, 2)))
        return self.head(self.last(torch.cat([skipped, x], dim=1)))


def _convolutions(into: int, out: int) -> nn.Sequential:
    def block(into: int) -> list[nn.Module]:
        return [nn.Conv2d(into, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU()]

    return nn.Sequential(*block(into), *block(out))


def unet() -> Made:
    images, classes = torch.randn(2, 3, 32, 32), torch.randint(2, (2, 32, 32))
    return UNet(), (images, classes), lambda model, images, classes: cross_entropy(model(images), classes)


def feed_forward() -> Made:
    """Two large weights, of which an optimizer's state takes all but a few bytes."""
    model = nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 1024))
    return model, (torch.randn(64, 1024),), lambda model, x: model(x).square().mean()


def _with_operators_of_torchvision() -> None:
    """torchvision's wheel of PyPI is built for CUDA: beside a CPU's torch its library does not load, and importing it
    then fails for want of two operators that no model here calls."""
    library: Any = torch.library.Library("torchvision", "FRAGMENT")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _LIBRARIES.append(library)


_LIBRARIES: list[Any] = []
with suppress(PackageNotFoundError):
    if torch.version.cuda is None and torch.version.hip is None and "+cpu" not in version("torchvision"):
        _with_operators_of_torchvision()
