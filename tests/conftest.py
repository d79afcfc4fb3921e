"""Triton's kernels run in its interpreter where there is no GPU.

Triton reads the variable when it is imported, and importing SGLang or torch may do that.
"""

import os
from pathlib import Path

if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
