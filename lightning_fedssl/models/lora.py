"""Networks of timm with low-rank adapters: E. J. Hu et al., "LoRA", ICLR 2022, arXiv 2106.09685."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from lightning_fedssl.models.network import InShape, Network
from lightning_fedssl.storage.optional import optional


class TimmLoRA(Network):
    """A network of timm that trains low-rank adapters and its classifier.

    All other weights are frozen. The classifier starts at zero; ``model.init_head: labels`` starts
    it from logistic regression.

    Clients and server send the trained weights alone. ``model.init_from`` takes weights under
    timm's names.

    Args:
        model_name: A name of timm's, such as ``vit_tiny_patch16_224``.
        rank: r, the rank of the adapters.
        layers: Names of the linear layers or convolutions that get adapters.
        head: The name of the classifier.
        size: Height and width to which images are resized (bilinear); None leaves them as they are.
        arguments: Further arguments of ``timm.create_model``, such as ``{img_size: 32, patch_size:
            4}``.
        num_classes: Classes of the data.
        in_shape: ``(channels, height, width)`` of an image.

    Raises:
        ModuleNotFoundError: timm or peft is not installed.
    """

    def __init__(
        self,
        model_name: str,
        rank: int = 8,
        layers: Sequence[str] = ("qkv",),
        head: str = "head",
        size: int | None = None,
        arguments: dict[str, Any] | None = None,
        num_classes: int = 10,
        in_shape: InShape = (3, 224, 224),
    ) -> None:
        super().__init__()
        self.size = size
        peft = optional("peft")
        network = optional("timm").create_model(
            model_name, num_classes=num_classes, in_chans=in_shape[0], **arguments or {}
        )
        for weight in network.get_submodule(head).parameters():
            nn.init.zeros_(weight)  # random logits of pretrained features are large and wrong
        self.adapted = peft.get_peft_model(
            network, peft.LoraConfig(r=rank, target_modules=[*layers], modules_to_save=[head])
        )

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``(batch, num_classes)``."""
        if self.size is not None:
            x = F.interpolate(x, (self.size, self.size), mode="bilinear", antialias=True)
        logits: Tensor = self.adapted(x)
        return logits
