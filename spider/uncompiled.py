"""Operations that torch.compile must not trace.

Import this only while it traces: `torch.compiler.disable` imports torch._dynamo, which takes a
second.
"""

import torch
import torch.nn.functional as F

grouped_mm = torch.compiler.disable(F.grouped_mm)  # traced, it works only in bf16
