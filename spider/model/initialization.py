"""Find parameters that nobody initialized."""

import math

from torch import Tensor, nn


class UninitializedTensors:
    """What of a module nobody has written since this was made: floats are filled with NaN, which has to go, and of
    other numbers a version is counted. On the meta device there is nothing to write."""

    def __init__(self, module: nn.Module):
        self.module = module
        for tensor in self._tensors().values():
            if tensor.is_floating_point():
                tensor.fill_(math.nan)
        self.before = {name: (tensor, tensor._version) for name, tensor in self._tensors().items()
                       if not tensor.is_floating_point()}

    def _tensors(self) -> dict[str, Tensor]:
        tensors = [*self.module.named_parameters(), *self.module.named_buffers()]
        return {name: tensor for name, tensor in tensors if not (tensor.is_meta or tensor.is_inference())}

    def names(self) -> list[str]:
        tensors = self._tensors()
        unwritten = {name: tensor is tensors.get(name) and tensor._version == version
                     for name, (tensor, version) in self.before.items()}
        return [name for name, tensor in tensors.items() if unwritten.get(name) or (
            tensor.is_floating_point() and bool(tensor.isnan().any()))]

    def reset(self):
        """Has the module that holds it initialize it, or the next one around that has a reset_parameters."""
        holders = []
        for name in self.names():
            path = name.split(".")[:-1]
            around = (self.module.get_submodule(".".join(path[:depth])) for depth in range(len(path), -1, -1))
            holders += [module for module in around if hasattr(module, "reset_parameters")][:1]
        for module in dict.fromkeys(holders):
            module.reset_parameters()
