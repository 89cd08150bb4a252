"""Show that today's code counts what older code counted, and note its digest in files of results.

    python -m benchmarks.confirm benchmarks/results/tiny_fresh_math.jsonl ...

The first problems of each line are decoded again, in its setting. If every number of tokens,
forwards and head passes is the same in all files, the headers of these lines take the digest of
today's decoding code, and name the commit that confirmed them; otherwise nothing is written. Files
of `benchmarks.frontier` can be confirmed, if they are of the embedded checkpoint.
"""

import json
from pathlib import Path
from typing import Any

import torch
from mrp_trainer.evaluate.provenance import commit, deciding
from mrp_trainer.evaluate.results import check_clean, with_headers
from mrp_trainer.outputs import replace_file

from modeling_mrp.generate.options import OPTION_NAMES

from .common import TINY, embedded_weights, load, parser_of
from .frontier import Decoder, problems_of, setting_name
from .measure import SAMPLE

# Options of the ways to decode that are no modes of `generate`.
OTHER_OPTIONS = {"graph", "policy", "reading", "head_prefix"}


def setting_of(line: dict[str, Any]) -> dict[str, Any]:
    """Return the setting of a line of `benchmarks.frontier`: its fields that are options."""
    setting = {}
    for name in line.keys() & OTHER_OPTIONS.union(OPTION_NAMES):
        setting[name] = line[name]
    return setting


def confirm(path: Path, decoder: Decoder) -> list[str]:
    """Decode the first problems of each line of a file again; return a message for each line whose
    counts differ.

    Raises:
        ValueError: if a line has no counts of single problems, or is of other weights.
    """
    messages = []
    for header, line in with_headers(map(json.loads, path.read_text().splitlines())):
        if "sample" not in line or header["backbone"] != embedded_weights()["backbone"]:
            raise ValueError(f"{path}: no counts of single problems of {TINY.name}: measure again")
        asked = line["asked"]
        count = max(SAMPLE, asked["problems"] // 2)  # of source, a half was measured
        chosen = problems_of(line["family"], asked["split"], count, asked.get("seed", 0))
        found = decoder.decoded(setting_of(line), chosen[:SAMPLE]).sample()
        if found != line["sample"]:
            name = f"{line['family']}, {setting_name(line)}"
            messages.append(f"{path}: {name}: {line['sample']} then, {found} today")
    return messages


def restamped(path: Path) -> str:
    """Return the text of a file with today's digest in its headers."""
    lines = []
    for line in map(json.loads, path.read_text().splitlines()):
        if "benchmark" in line:
            line |= {"deciding": deciding(), "confirmed_at": commit()}
        lines.append(json.dumps(line) + "\n")
    return "".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    parser = parser_of("confirm", __doc__ or "")
    parser.add_argument("files", type=Path, nargs="+")
    options = parser.parse_args(arguments)
    for path in options.files:
        check_clean(path, {"commit": commit()})
    model, tokenizer = load(TINY)
    decoder = Decoder(model.to(torch.float64), tokenizer, SAMPLE)
    messages = list[str]()
    for path in options.files:
        messages += confirm(path, decoder)
    if messages:
        parser.error("\n".join(["the counts are not the same:", *messages]))
    for path in options.files:
        replace_file(path, restamped(path).encode())
        print(f"{path}: the same counts as by today's code, {deciding()}")


if __name__ == "__main__":
    main()
