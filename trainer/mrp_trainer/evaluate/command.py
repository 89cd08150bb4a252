"""The command `mrp evaluate`: accuracy and cost of decoding modes on problems, with 95 % intervals.

The interval of a field NAME is the field NAME_95, [low, high]. It is Wilson's interval if the value
is a share of problems, and otherwise that of a bootstrap over problems (see `intervals`). The
counts of drafts by depth are defined in `acceptance`.
"""

import sys
from collections.abc import Mapping
from typing import Any, cast

from modeling_mrp.generate.option_table import closest_name
from modeling_mrp.generate.options import OPTION_NAMES, MRPGenerationConfig, resolved
from modeling_mrp.model.configuration import MRPConfig

from ..data.tasks import Family, Split
from ..loading import load_config, load_generation_fields, load_model, tokenizer_of
from .acceptance import acceptance_by_depth, mean_accepted_length
from .cost import charged_as
from .decoded import Decoded, decode_prompts
from .intervals import ratio_of_sums, wilson
from .options import EvaluateOptions, generate_options
from .problem_sets import ProblemSet, family_set, file_set
from .provenance import header
from .results import ResultsFile
from .table import printing

_VERDICTS = {None: "not judged", True: "right", False: "wrong"}


def evaluate(options: EvaluateOptions) -> None:
    """Evaluate a model; print a table row or a JSON line for each problem set and each mode with
    values of its options. Files, prompts, options and the checkpoint's config are checked before
    the weights are read.

    Raises:
        ValueError: for malformed files, prompts that leave no room for an answer, options that
            `generate` refuses, or a damaged checkpoint.
        OSError: if the checkpoint does not exist.
    """
    config = load_config(options.model, options.revision)
    options = options.of_checkpoint(
        load_generation_fields(options.model, options.revision), config.has_head
    )
    for setting in options.settings():
        check_setting(setting, config)
    results = ResultsFile(options.output, "asked") if options.output else None
    tokenizer = tokenizer_of(options)
    of_both = {"count": options.count, "max_new_tokens": options.max_new_tokens}
    sets = []
    for family in options.families:
        sets.append(
            family_set(cast(Family, family), cast(Split, options.split), tokenizer, **of_both)
        )
    for path in options.prompts:
        sets.append(file_set(path, tokenizer, options.judge, options.chat, **of_both))
    for problem_set in sets:
        problem_set.check_room(config.max_position_embeddings)
    model = load_model(
        options.model, options.dtype, options.device, options.revision, options.backbone
    )
    if results is not None:
        results.begin(header("mrp evaluate", options, model))
    report(model, tokenizer, options, sets, results)


def check_setting(setting: Mapping[str, Any], config: MRPConfig) -> None:
    """Raise `ValueError` if `generate` would refuse an option of a setting for a model with this
    config, or if the setting's item "set" has an option that `generate` does not know.

    Args:
        setting: A dict from names of `generate` options to their values. Its item "set", if
            present, is a dict of further options, such as those that `--set NAME=VALUE` gives.
        config: The config of the model.
    """
    for name in setting.get("set", {}):
        if name not in OPTION_NAMES:
            raise ValueError(
                f"--set {name}: generate has no such option{closest_name(name, OPTION_NAMES)}"
            )
    MRPGenerationConfig(**generate_options(setting)).check(config.block_size, config.has_head)


