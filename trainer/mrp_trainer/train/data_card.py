"""The card of a data set that `mrp decode` wrote: the README.md beside the data on the Hub."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import DatasetCard, DatasetCardData

from modeling_mrp.model.layouts import is_hub_id

from ..data.sources import DataPath
from ..outputs import write_output
from .options import DecodeOptions

_TEMPLATE = Path(__file__).with_name("data_card_template.md")


def write_data_card(
    options: DecodeOptions, decoded_by: Mapping[str, Any], lines: Sequence[str]
) -> None:
    """Write the card of a data set that `mrp decode` made, a README.md in Markdown. The card names
    no folder of this machine.

    Args:
        options: The options of the call. The card is written to the file `options.card`.
        decoded_by: The model and the settings of decoding, by name, as in the field `decoded_by` of
            the lines.
        lines: The JSON lines of the data set.
    """
    sources = [DataPath.of(path).path for path in options.data]
    on_hub = [path for path in sources if is_hub_id(path) and not Path(path).exists()]
    model = str(decoded_by["model"])
    named = model if is_hub_id(model) and not Path(model).exists() else Path(model).name
    tokens = 0
    for line in lines:
        tokens += len(json.loads(line).get("reveal_step", ()))
    data = DatasetCardData(
        source_datasets=on_hub or None,
        task_categories=["text-generation"],
        tags=["mrp", "block-diffusion"],
        configs=[{"config_name": "default", "data_files": Path(options.output).name}],
    )
    card = DatasetCard.from_template(
        data,
        template_path=str(_TEMPLATE),
        title=Path(options.output).stem,
        model=named,
        count=len(lines),
        tokens=tokens,
        settings=yaml.safe_dump({**decoded_by, "model": named}, sort_keys=False),
        data=", ".join(path if path in on_hub else Path(path).name for path in sources),
        file=Path(options.output).name,
    )
    write_output(str(options.card), f"{card}\n")
