"""Install SGLang for CPU tests into the environment of the Python that runs this file."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

HERE = Path(__file__).parent


def pip_install(*arguments: str) -> None:
    """Run pip in this environment; its failure is ours."""
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "-c", str(HERE / "constraints.txt"), *arguments],
        check=True,
    )


# torch by itself first: asked for by others without a version, a CUDA build would come instead.
pip_install("torch")
pip_install("-r", str(HERE / "requirements.txt"))
# Without their dependencies: sglang's are for CUDA, torchvision's would replace torch.
pip_install("--no-deps", "sglang", "torchvision")
shutil.copytree(HERE / "site", sysconfig.get_paths()["purelib"], dirs_exist_ok=True)