def report(
    model: Any,
    tokenizer: Any,
    options: EvaluateOptions,
    sets: list[ProblemSet],
    results: ResultsFile | None,
) -> None:
    """Decode every problem set in every setting, print a measurement of each, and append it to a
    file.

    Args:
        model: An `MRPForCausalLM`.
        tokenizer: Its tokenizer.
        options: The options of the command. Its method `settings` lists the settings, each a mode
            with values of the mode's options.
        sets: The problem sets.
        results: The file of measurements; None if there is none. A measurement that is already in
            this file is not repeated. A table shows the earlier result; JSON output leaves it out.
    """
    settings = options.settings()
    with printing(options.json) as (print_line, print_text):
        for problem_set in sets:
            question = _question(options, model, problem_set)
            first = None
            arguments = (
                model,
                tokenizer,
                problem_set.prompts,
                problem_set.judge,
                problem_set.max_new_tokens,
                options.batch_size,
            )
            for setting in settings:
                identity = {
                    **problem_set.name,
                    **setting,
                    "set": setting.get("set"),
                    "asked": question,
                }
                earlier = None if results is None else results.find(**identity, first=settings[0])
                if earlier is not None:
                    print(
                        f"{problem_set.name} {setting}: in {options.output} already",
                        file=sys.stderr,
                    )
                    if not options.json:
                        print_line(earlier)
                    continue
                first = first or decode_prompts(*arguments, **generate_options(settings[0]))
                decoded = first
                if setting is not settings[0]:
                    decoded = decode_prompts(*arguments, **generate_options(setting))
                line = {**problem_set.name, **setting, **measurements(decoded, first)}
                line |= {
                    "draft_shortlist": shortlist_of(model, setting),
                    "charged_as": charged_as(model.config.hidden_size),
                    "block_size": model.config.block_size,
                    "first": settings[0],
                    "asked": question,
                }
                print_line(line)
                if results is not None:
                    results.add(line)
                for prompt, text, verdict in list(
                    zip(problem_set.prompt_texts, decoded.texts, decoded.verdicts, strict=True)
                )[: options.show]:
                    print_text(f"--- {prompt}\n{text}\n[{_VERDICTS[verdict]}]")


def shortlist_of(model: Any, setting: Mapping[str, Any]) -> int:
    """Return the number of tokens among which a head pass chooses at each position when a model
    decodes with the options `setting` (`ModeOptions.settings`). If `setting` does not name this
    number (`draft_shortlist`), return the default for the model. Return 0 if a head pass chooses
    among all tokens, or if the options use no head pass."""
    config, _ = resolved(model, None, dict(generate_options(setting)))
    drafting = config.mode(model.config.block_size).drafting
    if drafting is None:
        return 0
    return drafting.listed(model.config.vocab_size, bool(config.do_sample))


def _question(options: EvaluateOptions, model: Any, problem_set: ProblemSet) -> dict[str, Any]:
    """Collect the fields that identify a measurement: the model, the problems and the options that
    change results."""
    names = ("model", "tokenizer", "split", "judge", "chat", "batch_size")
    question: dict[str, Any] = {name: getattr(options, name) for name in names}
    question |= {"dtype": str(model.dtype), "device": str(model.device)}
    for name in ("revision", "backbone"):
        if getattr(options, name) is not None:
            question[name] = getattr(options, name)
    return question | {
        "problems": len(problem_set.prompts),
        "max_new_tokens": problem_set.max_new_tokens,
        "digest": problem_set.digest(),
    }


def measurements(decoded: Decoded, first: Decoded) -> dict[str, Any]:
    """Compute the measured fields of a result line of `mrp evaluate`, by name: accuracy, cost and
    acceptance of the mode in `decoded`, and the percentage of its texts that are equal to those of
    `first`, the first mode on the same problems. A field NAME_95 is the interval [low, high] of the
    field NAME."""
    line: dict[str, Any] = {
        "accuracy": None if decoded.accuracy is None else round(decoded.accuracy, 1)
    }
    if decoded.judged:
        line["accuracy_95"] = wilson(sum(decoded.judged), len(decoded.judged)).rounded(1, 100)
    speed = ratio_of_sums(decoded.tokens, decoded.row_forwards)
    assert speed is not None, "every prompt takes a forward"
    line |= {
        **decoded.costs(),
        "tokens_per_forward_95": speed.rounded(),
        "identical_to_first": round(100 * decoded.equal(first) / len(decoded.ids), 1),
        "identical_to_first_95": wilson(decoded.equal(first), len(decoded.ids)).rounded(1, 100),
    }
    length = mean_accepted_length(decoded)
    if decoded.offered_at_depth.shape[1] and length is not None:
        depths = acceptance_by_depth(decoded)
        line |= {
            "mean_accepted_length": round(length.value, 3),
            "mean_accepted_length_95": length.rounded(),
            "acceptance_by_depth": [round(100 * rate.value, 1) for _, rate in depths],
            "acceptance_by_depth_95": [rate.rounded(1, 100) for _, rate in depths],
            "offered_by_depth": [offered for offered, _ in depths],
        }
    return {**line, "seconds": round(decoded.seconds, 1), **decoded.forwards}
