"""What training a head at 4B takes, from data sets by their names to a head: records, hours, bytes.

    python -m benchmarks.training_plan

Prints two tables: hours by data set and GPU, and what a run holds. Nothing of this was run on a
GPU. Records and bytes are those of the data sets' cards on the Hub. Decoding is `mrp decode` as it
is by default: `static`, 32 rows at a time, at most 256 new tokens for each record, by the roofline
of `cost_model`. Training is the recipe `sdar-4b-mrp-ours` with rows as full as packing makes them,
by the FLOPs of `mrp train head --dry-run`. Assumed are 4 bytes of text a token, texts as long as
those of the data set, and that large products reach 60 % of a GPU's peak.
"""

import re
from dataclasses import dataclass

from mrp_trainer.evaluate.roofline import PUBLISHED, Counts, Device, round_seconds
from mrp_trainer.publish.card import markdown_table
from mrp_trainer.train.runs import dry_run
from mrp_trainer.train.settings import read_settings

from .common import HUB_CONFIGS, TINY, parser_of
from .predicted_rounds import DEVICES

RECIPE = "sdar-4b-mrp-ours"
GPUS = [device for device in DEVICES if device.name in ("H100", "H200")]  # which hold a run
BYTES_PER_TOKEN = 4.0
NEW_TOKENS, ROWS, PREFIX = 256, 32, 512
ROW_LENGTH = 4096


@dataclass(frozen=True)
class DataSet:
    """Chats on the Hub: records, bytes of their text, and bytes to download.

    Attributes:
        name: As `--data` takes it.
        records, bytes: Those that train, uncompressed.
        download: Bytes of the whole data set.
    """

    name: str
    records: int
    bytes: float
    download: float

    def first(self, records: int) -> "DataSet":
        """Return the first records of it (`--limit`)."""
        share = records / self.records
        return DataSet(f"{self.name}, the first", records, self.bytes * share, self.download)


# By their cards, read 2026-11-29.
TULU = DataSet("allenai/tulu-3-sft-mixture", 939_343, 2_914_250_826, 1_412_954_868)
ULTRACHAT = DataSet("HuggingFaceH4/ultrachat_200k", 207_865, 1_397_058_554, 1_624_049_723)
DATA_SETS = (TULU.first(20_000), TULU.first(200_000), ULTRACHAT, TULU)


def decoding_hours(data: DataSet, device: Device) -> float:
    """Predict the hours in which `mrp decode` answers all prompts: a token a row and forward."""
    seconds = round_seconds(PUBLISHED["4B"], device, Counts(1.0, 1.0), ROWS, PREFIX)
    return data.records * NEW_TOKENS * seconds / ROWS / 3600


def plan() -> str:
    """Tabulate hours by data set and GPU, then what a run holds."""
    model = str(HUB_CONFIGS / "sdar-4b-mrp")
    flags = {"model": model, "tokenizer": str(TINY), "data": ["-"], "output_dir": "head"}
    needs = dry_run(read_settings("mrp", RECIPE, flags))

    def needed(pattern: str) -> float:
        (number,) = re.findall(pattern, needs)
        return float(number.replace(",", ""))

    step_flops = 1e12 * needed(r"products of a step: (\S+) TFLOP")
    rows_per_step = int(needed(r"rows per step: (\d+)"))
    trained = needed(r"of which (\S+) train")
    backbone = needed(r"parameters: (\S+), of") - trained
    lines = []
    for data in DATA_SETS:
        tokens = data.bytes / BYTES_PER_TOKEN
        steps = max(1, round(tokens / ROW_LENGTH / rows_per_step))
        line = [data.name, f"{data.records:,}", f"{tokens / 1e6:,.0f}", f"{steps:,}"]
        for device in GPUS:
            training = steps * step_flops / (device.peak * device.achievable) / 3600
            line.append(f"{decoding_hours(data, device):.1f} + {training:.1f}")
        lines.append(line)
    head = ["data set", "records", "million tokens", "steps"]
    head += [f"{device.name}, hours" for device in GPUS]
    downloads = f"{ULTRACHAT.download / 1e9:.1f}; {TULU.download / 1e9:.1f} GB"
    held = [
        ["backbone, bfloat16, on the disk", f"{2 * backbone / 1e9:.1f} GB"],
        ["download of ultrachat_200k; of tulu-3-sft-mixture", downloads],
        ["a head saved alone, float32", f"{4 * trained / 1e9:.1f} GB"],
        ["a checkpoint, with the optimizer's state", f"{12 * trained / 1e9:.1f} GB"],
        ["memory of one GPU, a row at a time", f"{needed('in all: (.+) GiB'):.1f} GiB"],
    ]
    return "\n\n".join([markdown_table(head, lines), markdown_table(["a run", ""], held)])


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    parser_of("training_plan", __doc__ or "").parse_args(arguments)
    print(plan())


if __name__ == "__main__":
    main()
