"""Deploy the app as a Hugging Face Space.

    python -m paligemma.tools.deploy USERNAME/SPACE [--hardware zero-a10g] [--model HUB_ID] [--private] [--dry-run]

Log in first with `hf auth login` or set HF_TOKEN. The Space is created if necessary and receives one commit with the
files of the app; its other files are not changed. Two files are adapted: requirements.txt to the PyTorch of the
hardware, and the front matter of README.md to the Space's thumbnail URL and hardware. For gated weights, add an access
token as a secret named HF_TOKEN in the Space's settings; the local access token is not uploaded.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from huggingface_hub import CommitOperationAdd, HfApi, SpaceHardware
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError

ROOT = Path(__file__).resolve().parents[2]
PATTERNS = ("app.py", "LICENSE", "README*.md", "requirements.txt", "pyproject.toml", "paligemma/**/*", "assets/**/*")
ZERO_GPU = SpaceHardware.ZERO_A10G.value
CPU = (SpaceHardware.CPU_BASIC.value, SpaceHardware.CPU_UPGRADE.value)
ZERO_GPU_TORCH = "torch>=2.8,<2.12"  # versions supported by ZeroGPU
CPU_WHEELS = "--extra-index-url https://download.pytorch.org/whl/cpu"  # wheels without CUDA, a tenth of the size


def files_to_upload(root: Path = ROOT) -> Iterator[str]:
    """Yield the relative paths of the files that a Space needs; hidden files and bytecode are excluded."""
    for pattern in PATTERNS:
        for path in sorted(root.glob(pattern)):
            name = path.relative_to(root)
            if path.is_file() and not any(part.startswith((".", "__pycache__")) for part in name.parts):
                yield name.as_posix()


def requirements_for(text: str, hardware: str) -> str:
    """Return requirements.txt adapted to the hardware. Raises ValueError if it does not require torch."""
    if not re.search(r"^torch>=", text, re.M):
        raise ValueError("requirements.txt must contain a line that starts with torch>=.")
    if hardware == ZERO_GPU:
        return re.sub(r"^torch>=.*$", ZERO_GPU_TORCH, text, flags=re.M)
    return f"{CPU_WHEELS}\n{text}" if hardware in CPU else text


def readme_for(text: str, space: str, hardware: str) -> str:
    """Return README.md with an absolute thumbnail URL, as the hub requires, and the suggested hardware."""
    front_matter = rf"thumbnail: https://huggingface.co/spaces/{space}/resolve/main/\1\nsuggested_hardware: {hardware}"
    return re.sub(r"^thumbnail: (\S+)$", front_matter, text, count=1, flags=re.M)


def changed_files(space: str, hardware: str, root: Path = ROOT) -> dict[str, str]:
    """Return the content of the files that are adapted to the Space."""
    requirements, readme = ((root / name).read_text(encoding="utf-8") for name in ("requirements.txt", "README.md"))
    return {
        "requirements.txt": requirements_for(requirements, hardware),
        "README.md": readme_for(readme, space, hardware),
    }


def print_dry_run(changed: dict[str, str]) -> None:
    """Print each file with its size, and the diffs of the changed files."""
    for name in files_to_upload():
        size = len(changed[name].encode()) if name in changed else (ROOT / name).stat().st_size
        print(f"{size:>12,}  {name}{'  (changed)' if name in changed else ''}")
    for name, text in changed.items():
        before = (ROOT / name).read_text(encoding="utf-8").splitlines()
        print(*difflib.unified_diff(before, text.splitlines(), name, f"{name} (Space)", lineterm="", n=0), sep="\n")


def upload(api: HfApi, space: str, hardware: str, model: str | None, private: bool) -> str:
    """Create the Space if necessary and commit the files; return its URL."""
    changed = changed_files(space, hardware)
    url = api.create_repo(
        space,
        repo_type="space",
        space_sdk="gradio",
        space_hardware=SpaceHardware(hardware),
        private=private,
        exist_ok=True,
    )
    if model:
        api.add_space_variable(space, "MODEL_ID", model)
    operations = [
        CommitOperationAdd(name, changed[name].encode() if name in changed else ROOT / name)
        for name in files_to_upload()
    ]
    api.create_commit(space, operations, commit_message="Upload the app", repo_type="space")
    return str(url)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m paligemma.tools.deploy", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("space", help="Space id, such as username/paligemma")
    parser.add_argument(
        "--hardware", default=ZERO_GPU, choices=[hardware.value for hardware in SpaceHardware], metavar="NAME",
        help="hardware id, such as cpu-basic or t4-small (default: %(default)s, ZeroGPU)",
    )  # fmt: skip
    parser.add_argument("--model", help="hub id of the model (default: the bundled model)")
    parser.add_argument("--private", action="store_true", help="make the Space private")
    parser.add_argument("--dry-run", action="store_true", help="print the files without uploading them")
    arguments = parser.parse_args()
    if arguments.dry_run:
        return print_dry_run(changed_files(arguments.space, arguments.hardware))
    try:
        url = upload(HfApi(), arguments.space, arguments.hardware, arguments.model, arguments.private)
    except (HfHubHTTPError, HFValidationError, LocalTokenNotFoundError) as error:
        sys.exit(
            f"Upload failed: {error}\nLog in with `hf auth login` and use a Space of your own account: USERNAME/SPACE."
        )
    print(f"Uploaded to {url}. The Space builds in a few minutes.")


if __name__ == "__main__":
    main()
