"""The engine's side of the plugin: what is registered with the engine, and the hooks. A hook is
called in place of a function of the engine; it gets that function as `original`."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import yaml
from fastapi import HTTPException
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed import get_tp_group
from sglang.srt.dllm.algorithm import algo_name_to_cls
from sglang.srt.dllm.config import DllmConfig
from sglang.srt.models.registry import ModelRegistry
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_exec
from transformers import AutoConfig

from modeling_mrp import MRPConfig

from . import ALGORITHM
from .agreement import agree_in
from .algorithm import MRP
from .checkpoint import ARCHITECTURES, open_checkpoint
from .head_graphs import record_head
from .model import MRPForCausalLM, SDARMRPForCausalLM
from .options import settings_of
from .requests import GREEDY, refusal_of_body
from .room import fetch_fitting, schedule_block
from .usage import META_KEY, report_of


class PublishedConfig(MRPConfig):
    """The config of published SDAR checkpoints: an `MRPConfig` whose `model_type` is `sdar`. Once
    it is registered with transformers, these checkpoints open without the code in their
    repositories, which need not be trusted."""

    model_type = "sdar"


def register_parts() -> None:
    """Register the algorithm, models, configs and hooks with the engine. This function may be
    called again."""
    algo_name_to_cls[ALGORITHM] = MRP
    ModelRegistry.models |= {
        "MRPForCausalLM": MRPForCausalLM,
        "SDARMRPForCausalLM": SDARMRPForCausalLM,
    }
    for config in (MRPConfig, PublishedConfig):
        AutoConfig.register(config.model_type, config, exist_ok=True)
    hooks: dict[str, Callable[..., Any]] = {
        "sglang.srt.dllm.config.DllmConfig.from_server_args": dllm_config,
        "sglang.srt.model_executor.model_runner.ModelRunner.init_cuda_graphs": record_graphs,
        "sglang.srt.model_executor.model_runner.ModelRunner.init_decode_cuda_graph": record_graphs,
        "sglang.srt.managers.tp_worker.TpModelWorker._forward_batch_generation_dllm": hold_batch,
        "sglang.srt.dllm.mixin.scheduler.SchedulerDllmMixin._fetch_waiting_reqs": fetch_fitting,
        "sglang.srt.managers.schedule_policy.PrefillAdder._get_dllm_remain_tokens": schedule_block,
        "sglang.srt.configs.model_config.ModelConfig."
        "get_default_sampling_params": sampling_defaults,
        "sglang.srt.managers.tokenizer_manager.TokenizerManager.pause_generation": reject_retract,
        "sglang.srt.managers.tokenizer_manager.TokenizerManager._validate_one_request": check_body,
        "sglang.srt.managers.scheduler_components.output_streamer.SchedulerOutputStreamer."
        "build_additional_customized_info": stream_reports,
        "sglang.srt.managers.tokenizer_manager.TokenizerManager."
        "update_request_meta_info": add_report,
    }
    for target, hook in hooks.items():
        HookRegistry.register(target, hook, HookType.AROUND)


def dllm_config(
    original: Callable[[Any], DllmConfig | None], server_args: Any
) -> DllmConfig | None:
    """Make the engine's `DllmConfig` for an MRP checkpoint, with the block size and the mask id
    from the checkpoint's config. Return None if no algorithm for diffusion models is chosen.

    Args:
        original: The engine's `DllmConfig.from_server_args`, in whose place the engine calls this
            function; it is called for other checkpoints.
        server_args: The engine's `ServerArgs`.

    Raises:
        ValueError: if the checkpoint is damaged, if the algorithm does not serve it, or if options
            are invalid.
    """
    args = resolving_view(server_args)
    if args.dllm_algorithm is None:
        return None
    model = ModelConfig.from_server_args(
        server_args, model_path=args.model_path, model_revision=args.revision
    )
    architecture = (model.hf_config.architectures or ["none"])[0]
    if architecture not in ARCHITECTURES:
        if args.dllm_algorithm == ALGORITHM:
            raise ValueError(
                f"--dllm-algorithm {ALGORITHM} serves checkpoints with an MRP head "
                f"({' or '.join(ARCHITECTURES)}), and the architecture of {args.model_path} is "
                f"{architecture}: use --dllm-algorithm LowConfidence for a backbone alone"
            )
        return original(server_args)
    if args.dllm_algorithm == ALGORITHM:
        check_arguments(args)
    checkpoint = open_checkpoint(args.model_path, args.revision, args.load_format != "dummy")
    options = yaml_mapping(args.dllm_algorithm_config)
    block = checkpoint.config.block_size
    config = DllmConfig(
        algorithm=args.dllm_algorithm,
        algorithm_config=options,
        block_size=block,
        mask_id=checkpoint.config.mask_token_id,
        max_running_requests=args.max_running_requests or 1,  # rows of a forward, see `rows_of`
        first_done_first_out_mode=args.dllm_fdfo,
    )
    if args.dllm_algorithm == ALGORITHM:
        if args.page_size is not None and args.page_size > block:
            raise ValueError(
                f"--page-size is {args.page_size}: MRP keeps blocks in whole pages, so use "
                f"{block}, or leave it out"
            )
        config.mrp_settings = settings_of(
            options, checkpoint.defaults, block, checkpoint.config.has_head, args.tp_size
        )
        config.max_running_requests = max(
            1, config.max_running_requests // config.mrp_settings.mode.width
        )
    return config


def check_arguments(args: Any) -> None:
    """Raise `ValueError` if the algorithm does not work with the arguments of a server: if
    `--no-dllm-fdfo` turns first-done-first-out scheduling off, if `--max-running-requests` is
    missing, or if `--enable-dp-attention` is given. `args` is a view of the engine's
    `ServerArgs`."""
    problems = {
        "--no-dllm-fdfo is given, and MRP needs first-done-first-out scheduling, in which no row "
        "waits: leave it out": (not args.dllm_fdfo),
        "--max-running-requests is not given, and the engine "
        "would take one at a time: set it to the requests that "
        "may be decoded together (16, for instance)": args.max_running_requests is None,
        "--enable-dp-attention is given, and MRP does not serve with "
        "it: leave it out": args.enable_dp_attention,
    }
    if reasons := [reason for reason, applies in problems.items() if applies]:
        raise ValueError("; ".join(reasons))


def yaml_mapping(path: str | None) -> dict[str, Any]:
    """Read the options in the file of `--dllm-algorithm-config`. Without a file, return no options.

    Raises:
        ValueError: if the file holds anything but a mapping.
    """
    if path is None:
        return {}
    with open(path, encoding="utf-8") as file:
        options = yaml.safe_load(file) or {}
    if not isinstance(options, dict):
        raise ValueError(
            f"{path} of --dllm-algorithm-config holds a {type(options).__name__}: write one option "
            "a line, 'name: value'"
        )
    return options


def sampling_defaults(original: Callable[[Any], dict[str, Any]], config: Any) -> dict[str, Any]:
    """Return the default sampling parameters, which the engine uses where a chat gives none.

    Under the algorithm `MRP`, the only default is a temperature of 0, which makes decoding greedy.
    Under other algorithms, the defaults are those of `original`.

    Args:
        original: The engine's own method, in whose place the engine calls this function.
        config: The engine's `ModelConfig`.
    """
    return dict(GREEDY) if get_exec().dllm.dllm_algorithm == ALGORITHM else original(config)


def record_graphs(original: Callable[..., None], engine: Any, *args: Any, **more: Any) -> None:
    """Record the backbone's CUDA graphs by `original`, the engine's own method, in whose place this
    function is called; then record the head's graphs, if the head is used. `engine` is the engine's
    `ModelRunner`; further arguments are passed to `original`."""
    original(engine, *args, **more)
    if (
        get_exec().dllm.dllm_algorithm == ALGORITHM
        and DllmConfig.from_server_args(engine.server_args).mrp_settings.mode.uses_head
    ):
        engine.model.head_graphs = record_head(engine, agree_in(get_tp_group().cpu_group))


def hold_batch(
    original: Callable[..., Any], worker: Any, forward_batch: Any, batch: Any = None
) -> Any:
    """Run a round by `original`, the engine's own method, in whose place this function is called,
    and give the algorithm access to the scheduler's batch meanwhile.

    Args:
        original: Runs the round; its results are returned.
        worker: The engine's `TpModelWorker`, which has the algorithm.
        forward_batch: The engine's `ForwardBatch`.
        batch: The scheduler's batch, which has the requests and the cache of prefixes.
    """
    if not isinstance(worker.dllm_algorithm, MRP):
        return original(worker, forward_batch, batch)
    worker.dllm_algorithm.batch = batch
    try:
        return original(worker, forward_batch, batch)
    finally:
        worker.dllm_algorithm.batch = None


async def reject_retract(
    original: Callable[..., Awaitable[None]], manager: Any, request: Any
) -> None:
    """Raise an `HTTPException` with status 400 if a request to pause asks for the mode 'retract',
    which would end the engine. Pass other requests to `original`, the engine's own method, in whose
    place this function is called."""
    if request.mode == "retract" and get_exec().dllm.dllm_algorithm == ALGORITHM:
        raise HTTPException(
            400,
            "mode 'retract' is not served with MRP: 'in_place' keeps requests, 'abort' ends them",
        )
    await original(manager, request)


def check_body(
    original: Callable[..., None], manager: Any, request: Any, prompt: Sequence[int] | None
) -> None:
    """Check a request by the engine's own method and, under the algorithm `MRP`, by
    `refusal_of_body`: log-probabilities of the prompt and a `stop_regex` that is no regular
    expression are refused.

    Args:
        original: The engine's own check, in whose place the engine calls this function.
        manager: The engine's `TokenizerManager`.
        request: The engine's `GenerateReqInput`.
        prompt: The ids of the prompt, or None.

    Raises:
        ValueError: if the request is refused. The engine turns it into a response with status 400.
    """
    original(manager, request, prompt)
    if get_exec().dllm.dllm_algorithm == ALGORITHM and (
        reason := refusal_of_body(request, prompt or ())
    ):
        raise ValueError(reason)


def stream_reports(
    original: Callable[..., dict[str, list[Any]]], streamer: Any, reqs: Sequence[Any]
) -> dict[str, list[Any]]:
    """Return what the engine adds to the results that it streams: a dict of lists, each with an
    item for each request of `reqs`. The dict has the lists that `original` returns and, under
    `META_KEY`, a list of the costs and traces of each request (`report_of`).

    `original` is the engine's own method, in whose place this function is called. `streamer` is
    only passed on to `original`.
    """
    # the engine counts a token as sent by an empty answer, and would omit that token's
    # log-probability
    for req in reqs:
        req.send_output_token_logprobs_offset = len(req.output_ids_through_stop)
    return {**original(streamer, reqs), META_KEY: [report_of(req) for req in reqs]}


def add_report(
    original: Callable[..., None],
    manager: Any,
    meta_info: dict[str, Any],
    state: Any,
    info: dict[str, Any],
    index: int,
    *rest: Any,
) -> None:
    """Add the costs and traces of a request to the metadata of its response. If these contain
    provisional tokens (the block that is being decoded), also add the text of these tokens.

    Args:
        original: The engine's own method, in whose place the engine calls this function. It is
            called first, with a copy of `info` that lacks the costs and traces; if nothing else is
            in `info`, it is not called.
        manager: The engine's `TokenizerManager`.
        meta_info: The metadata of the response, which is changed.
        state: The engine's state of the request, for `original`.
        info: Maps names to lists with an item for each request, as `stream_reports` returns them.
        index: The index of the request in these lists.
        rest: Further arguments of `original`.
    """
    other_info = {key: values for key, values in info.items() if key != META_KEY}
    if other_info:
        original(manager, meta_info, state, other_info, index, *rest)
    if META_KEY in info and (report := info[META_KEY][index]) is not None:
        meta_info[META_KEY] = report
        if "provisional_ids" in report and manager.tokenizer is not None:
            report["provisional_text"] = manager.tokenizer.decode(report["provisional_ids"])
