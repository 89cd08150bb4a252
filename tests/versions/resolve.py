"""Whether the registry alone resolves the project for each Python, within constraints.txt and
without: `make resolve`.

It reads no pip configuration and no local wheels, downloads no package, and ends in an error if one
cannot be resolved.
"""

import sys
import tempfile
from pathlib import Path

from environments import CONSTRAINTS, PROJECT, PYTHONS, Failed, interpreters, resolve, wheel

# An engine's wheels bring versions of their own, which constraints.txt is not for; it has none for
# the newest Python.
ENGINE = "sglang"
NO_ENGINE = {"3.14"}
EVERY = ",".join(extra for extra in PROJECT["optional-dependencies"] if extra != ENGINE)
SHOWN = ("torch", "triton", "transformers", "huggingface-hub", "peft", "numpy")
CASES = [
    ("", "constraints.txt"),
    ("", "none"),
    (EVERY, "constraints.txt"),
    (EVERY, "none"),
    (ENGINE, "none"),
]


def main() -> int:
    """Print a line a case; return 1 if one does not resolve."""
    failures = []
    print(f"| Python | asked as | extras | constraints | {' | '.join(SHOWN)} |")
    print("|" + " --- |" * (4 + len(SHOWN)))
    with tempfile.TemporaryDirectory() as folder:
        package = wheel(Path(folder))
        for version in PYTHONS:
            asked = (
                version
                if version in interpreters()
                else f"{max(interpreters(), key=PYTHONS.index)}, wheels of {version}"
            )
            for extras, constraints in CASES:
                requirement = f"{package}[{extras}]" if extras else str(package)
                if extras == ENGINE and version in NO_ENGINE:
                    continue
                options = ["-c", str(CONSTRAINTS)] if constraints != "none" else []
                named = {"": "none", EVERY: f"all but {ENGINE}"}.get(extras, extras)
                try:
                    versions = resolve(version, [requirement], True, *options).versions
                    result = " | ".join(versions.get(name, "no") for name in SHOWN)
                except Failed as error:
                    failures.append(
                        f"Python {version}, extras {named}, constraints {constraints}:\n{error}"
                    )
                    result = "cannot be resolved"
                print(f"| {version} | {asked} | {named} | {constraints} | {result} |", flush=True)
    print("\n".join(["", *failures]), file=sys.stderr)
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
