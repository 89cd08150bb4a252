"""A walk through the habits of Hugging Face users, in an environment that has the package from its wheel: `make walkthrough`.

Started in an empty folder, with the numbers of the parts to go through; all where none is given. One line for each habit, `ok`
or `refused` with the message, and the exit status is 1 if one of them went another way.
"""

import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
CHECKPOINT = HERE.parent.parent / "hub_configs" / "sdar-tiny-mrp"

sys.path.append(str(HERE.parent))
from hub_server import HubServer  # noqa: E402


def main() -> int:
    """Give a process what a user has, a checkpoint and an account on a Hub, and let it go; return its exit status."""
    if any(Path().iterdir()):
        print(f"{Path().resolve()} is not empty: start in an empty folder")
        return 2
    shutil.copytree(CHECKPOINT, "work/sdar-tiny-mrp")
    home = Path("home").resolve()
    with HubServer() as hub:
        hub.add_user("alice", token="hf_alice", organizations=["org"])
        environment = hub.environment(home, "hf_alice", OMP_NUM_THREADS="1", TERM="dumb", COLUMNS="120")
        return subprocess.run([sys.executable, str(HERE / "walk.py"), *sys.argv[1:]], cwd="work", env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
