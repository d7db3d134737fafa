"""Loaded at every start of this environment's Python: lets SGLang run where there is no CUDA.

Costs nothing until torchvision is imported. Then two operator schemas are declared that its compiled
part would bring and that it registers shapes for at import.
"""

import os
import sys

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")


class _BeforeTorchvision:
    """Declares the operators just before torchvision is first imported, then steps aside."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(cls)
            import torch

            cls.library = torch.library.Library("torchvision", "DEF")
            for operator in ("nms", "qnms"):
                cls.library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


sys.meta_path.insert(0, _BeforeTorchvision)
